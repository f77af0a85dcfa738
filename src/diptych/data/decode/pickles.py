"""Pickles of plain arrays, read without running them: the one reader for every pickle the package accepts.

A pickle is a program. This module follows its instructions itself and knows only those that numbers, texts, lists,
dicts and numpy arrays need; no name in the file is ever imported or called. What an array is made of is checked in
``pickle_arrays``. Anything else is refused with one sentence, and memory stays in proportion to the file.
"""

from __future__ import annotations

import codecs
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from diptych.data.decode.pickle_arrays import NAMES, Array, Name, RefusedError, Span, Stored, Type, call
from diptych.errors import DataError

MOST_STEPS = 1_000_000  # instructions: bounds the memory of small values, of which a byte can make a hundred
EAGER_BYTES = 4096  # longer byte strings stay in the file until an array asks for them
LONGEST_LINE = 1 << 26  # largest line of the oldest protocol, which writes a string as one line
DEEPEST = 16  # levels of lists and dicts
NPY = b"\x93NUMPY"


def read_pickle(path: str | Path, most_steps: int = MOST_STEPS) -> Any:
    """The content of a pickle of numbers, texts, lists, dicts and arrays; nothing in it is run."""
    return _replaced(
        open_pickle(path, most_steps), lambda leaf: leaf.load() if isinstance(leaf, Stored) else leaf
    )


