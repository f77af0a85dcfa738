"""Names of models as people write them: with and without hf:, as folders, without a network."""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path

import pytest
from commands import diptych, refused
from dual_folders import clip_folder
from small import pictures

from diptych import Retriever
from diptych.encoders import pretrained
from diptych.encoders.known_names import hub_hint, is_pretrained_name, known_name, recorded_name
from diptych.encoders.lite0 import Lite0
from diptych.encoders.pretrained import source_name
from diptych.errors import CheckpointError, DataError
from diptych.index.engines.opening import open_index
from diptych.model.named import backbone, text_source

OPENAI = "openai/clip-vit-base-patch32"


@pytest.fixture
def downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds a small model under OpenAI's name, and no network."""
    home = tmp_path / "hub" / "models--openai--clip-vit-base-patch32"
    clip_folder(home / "snapshots" / ("0" * 40))
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return home


@pytest.mark.parametrize(
    ("written", "means"),
    [
        (OPENAI, f"hf:{OPENAI}"),
        ("sentence-transformers/clip-ViT-B-32", f"hf:{OPENAI}"),
        ("clip-ViT-B-32", f"hf:{OPENAI}"),
        ("clip-ViT-L-14", "hf:openai/clip-vit-large-patch14"),
        ("google/siglip2-base-patch16-224", "hf:google/siglip2-base-patch16-224"),
        ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "hf:laion/CLIP-ViT-B-32-laion2B-s34B-b79K"),
        ("hf:nobody/clip", "hf:nobody/clip"),
        ("lite0+minilm", "lite0+minilm"),
    ],
)
def test_names_that_people_know(
    written: str, means: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert known_name(written) == means
    assert is_pretrained_name(written)
    assert recorded_name(written) == means
    assert source_name(written) == means.removeprefix("hf:")
    folder = tmp_path / written
    if not written.startswith(("hf:", "lite0")):
        folder.mkdir(parents=True)
        assert known_name(written) == written  # a folder wins
        assert recorded_name(written) == str(folder)


@pytest.mark.parametrize(
    "written", ["runs/photos", "somebody/clip", "openai/whisper-tiny", "clip-ViT-B-32-x"]
)
def test_any_other_name_is_never_sent_to_the_hub(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pretrained, "load_config", lambda source: pytest.fail(f"{source} was asked for"))
    assert not is_pretrained_name(written)
    with pytest.raises(CheckpointError, match=written) as caught:
        Retriever.from_pretrained(written)
    assert (f"hf:{written}" in str(caught.value)) == ("/" in written)
    assert f"hf:{written}" in hub_hint(written) or "/" not in written
    pictures(tmp_path / "photos", 1)
    said = diptych("index", written, "photos", status=2).stderr
    assert said.count(f"{written} does not exist") == said.count("\n") == 1  # one sentence, once
    assert written in refused("evaluate", written)


def test_paths_are_no_ids_of_the_hub() -> None:
    for path in ("/runs/photos", "./photos", "../photos", "a/b/c", "photos", "~/photos"):
        assert hub_hint(path) == ""


def test_a_name_of_the_package_wins_over_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lite0").mkdir()  # as the docs export a runtime
    monkeypatch.chdir(tmp_path)
    assert isinstance(backbone("lite0"), Lite0)


def test_a_known_name_works_wherever_hf_does(downloaded: Path) -> None:
    model = Retriever.from_pretrained("clip-ViT-B-32")
    assert model.fingerprint() == Retriever.from_pretrained(f"hf:{OPENAI}").fingerprint()
    assert text_source("clip-ViT-B-32") == OPENAI
    pictures(downloaded.parent.parent / "photos")
    diptych("index", OPENAI, "photos")
    with open_index("photos.index") as index:
        assert index.info.model == f"hf:{OPENAI}"
    found = diptych("search", "photos.index", "a red dog").stdout
    shutil.rmtree("photos.index")
    assert diptych("search", "clip-ViT-B-32", "photos", "a red dog").stdout == found


def test_without_a_network_it_says_what_to_download_and_where_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as taken:  # bound and not listening: a connection to it is refused
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(
            "huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}"
        )
        monkeypatch.setattr(pretrained, "getproxies", dict)
        began = time.perf_counter()
        with pytest.raises(DataError, match="hf download") as caught:
            Retriever.from_pretrained("openai/clip-vit-large-patch14")
        assert time.perf_counter() - began < 10  # the library alone waits 25 s
    said = str(caught.value)
    assert "openai/clip-vit-large-patch14" in said
    assert str(tmp_path / "models--openai--clip-vit-large-patch14") in said
