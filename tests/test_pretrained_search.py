"""A person with photos and no captions: a pretrained model, an index, a search."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import diptych, refused
from dual_folders import clip_folder
from small import pictures

from diptych.index.engines.opening import open_index
from diptych.model.protocol import OpenedModel
from diptych.model.retriever import Retriever

HUB_ID = "hf:tiny/clip"


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return clip_folder(tmp_path_factory.mktemp("models") / "clip")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of photos in the current folder."""
    pictures(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.fixture
def downloaded(clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that holds the hub's tiny/clip, and no network."""
    home = tmp_path / "hub" / "models--tiny--clip"
    shutil.copytree(clip, home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return home


def answers(*args: object) -> list[str]:
    return [hit["id"] for hit in json.loads(diptych("search", *args, "--json").stdout)["hits"]]


def test_two_commands_find_photos_with_a_model_of_the_hub(photos: Path, downloaded: Path, clip: Path) -> None:
    said = diptych("index", HUB_ID, "./photos").stdout
    assert "6 images" in said
    found = answers("./photos.index", "a red dog")
    model = Retriever.from_pretrained(clip)
    files = sorted(photos.iterdir())
    scores = model.similarity(model.encode_text("a red dog"), model.encode_image(files))[0]
    expected = [files[i].name for i in scores.argsort(descending=True).tolist()]
    assert [Path(id).name for id in found] == expected
    with open_index("photos.index") as index:
        assert index.info.model == HUB_ID
        assert index.info.fingerprint == model.fingerprint()


def test_a_folder_is_found_again_from_elsewhere(
    photos: Path, clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(clip, tmp_path / "my-clip")
    diptych("index", "my-clip", "photos")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(answers("../photos.index", "a red dog", "--all")) == 6


def test_one_command_indexes_and_searches(photos: Path, downloaded: Path) -> None:
    assert answers(HUB_ID, "photos", "a red dog") == answers("photos.index", "a red dog")
    extra = pictures(photos / "more", count=1)[0]
    assert any(extra.name in id for id in answers(HUB_ID, "photos", "a red dog", "-k", "20", "--all"))


def test_another_model_than_the_recorded_one_is_refused_by_name(photos: Path, downloaded: Path) -> None:
    diptych("index", HUB_ID, "photos")
    other = clip_folder(photos.parent / "other", seed=5)
    said = refused("search", "photos.index", "a dog", "--model", other)
    assert HUB_ID in said
    shutil.rmtree(downloaded)
    assert len(answers("photos.index", "a dog")) == 6  # by the runtime that index keeps in the cache
    assert "tiny/clip" in refused("search", "photos.index", "a dog", "--backend", "torch")


def test_evaluation_needs_data_and_then_no_training(photos: Path, clip: Path, tmp_path: Path) -> None:
    lines = [
        json.dumps({"image": f"picture{i}.png", "caption": f"a dog number {i}", "split": "test"})
        for i in range(6)
    ]
    (photos / "metadata.jsonl").write_text("\n".join(lines))
    assert "--data" in refused("evaluate", clip)
    assert "--data" in refused("evaluate", HUB_ID)
    said = diptych("evaluate", clip, "--data", photos, "--split", "test", "--bootstrap", "0").stdout
    assert "rsum" in said.lower()


def test_serving_a_model_and_pictures_indexes_them_first(
    photos: Path, downloaded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[str, OpenedModel, str]] = []
    monkeypatch.setattr(
        "diptych.web.serve.serve",
        lambda place, model, **options: served.append((str(place), model, options["model_name"])),
    )
    diptych("serve", HUB_ID, "photos")
    (place, model, name) = served[0]
    assert (place, name) == ("photos.index", HUB_ID)
    with open_index("photos.index") as index:
        assert index.count("image") == 6
    diptych("serve", "photos.index")
    assert served[1][1].fingerprint() == model.fingerprint()  # found again by its name


def test_a_model_without_pictures_is_asked_for_them(photos: Path) -> None:
    assert "hf:tiny/clip" in refused("search", HUB_ID)
    assert "hf:tiny/clip" in refused("serve", HUB_ID)
    assert "photos" in refused("serve", "photos.index", "photos")
