"""An index that is to be filled, from a collection or from files of vectors: opened or made, and rounded off."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from diptych.errors import DataError, DiptychError, IndexFault, MissingExtra, SettingsError
from diptych.index.engines.opening import empty_index, index_exists, open_index
from diptych.index.protocol import KINDS, Index, Item, Precision

APPROXIMATE_ABOVE = 200_000  # items of a kind from which a scan takes tens of milliseconds on two cores
PAUSE = 0.1  # seconds between two attempts to open an index that another process writes


@dataclass(frozen=True)
class Target:
    """The place of an index, and what its vectors must be: ``precision`` None is float32 in a new index.

    ``patience`` is for how many seconds an embedded index that another process writes is waited for.
    """

    place: str | Path
    dimension: int
    fingerprint: str
    model: str = ""
    precision: Precision | None = None
    patience: float = 0.0

    @contextmanager
    def ready(self) -> Iterator[Index]:
        """The index, open for writing, made if there is none; one made here that stays empty is removed."""
        index, made = self._opened()
        try:
            with index:
                self._check(index)
                yield index
        except DiptychError:
            if made:  # an empty index of a model that cannot read these images would stand in another's way
                _discard_empty(self.place)
            raise

    def _opened(self) -> tuple[Index, bool]:
        """The index, and whether it was made just now."""
        until = time.monotonic() + self.patience
        while True:
            if not index_exists(self.place):
                try:
                    return empty_index(
                        self.place,
                        self.dimension,
                        model=self.model,
                        fingerprint=self.fingerprint,
                        precision=self.precision or "float32",
                    ), True
                except IndexFault:
                    if not index_exists(self.place):  # else another process made it first
                        raise
            try:
                return open_index(
                    self.place, writable=True, fingerprint=self.fingerprint, model=self.model
                ), False
            except IndexFault as error:
                if not isinstance(error.__context__, Timeout) or time.monotonic() >= until:
                    raise
                time.sleep(PAUSE)

    def _check(self, index: Index) -> None:
        info = index.info
        if self.precision is not None and info.precision != self.precision:
            raise SettingsError(
                f"{info.path} stores {info.precision} vectors, not {self.precision}: "
                "leave the precision out, or use another place."
            )
        if info.dimension != self.dimension:
            raise DataError(
                f"these vectors have {self.dimension} dimensions, {info.path} holds vectors of {info.dimension}: "
                "they are not those of its model; embed again, or use another place."
            )


def _discard_empty(place: str | Path) -> None:
    """Remove an index on disk that holds nothing; in a database it stays."""
    if "://" in str(place):
        return
    with suppress(IndexFault), open_index(place, writable=True) as index:  # unless another writes it by now
        if not any(index.count(kind) for kind in KINDS):
            shutil.rmtree(Path(place).expanduser())


def check_clash(taken: Sequence[str]) -> None:
    """Raise when ids that are about to be written belong to other items."""
    if taken:
        raise DataError(
            f"the index already has another item with the id '{min(taken)}': index it into another place."
        )


def held_items(index: Index, ids: Sequence[str], collection: int) -> list[Item | None]:
    """The items of these ids in the index; one that belongs to another collection is refused."""
    held = index.get(ids)
    check_clash([item.id for item in held if item is not None and item.collection != collection])
    return held


def add_approximate(
    index: Index, above: int | None, *, codes: bool | None = None, show_progress: bool = False
) -> list[str]:
    """Give an index approximate indexes of the kinds with at least ``above`` items (None: never).

    Notes say which kinds are searched without.
    """
    notes = []
    for kind in KINDS if above is not None else ():
        if index.count(kind) >= max(1, above or 0):
            try:
                index.build_graph(kind, codes=codes, show_progress=show_progress)
            except (MissingExtra, SettingsError) as error:  # nothing that an exact search needs
                notes.append(f"the {index.count(kind):,} {kind} items are searched one by one: {error}")
    return notes