def open_pickle(path: str | Path, most_steps: int = MOST_STEPS) -> Any:
    """As ``read_pickle``, but each array is ``Stored``: the bytes of large ones are still in the file.

    An ``.npy`` file that holds one pickled object, as ``numpy.save`` writes a dict, is read as that object.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            _skip_npy_header(file)
            return _replaced(_Machine(file, path).run(most_steps), _plain)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist: check the path.") from error
    except (RefusedError, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"{path} is not a pickle of plain arrays ({reason}): it was not read.") from error


class _Mark:
    """The mark below the items of a list, tuple or dict."""


_MARK = _Mark()


class _Machine:
    """Follows the instructions of one pickle."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path = file, path
        self.size = os.fstat(file.fileno()).st_size
        self.unclaimed = 2 * self.size  # old protocols decode a string, then make it an array
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, most_steps: int) -> Any:
        """The value the pickle builds."""
        for _ in range(most_steps):
            code = self.file.read(1)
            if code == b".":
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                raise RefusedError(f"it uses the instruction {code!r}" if code else "it ends early")
            step(self)
        raise RefusedError(f"it has more than {most_steps:,} instructions")

    # --- reading

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, after checking that the file has them."""
        self._check(size)
        return self.file.read(size)

    def number(self, form: str) -> int:
        """The next number of a fixed size."""
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def line(self) -> bytes:
        """The rest of a line, as the oldest protocol writes its arguments."""
        found = self.file.readline(LONGEST_LINE)
        if not found.endswith(b"\n"):
            raise RefusedError("a line in it does not end")
        return found[:-1].rstrip(b"\r")

    def claim(self, size: int) -> None:
        """Count bytes that become an array or are decoded: together at most twice the file."""
        self.unclaimed -= size
        if self.unclaimed < 0:
            raise RefusedError("it uses one string many times")

    def _check(self, size: int) -> None:
        left = self.size - self.file.tell()
        if size > left:
            raise RefusedError(f"it announces {size:,} bytes and has {left:,}")

    # --- the stack

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def top(self) -> Any:
        """The last value."""
        if not self.stack or self.stack[-1] is _MARK:
            raise RefusedError("it takes a value that is not there")
        return self.stack[-1]

    def pop(self) -> Any:
        """The last value, taken off."""
        value = self.top()
        self.stack.pop()
        return value

    def marked(self) -> list[Any]:
        """The values above the last mark, taken off with it."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is _MARK:
                found = self.stack[at + 1 :]
                del self.stack[at:]
                return found
        raise RefusedError("it closes a list that it did not open")

    # --- instructions with more than one step

    def data(self, size: int) -> None:
        """Bytes: short ones at once, long ones left where they are."""
        if size <= EAGER_BYTES:
            self.push(self.take(size))
            return
        self._check(size)
        self.push(Span(self.path, self.file.tell(), size))
        self.file.seek(size, os.SEEK_CUR)

    def text(self, size: int) -> None:
        """Text in UTF-8."""
        self.push(self.take(size).decode("utf-8"))

    def old_text(self, size: int) -> None:
        """A string of Python 2: a text, or the bytes of an array where it is long."""
        if size > EAGER_BYTES:
            self.data(size)
        else:
            self.push(self.take(size).decode("latin1"))

    def quoted(self) -> None:
        """A string of the oldest protocol, in quotes."""
        text = self.line().strip()
        if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in (b"'", b'"'):
            raise RefusedError("a string in it has no quotes")
        self.push(codecs.escape_decode(text[1:-1])[0].decode("latin1"))

    def whole_number(self) -> None:
        """A number of the oldest protocol, which writes truth values as 00 and 01."""
        text = self.line()
        self.push(text == b"01" if text in (b"00", b"01") else _whole(text))

    def long(self) -> None:
        """A number of up to 255 bytes, of which more than eight have no place here."""
        self.push(_bounded(int.from_bytes(self.take(self.number("<B")), "little", signed=True)))

    def tuple(self, count: int) -> None:
        """A tuple of the last values."""
        items = [self.pop() for _ in range(count)]
        self.push((*reversed(items),))

    def append(self, items: list[Any]) -> None:
        """Add to the list on the stack."""
        target = self.top()
        if type(target) is not list:
            raise RefusedError("it appends to what is not a list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Add key, value, key, value, … to the dict on the stack."""
        target = self.top()
        if type(target) is not dict or len(items) % 2:
            raise RefusedError("it sets entries of what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, bytes):
                raise RefusedError("a key of a dict is neither a text nor a whole number")
            target[key] = value

    def new_dict(self) -> None:
        """A dict of the marked values."""
        items = self.marked()
        self.push({})
        self.set_items(items)

    def set_one(self) -> None:
        """One entry of a dict."""
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def get(self, key: int) -> None:
        """A value that was kept."""
        if key not in self.memo:
            raise RefusedError("it recalls a value that it did not keep")
        self.push(self.memo[key])

    def put(self, key: int) -> None:
        """Keep the last value."""
        self.memo[key] = self.top()

    def name(self, module: Any, name: Any) -> None:
        """A name, if arrays need it."""
        meaning = NAMES.get((module, name)) if type(module) is str and type(name) is str else None
        if meaning is None:
            raise RefusedError(f"it refers to {str(module)[:60]}.{str(name)[:60]}, which is not an array")
        self.push(Name(meaning))

    def stack_name(self) -> None:
        """A name whose two parts are on the stack."""
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def line_name(self) -> None:
        """A name whose two parts are lines."""
        module, name = self.line().decode("utf-8"), self.line().decode("utf-8")
        self.name(module, name)

    def reduce(self) -> None:
        """A call, of which only those that make arrays are understood; none is made."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or type(arguments) is not tuple:
            raise RefusedError("it calls what is not a name of an array")
        self.push(call(called.meaning, arguments, self.claim))

    def build(self) -> None:
        """Completes a type or an array."""
        state, target = self.pop(), self.top()
        if type(state) is tuple and isinstance(target, Type):
            target.complete(state)
        elif type(state) is tuple and isinstance(target, Array):
            target.complete(state, self.claim)
        else:
            raise RefusedError("it builds something other than an array")


def _whole(text: bytes) -> int:
    return _bounded(int(text.removesuffix(b"L")) if len(text) <= 21 else 1 << 64)


def _bounded(number: int) -> int:
    # larger ones have no place in these files, and can be chosen so that a dict becomes slow
    if not -(1 << 63) <= number < 1 << 64:
        raise RefusedError("a number of more than 64 bits")
    return number


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, Span | Name | Type):
        raise RefusedError("a value in it is neither a number, a text nor an array")
    return leaf


def _replaced(root: Any, change: Callable[[Any], Any]) -> Any:
    """The same lists and dicts with every leaf changed; what occurs twice is changed once and stays shared."""
    done: dict[int, Any] = {}

    def walk(value: Any, depth: int) -> Any:
        if id(value) in done:
            return done[id(value)]
        if depth > DEEPEST:  # also a list that contains itself
            raise RefusedError(f"lists and dicts are more than {DEEPEST} deep")
        if isinstance(value, Array):
            found = walk(value.built, depth + 1)
        elif isinstance(value, dict):
            found = {key: walk(item, depth + 1) for key, item in value.items()}
        elif isinstance(value, list | tuple):
            found = type(value)([walk(item, depth + 1) for item in value])
        else:
            found = change(value)
        done[id(value)] = found
        return found

    return walk(root, 0)


def _skip_npy_header(file: BinaryIO) -> None:
    """Past the header of an ``.npy`` file that holds one pickled object."""
    if file.read(len(NPY)) != NPY:
        file.seek(0)
        return
    major = file.read(2)[:1]
    header = file.read(int.from_bytes(file.read(2 if major == b"\x01" else 4), "little") & 0xFFFF)
    if not re.search(rb"'descr':\s*'\|O8?'", header) or not re.search(rb"'shape':\s*\(\)", header):
        raise RefusedError("it is an .npy file without a pickled dict")


def _sized(form: str, read: Callable[[_Machine, int], None]) -> Callable[[_Machine], None]:
    return lambda m: read(m, m.number(form))


_STEPS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),  # the protocol's number
    b"\x95": lambda m: m.take(8),  # the length of a frame, a hint for reading ahead
    b"(": lambda m: m.push(_MARK),
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.marked(),
    b"2": lambda m: m.push(m.top()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"I": _Machine.whole_number,
    b"L": lambda m: m.push(_whole(m.line())),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": _Machine.long,
    b"F": lambda m: m.push(float(m.line())),
    b"G": lambda m: m.push(float(struct.unpack(">d", m.take(8))[0])),
    b"S": _Machine.quoted,
    b"V": lambda m: m.push(m.line().decode("raw-unicode-escape")),
    b"T": _sized("<I", _Machine.old_text),
    b"U": _sized("<B", _Machine.old_text),
    b"X": _sized("<I", _Machine.text),
    b"\x8c": _sized("<B", _Machine.text),
    b"\x8d": _sized("<Q", _Machine.text),
    b"B": _sized("<I", _Machine.data),
    b"C": _sized("<B", _Machine.data),
    b"\x8e": _sized("<Q", _Machine.data),
    b"\x96": _sized("<Q", _Machine.data),
    b"]": lambda m: m.push([]),
    b"l": lambda m: m.push(m.marked()),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.marked()),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push((*m.marked(),)),
    b"\x85": lambda m: m.tuple(1),
    b"\x86": lambda m: m.tuple(2),
    b"\x87": lambda m: m.tuple(3),
    b"}": lambda m: m.push({}),
    b"d": _Machine.new_dict,
    b"s": _Machine.set_one,
    b"u": lambda m: m.set_items(m.marked()),
    b"g": lambda m: m.get(_whole(m.line())),
    b"h": _sized("<B", _Machine.get),
    b"j": _sized("<I", _Machine.get),
    b"p": lambda m: m.put(_whole(m.line())),
    b"q": _sized("<B", _Machine.put),
    b"r": _sized("<I", _Machine.put),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"c": _Machine.line_name,
    b"\x93": _Machine.stack_name,
    b"R": _Machine.reduce,
    b"b": _Machine.build,
}
"""What each instruction does (``pickletools.opcodes`` has their names); those not listed are refused."""
