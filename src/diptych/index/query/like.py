"""SQL's LIKE in linear time: ``%`` any characters, ``_`` one character, everything else itself.

A pattern is cut at its ``%`` into pieces. Each piece is looked for behind the one before it, at the first place where
it fits, and is never looked for again: there is nothing to go back to. A piece of plain characters is found by
``str.find``; one with ``_`` by a bit for each of its characters (Shift-And, Baeza-Yates and Gonnet 1992), which takes
the same few steps for each character of the value, whatever the pattern.
"""

from __future__ import annotations

MAX_PATTERN = 256  # characters: the bits of a piece stay a few machine words


class Like:
    """A compiled pattern; calling it says whether a whole value fits. Case matters: fold both sides before."""

    def __init__(self, pattern: str) -> None:
        first, *rest = pattern.split("%")
        self._head = _Piece(first)
        self._open = bool(rest)  # whether there is any %
        self._middle = [_Piece(piece) for piece in rest[:-1] if piece]
        self._tail = _Piece(rest[-1] if rest else "")

    def __call__(self, value: str) -> bool:
        """Whether the value fits."""
        if not self._open:
            return len(value) == self._head.size and self._head.fits(value, 0)
        at, end = self._head.size, len(value) - self._tail.size
        if at > end or not self._head.fits(value, 0) or not self._tail.fits(value, end):
            return False
        for piece in self._middle:
            at = piece.find(value, at, end)
            if at < 0:
                return False
            at += piece.size
        return True


class _Piece:
    """Characters of a pattern between two ``%``."""

    def __init__(self, text: str) -> None:
        self.text, self.size = text, len(text)
        self._fixed = [(at, c) for at, c in enumerate(text) if c != "_"]
        self._masks: dict[str, int] = {}
        if "_" in text and self._fixed:
            anything = sum(1 << at for at, c in enumerate(text) if c == "_")
            self._anything = anything
            for at, c in self._fixed:
                self._masks[c] = self._masks.get(c, anything) | 1 << at

    def fits(self, value: str, at: int) -> bool:
        """Whether the piece stands at one place."""
        if len(self._fixed) == self.size:
            return value.startswith(self.text, at)
        return len(value) >= at + self.size and all(value[at + n] == c for n, c in self._fixed)

    def find(self, value: str, start: int, end: int) -> int:
        """The first place within the bounds where the piece stands, −1 without one."""
        if not self._masks:  # plain characters, or as many as there are _
            return (
                value.find(self.text, start, end)
                if self._fixed
                else start
                if start + self.size <= end
                else -1
            )
        reached, last, masks, other = 0, 1 << self.size - 1, self._masks, self._anything
        for at in range(start, end):
            reached = (reached << 1 | 1) & masks.get(value[at], other)
            if reached & last:
                return at - self.size + 1
        return -1
