"""Attacks on what lies in the cache folder and beside an index: logs of rows, packs, local features."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import numpy as np
from hostile import NUMBERS, as_json, mutated, mutated_json
from register import Attack, target


@target
def row_files(folder: Path) -> Attack:
    """Files of rows whose logs say something else, finished or killed."""
    from diptych.cache.rows import RowFile
    from diptych.data.arrays import ArrayStore

    path = folder / "rows.npy"
    log, part = folder / ".rows.npy.log", folder / ".rows.npy.part"
    with RowFile(path, "key") as file:
        file.append(np.ones((3, 4), np.float16), 3, {"1": "a note"})
        file.append(np.ones((2, 4), np.float16), 2)
        file.finish()
    rows, lines = path.read_bytes(), log.read_bytes().splitlines()

    def once(draw: Random) -> None:
        for file in folder.iterdir():
            file.unlink()
        number = draw.randrange(len(lines))
        line = as_json(mutated_json(json.loads(lines[number]), draw), draw).replace(b"\n", b"")
        log.write_bytes(b"\n".join([*lines[:number], line, *lines[number + 1 :], b""]))
        draw.choice((path, part)).write_bytes(rows if draw.random() < 0.5 else mutated(rows, draw))
        with RowFile(path, "key", overwrite=draw.random() < 0.7) as found:
            if not found.finished:
                missing = max(0, 5 - found.progress.done)
                found.append(np.ones((missing, 4), np.float16), missing)
                found.finish()
        store = ArrayStore(path)
        store.rows(range(len(store)))

    return once


@target
def packs(folder: Path) -> Attack:
    """Packs of a stranger who knows how their entries are checked."""
    from diptych.cache.contents import contents
    from diptych.cache.feature_pack import FeaturePack, _digest, _entries

    sound, place = folder / "sound", folder / "images" / "pack"
    FeaturePack(sound, "title").append(["a", "b"], np.ones((2, 3), np.float16))
    about = json.loads((sound / "pack.json").read_text())
    ends = [0, 1, 2, -1, -(2**63), 2**62, 2**63 - 1, 10**12]

    def once(draw: Random) -> None:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sound, place)
        name = draw.choice(("pack.json", "index", "stamps.json", "rows-000000.f16"))
        data = mutated((place / name).read_bytes(), draw)
        if name == "pack.json" and draw.random() < 0.8:
            sides = [draw.choice((*NUMBERS, 3, True, "3")) for _ in range(draw.choice((0, 1, 2, 90)))]
            other = {**about, "shape": sides} if draw.random() < 0.5 else mutated_json(about, draw)
            data = as_json(other, draw)
        elif name == "index" and draw.random() < 0.8:
            keys = [_digest(draw.choice("abc")) for _ in range(draw.choice((1, 2, 500)))]
            data = _entries(keys, [draw.choice(ends) for _ in keys], [0] * len(keys)).tobytes()
        (place / name).write_bytes(data)
        pack = FeaturePack(place, "title")
        if pack.shape == (3,):
            found = pack.find(["a", "b", "c"])
            pack.read(found, np.empty((3, 3), np.float16))
            pack.note_use(found)
        pack.append(["c"], np.ones((1, 3), np.float16))
        for entry in contents(folder):
            entry.remove()

    return once


@target
def local_features(folder: Path) -> Attack:
    """Databases of local features with damaged pages."""
    from diptych.cache.local_features import LocalFeatures

    place = folder / "index.features"
    store = LocalFeatures(place, "model", create=True)
    store.put([(f"image {n}", "content", np.ones((3, 50), np.float16)) for n in range(60)])
    store.close()
    whole = place.read_bytes()
    wanted = [(f"image {n}", "content") for n in range(60)]

    def once(draw: Random) -> None:
        for end in ("-wal", "-shm"):
            place.with_name(place.name + end).unlink(missing_ok=True)
        place.write_bytes(mutated(whole, draw))
        opened = LocalFeatures(place, "model", create=draw.random() < 0.5)
        try:
            opened.contents()
            opened.get(wanted)
            opened.put([("new", "content", np.ones((3, 50), np.float16))])
            opened.remove(["image 3"])
        finally:
            opened.close()

    return once
