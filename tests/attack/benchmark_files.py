"""Targets: files of published benchmarks (MATLAB, HDF5, SentEval, lists of classes, judgements) and videos."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random

import numpy as np
from hostile import as_json, mutated, mutated_json
from register import Attack, target, void


@target
def matlab(folder: Path) -> Attack:
    from scipy.io import savemat
    from scipy.sparse import csc_matrix

    from diptych.data.readers.label_arrays import read_mat

    table = np.random.default_rng(0).integers(0, 2, (6, 5)).astype(np.uint8)
    file, sound = folder / "a.mat", []
    for values in (table, csc_matrix(table.astype(float))):
        for options in ({}, {"do_compression": True}, {"format": "4"}):
            savemat(file, {"feat": values}, **options)
            sound.append(file.read_bytes())

    def once(draw: Random) -> None:
        whole = draw.choice(sound)
        data = mutated(whole, draw)
        file.write_bytes(data)
        found = read_mat(file)
        if data == whole:
            assert (found == table).all()

    return once


@target
def hdf5(folder: Path) -> Attack:
    import h5py

    from diptych.data.readers.frame_features import HDF5Frames, held_in_hdf5

    rows = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    file = folder / "a.h5"
    with h5py.File(file, "w") as content:
        content["a"] = rows
        content.create_dataset("b", data=rows, chunks=(2, 3), compression="gzip")
    whole = file.read_bytes()

    def once(draw: Random) -> None:
        data = mutated(whole, draw)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".h5") as copied:  # the library keeps files open
            copied.write(data)
            copied.flush()
            place = Path(copied.name)
            void(held_in_hdf5(place, ["a", "b/c"]))
            for name in ("a", "b"):
                found = HDF5Frames(place, [name])[0]
                if data == whole:
                    assert (found == rows).all()

    return once


@target
def senteval(folder: Path) -> Attack:
    from diptych.evaluation.senteval import YEARS, read_senteval

    texts = {
        "STS/STSBenchmark/sts-dev.csv": "main\tMSR\t2012\t1\t4.5\ta dog\ta hound\nmain\tMSR\t2012\t2\t0\ta\tb\n",
        "SICK/SICK_trial.txt": "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tj\n1\ta dog\ta cat\t3.2\tX\n",
    }
    for name in YEARS["STS12"]:
        texts[f"STS/STS12-en-test/STS.input.{name}.txt"] = "a dog\ta hound\na\tb\n"
        texts[f"STS/STS12-en-test/STS.gs.{name}.txt"] = "4.5\n\n"
    for name, text in texts.items():
        (folder / "downstream" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "downstream" / name).write_text(text)

    def once(draw: Random) -> None:
        name = draw.choice(sorted(texts))
        file = folder / "downstream" / name
        file.write_bytes(mutated(texts[name].encode(), draw))
        try:
            for one in read_senteval(folder).sets:
                assert all(np.isfinite(part.gold).all() for part in one.files)
        finally:
            file.write_text(texts[name])

    return once


@target
def class_lists(folder: Path) -> Attack:
    from diptych.evaluation.classes import open_class_list

    texts = {
        "sop/Ebay_test.txt": "image_id class_id super_class_id path\n1 1 1 a.jpg\n2 1 1 a.jpg\n",
        "shop/Eval/list_eval_partition.txt": "2\nimage_name item_id status\na.jpg id_1 query\na.jpg id_1 gallery\n",
        "inat/Inat_dataset_splits/Inaturalist_test_set1.txt": "x/a.jpg\nx/a.jpg\n",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for place in ("sop/a.jpg", "shop/Img/a.jpg", "inat/x/a.jpg"):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes(b"")

    def once(draw: Random) -> None:
        name = draw.choice(sorted(texts))
        (folder / name).write_bytes(mutated(texts[name].encode(), draw))
        try:
            found = open_class_list(folder / name.split("/")[0])
            assert len(found.paths) == len(found.classes)
        finally:
            (folder / name).write_text(texts[name])

    return once


@target
def judgements(folder: Path) -> Attack:
    from diptych.data.labels import read_instances
    from diptych.data.problems import Problems
    from diptych.evaluation.judgements import load_judgements

    contents = {
        "eccv_image_to_caption.json": {"1": [10, 11], "2": [20]},
        "eccv_caption_to_image.json": {"10": [1], "20": [2, 1]},
        "instances_val2014.json": {
            "categories": [{"id": 1, "name": "dog"}],
            "annotations": [{"image_id": 5, "category_id": 1}],
        },
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))

    def once(draw: Random) -> None:
        name = draw.choice(sorted(contents))
        sound = json.dumps(contents[name]).encode()
        data = mutated(sound, draw)
        (folder / name).write_bytes(
            data if draw.random() < 0.3 else as_json(mutated_json(contents[name], draw), draw)
        )
        try:
            if name.startswith("eccv"):
                load_judgements("eccv", folder)
            else:
                read_instances(folder / name, Problems())
        finally:
            (folder / name).write_bytes(sound)

    return once


@target
def videos(folder: Path) -> Attack:
    import av
    from clips import colour_video

    from diptych.data.formats import open_captions

    av.logging.set_level(None)
    file = colour_video(folder / "v" / "a.mp4", ["red", "green", "blue"])
    whole = file.read_bytes()

    def once(draw: Random) -> None:
        data = mutated(whole, draw)
        file.write_bytes(data)
        captions = open_captions(folder / "v")
        found = [captions.images[row] for row in range(min(4, len(captions.images)))]
        if data == whole:
            assert len(found) == 3

    return once
