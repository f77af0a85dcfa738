"""Videos as items: indexed by their frames, found by text at the right second, grouped, shown and opened."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import chromium, expect, opened
from clips import colour_video, write_video
from colour_model import ColourModel
from colours import running
from commands import diptych
from fastapi.testclient import TestClient
from PIL import Image

from diptych.data.formats import open_captions
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.ingest.build import index_collection
from diptych.index.protocol import Hit, Item
from diptych.index.query.frames import Frame, frame_of, one_per_video, picture_of
from diptych.index.query.search import Searcher
from diptych.recipes import RECIPES
from diptych.web.app import create_app


def make_videos(folder: Path) -> Path:
    """Colours one second each; the broken one is skipped."""
    colour_video(folder / "day" / "a.mp4", ["blue", "blue", "lime", "red", "white"])
    colour_video(folder / "b.mp4", ["white", "red", "blue"])
    Image.new("RGB", (32, 32), "red").save(folder / "still.png")
    (folder / "broken.mp4").write_bytes(b"no video")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("videos")
    built = index_collection(ColourModel(), make_videos(root / "films"), root / "index")
    assert (built.images, built.added) == (9, 9)
    ((skipped, reason),) = built.skipped
    assert skipped == "broken.mp4#t=0"
    assert "broken.mp4 cannot be read as a video" in reason
    return root


@pytest.fixture
def searcher(made: Path) -> Iterator[Searcher]:
    with EmbeddedIndex(made / "index") as index:
        yield Searcher(index, ColourModel())


def test_a_text_finds_the_video_at_the_right_second(searcher: Searcher) -> None:
    hits = searcher.search("green", 1)
    frame = frame_of(hits[0].item)
    assert frame == Frame(0, "day/a.mp4", 2.0)
    assert hits[0].item.id == "day/a.mp4#t=2"
    file = searcher.index.file(hits[0].item)
    assert file is not None
    assert file.name == "a.mp4"


def test_each_video_is_one_answer_unless_frames_are_asked_for(searcher: Searcher) -> None:
    hits = searcher.search("red", 10, chance=None)
    assert sorted(hits.ids[:3]) == ["b.mp4#t=1", "day/a.mp4#t=3", "still.png"]
    assert len(hits) == 3  # two videos and a picture, though each was asked for ten
    assert len(searcher.search("red", 10, chance=None, frames=True)) == 9
    assert len(searcher.search("red", 2, chance=None)) == 2
    only = searcher.search("blue", 9, filter='video = "day/a.mp4" and time < 2', chance=None, frames=True)
    assert sorted(only.ids) == ["day/a.mp4#t=0", "day/a.mp4#t=1"]
    like = searcher.more_like("b.mp4#t=1", 3)  # the nearest frame of the same video may answer, not itself
    assert "b.mp4#t=1" not in like.ids
    assert len({str(hit.item.path) for hit in like}) == len(like) == 3


def test_frames_of_one_video_do_not_crowd_out_another(tmp_path: Path) -> None:
    colour_video(tmp_path / "films" / "long.mp4", ["red"] * 40)
    colour_video(tmp_path / "films" / "short.mp4", ["blue"])
    index_collection(ColourModel(), tmp_path / "films", tmp_path / "index")
    with EmbeddedIndex(tmp_path / "index") as index:
        hits = Searcher(index, ColourModel()).search("red", 2, chance=None)
    assert [hit.item.path for hit in hits] == ["long.mp4", "short.mp4"]


def test_a_second_run_encodes_only_what_changed(made: Path, tmp_path: Path) -> None:
    films = make_videos(tmp_path / "films")
    model = ColourModel()
    index_collection(model, films, tmp_path / "index")
    encoded = model.encoded_images
    built = index_collection(model, films, tmp_path / "index")
    assert (built.unchanged, built.added, built.updated) == (9, 0, 0)
    assert model.encoded_images == encoded
    colour_video(films / "b.mp4", ["lime", "red"])
    built = index_collection(model, films, tmp_path / "index")
    assert (built.unchanged, built.updated, built.removed) == (6, 2, 1)
    with EmbeddedIndex(tmp_path / "index") as index:
        found = Searcher(index, model).search("green", 2, chance=None)
        assert sorted(found.ids) == ["b.mp4#t=0", "day/a.mp4#t=2"]
        thumbnail = index.thumbnail("b.mp4#t=0")
        assert thumbnail is not None
        (films / "b.mp4").touch()
        assert (
            index_collection(model, films, tmp_path / "index").updated == 2
        )  # seen again, not encoded again
        assert index.thumbnail("b.mp4#t=0") == thumbnail


def test_only_frames_count_as_frames() -> None:
    assert frame_of(Item("a.mp4#t=1", path="a.mp4", metadata={"time": 1})) == Frame(0, "a.mp4", 1.0)
    for other in (
        Item("a.jpg", path="a.jpg", metadata={"time": 1.0, "video": "a.mp4"}),
        Item("a", path="a.mp4", metadata={"time": "noon"}),
        Item("a", path="a.mp4", metadata={"time": True}),
        Item("a", path="a.mp4"),
        Item("a", kind="text", path="a.mp4", metadata={"time": 1}),
    ):
        assert frame_of(other) is None
    same = [Hit(Item(str(n), path="a.mp4", metadata={"time": n}, collection=n % 2), -n) for n in range(4)]
    pictures = [Hit(Item(f"p{n}", path="p.jpg"), 0) for n in range(2)]
    assert [hit.item.id for hit in one_per_video([*same, *pictures])] == ["0", "1", "p0", "p1"]


def test_the_picture_of_an_item_is_its_frame_or_its_file(made: Path) -> None:
    with EmbeddedIndex(made / "index") as index:
        items = index.get(["day/a.mp4#t=2", "still.png"])
        for item, colour in zip(items, ((0, 255, 0), (255, 0, 0)), strict=True):
            assert item is not None
            file = index.file(item)
            assert file is not None
            mean = np.asarray(picture_of(item, file), np.float64).reshape(-1, 3).mean(0)
            assert np.abs(mean - colour).max() < 40


def test_the_service_gives_times_and_opens_the_video(made: Path) -> None:
    with (
        EmbeddedIndex(made / "index") as index,
        TestClient(create_app(index, ColourModel())) as client,
    ):
        hits = client.get("/api/search", params={"text": "green", "k": 1}).json()["hits"]
        assert (hits[0]["path"], hits[0]["time"]) == ("day/a.mp4", 2.0)
        (still,) = client.get("/api/items", params={"id": "still.png"}).json()
        assert still["time"] is None
        assert len(client.get("/api/search", params={"text": "red", "frames": True}).json()["hits"]) == 9
        assert len(client.post("/api/search", data={"text": "red", "frames": "true"}).json()["hits"]) == 9
        assert len(client.get("/api/browse").json()["hits"]) == 3
        for path in ("thumbnail", "image"):
            answer = client.get(f"/api/{path}", params={"id": "day/a.mp4#t=2"})
            assert answer.headers["content-type"] == "image/jpeg"
        whole = client.get("/api/video", params={"id": "day/a.mp4#t=2"})
        assert whole.headers["content-type"] == "video/mp4"
        assert whole.content == (made / "films" / "day" / "a.mp4").read_bytes()
        assert whole.headers["content-disposition"].startswith("inline")
        part = client.get("/api/video", params={"id": "day/a.mp4#t=2"}, headers={"Range": "bytes=4-11"})
        assert part.status_code == 206
        assert part.content == whole.content[4:12]
        for id in ("still.png", "gone.mp4#t=0"):
            refusal = client.get("/api/video", params={"id": id})
            assert refusal.status_code == 404
            assert id in refusal.json()["error"]


def test_a_video_outside_the_roots_is_not_served(made: Path, tmp_path: Path) -> None:
    with (
        EmbeddedIndex(made / "index") as index,
        TestClient(create_app(index, ColourModel(), roots=[tmp_path])) as client,
    ):
        assert client.get("/api/video", params={"id": "day/a.mp4#t=2"}).status_code == 404
        assert client.get("/api/thumbnail", params={"id": "day/a.mp4#t=2"}).status_code == 200  # it is stored


def test_the_page_shows_the_frame_and_its_time(made: Path) -> None:
    with (
        chromium() as browser,
        EmbeddedIndex(made / "index") as index,
        running(create_app(index, ColourModel())) as address,
    ):
        for page in opened(browser, address):
            page.fill("#query", "green")
            page.keyboard.press("Enter")
            card = page.locator("#grid .card").first
            expect(card.locator(".time")).to_have_text("0:02")
            expect(card.locator(".caption")).to_have_text("day/a.mp4")
            shown = card.locator("img").evaluate("img => img.decode().then(() => img.naturalWidth)")
            assert shown == 32
            still = page.locator('.card[data-id="still.png"] .time')
            expect(still).to_be_hidden()
            card.click()
            expect(page.locator("#title")).to_have_text("day/a.mp4 at 0:02")
            link = page.locator("#whole")
            expect(link).to_have_attribute("title", "Open the video at 0:02")
            href = link.get_attribute("href")
            assert href is not None
            assert href.endswith("#t=2")
            assert page.request.get(address + href.split("#")[0]).status == 200


def test_the_command_line_indexes_and_searches_a_folder_of_videos(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 255, (4, 4, 3), dtype=np.uint8).repeat(16, 0).repeat(16, 1) for _ in range(6)]
    frames = [Image.fromarray(block) for block in blocks for _ in range(5)]
    write_video(tmp_path / "films" / "noise.mp4", frames)
    (tmp_path / "films" / "noise.txt").write_text("a film of noise\n")
    recipe = RECIPES["vse-infinity"]
    settings = recipe.settings(dim=16, image_size=64, min_count=1, word_dim=8)  # type: ignore[call-arg]
    captions: Any = open_captions(tmp_path / "films")
    recipe.build(settings, captions).retriever.save_pretrained(tmp_path / "model")
    (tmp_path / "films" / "broken.webm").write_bytes(b"nothing")
    said = diptych("index", tmp_path / "model", tmp_path / "films")
    assert "6 images, 1 text (6 added" in said.stdout
    assert "skipped broken.webm#t=0: " in said.stderr
    place = f"{tmp_path / 'films'}.index"
    still = tmp_path / "still.png"
    captions.images[captions.image_ids.index("noise.mp4#t=4")].save(still)
    answer = json.loads(diptych("search", place, still, "--json", "--all").stdout)
    (hit,) = answer["hits"]
    assert (hit["id"], hit["metadata"]["time"]) == ("noise.mp4#t=4", 4)
    assert hit["path"].endswith("noise.mp4")
    assert len(json.loads(diptych("search", place, still, "--json", "--all", "--frames").stdout)["hits"]) == 6
    assert "noise.mp4 at 0:04" in diptych("search", place, still, "--all").stdout
    found = diptych("search", f"{place}", "--like", "noise.mp4#t=4", "--html", tmp_path / "page.html")
    assert found.stdout.count("noise.mp4 at") == 1
    assert "data:image" in (tmp_path / "page.html").read_text()
    diptych(
        "index", tmp_path / "model", tmp_path / "films", "--index", tmp_path / "again"
    )  # features are cached now
    diptych("search", tmp_path / "again", "--like", "noise.mp4#t=4", "--html", tmp_path / "page.html")
    assert "data:image" in (tmp_path / "page.html").read_text()
    diptych(
        "index", tmp_path / "model", f"{tmp_path / 'films'}?every=0.5", "--index", tmp_path / "fine.index"
    )
    assert (
        len(
            json.loads(
                diptych(
                    "search", tmp_path / "fine.index", still, "--json", "--all", "--frames", "-k", 50
                ).stdout
            )["hits"]
        )
        == 12
    )
