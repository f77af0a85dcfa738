"""diptych index and search on a folder of pictures with a table, as a user runs them: answers, upkeep, mistakes."""

from __future__ import annotations

import csv
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from commands import diptych, process, refused
from disks import fill, make_read_only, small_disk
from PIL import Image

from diptych import create_index
from diptych.cli.answers import print_hits
from diptych.data.formats import open_captions
from diptych.index.engines.opening import empty_index, open_index
from diptych.model.retriever import Retriever
from diptych.recipes import RECIPES

COLOURS = ("red", "green", "blue", "grey")
COUNT = 32
HALF = 2e-4  # features of the frozen backbone go through the cache in float16


def make_shop(folder: Path, count: int = COUNT) -> Path:
    """Pictures of noise and a table with two texts, a price and a colour for each."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    with (folder / "items.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["image", "text", "price", "color"])
        for n in range(count):
            pixels = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8).repeat(4, 0).repeat(4, 1)
            Image.fromarray(pixels).save(folder / "images" / f"p{n}.png")
            for text in (f"thing number {n}", f"a {COLOURS[n % 4]} thing"):
                table.writerow([f"images/p{n}.png", text, n, COLOURS[n % 4]])
    return folder


def make_model(folder: Path, data: Path, seed: int = 0) -> Path:
    """A model as it is before training: all that these tests ask of one is to be the same twice."""
    import torch

    torch.manual_seed(seed)
    recipe = RECIPES["vse-infinity"]
    settings = recipe.settings(dim=32, image_size=64, min_count=1, word_dim=16)  # type: ignore[call-arg]
    recipe.build(settings, open_captions(data)).retriever.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shop, its model and its index; never changed."""
    folder = tmp_path_factory.mktemp("shop")
    make_model(folder / "run", make_shop(folder / "shop"))
    diptych("index", folder / "run", folder / "shop")
    return folder


@pytest.fixture
def own(made: Path, tmp_path: Path) -> Path:
    """The same, to be changed."""
    for name in ("shop", "shop.index"):
        shutil.copytree(made / name, tmp_path / name)
    shutil.copytree(made / "run", tmp_path / "run")
    diptych("index", tmp_path / "run", tmp_path / "shop")  # the copy is another collection
    diptych("index", "remove", tmp_path / "shop.index", *(f"images/p{n}.png" for n in range(COUNT)))
    return tmp_path


def found(place: Path, *query: object) -> list[dict[str, object]]:
    hits: list[dict[str, object]] = json.loads(diptych("search", place, *query, "--json", "--all").stdout)[
        "hits"
    ]
    return hits


# ---------------------------------------------------------------------- answers


def test_all_four_directions_score_as_the_model_does(made: Path) -> None:
    model, captions = Retriever.from_pretrained(made / "run"), open_captions(made / "shop")
    images = model.encode_image(captions.images)
    texts = model.encode_text(captions.texts)
    picture = made / "shop" / "images" / "p5.png"
    for query, vector in (
        ("thing number 7", texts[captions.texts.index("thing number 7")]),
        (picture, images[5]),
    ):
        for kind, rows in (("image", images), ("text", texts)):
            hits = found(made / "shop.index", query, "--kind", kind, "-k", 4)
            best = (rows @ vector).sort(descending=True).values[:4].tolist()
            assert [hit["score"] for hit in hits] == pytest.approx(best, abs=HALF)
            assert {hit["kind"] for hit in hits} == {kind}
    assert found(made / "shop.index", picture, "-k", 1)[0]["id"] == "images/p5.png"


def test_terms_weights_filters_and_more_like_this(made: Path) -> None:
    place, picture = made / "shop.index", made / "shop" / "images" / "p5.png"
    model = Retriever.from_pretrained(made / "run")
    a, b = model.encode_text(["red thing", "grey thing"])
    wanted = 2 * a - b + model.encode_image(picture)[0]
    shown = found(place, f'"2:red thing" - "grey thing" + {picture}', "-k", 3)
    assert shown == found(
        place, "2:red thing", "-", "grey thing", "+", picture, "-k", 3
    )  # a shell took the quotes
    images = model.encode_image(open_captions(made / "shop").images)
    best = (images @ (wanted / wanted.norm())).max()
    assert shown[0]["score"] == pytest.approx(float(best), abs=HALF)
    cheap = found(place, "thing", "--filter", 'price < 20 and color = "red"', "-k", 50)
    assert {hit["id"] for hit in cheap} == {f"images/p{n}.png" for n in range(0, 20, 4)}
    like = found(place, "--like", "images/p5.png", "-k", 50)
    assert len(like) == COUNT - 1
    assert "images/p5.png" not in {hit["id"] for hit in like}
    assert len(found(place, "thing", "--like", "images/p5.png", "-k", 3)) == 3


def test_hybrid_finds_the_words(made: Path) -> None:
    hits = found(made / "shop.index", "17", "--hybrid", "-k", 3)
    assert hits[0]["id"] == "images/p17.png"
    answer = json.loads(
        diptych(
            "search", made / "shop.index", "17", "--hybrid", "--chance", 1e-9, "--json", "--matches"
        ).stdout
    )
    assert [hit["id"] for hit in answer["hits"]] == ["images/p17.png"]  # it has every word
    assert answer["matched"]


def test_nothing_matches_is_said_beside_the_pipe(made: Path) -> None:
    asked = ("search", made / "shop.index", "zebra", "--chance", 1e-9)
    shown = diptych(*asked, "-k", 3)
    assert [line.split("\t")[3] for line in shown.stdout.splitlines()] == ["below the cut-off"] * 3
    unknown, nothing = shown.stderr.splitlines()  # "zebra" is in no caption of the model's vocabulary
    assert unknown.startswith("the model knows none of these words")
    assert nothing == "nothing matches clearly: these are the nearest."
    none = diptych(*asked, "--matches")
    assert none.stdout == ""
    assert none.stderr.splitlines()[1].startswith("nothing in the collection matches (the best is ")
    assert (
        diptych("search", made / "shop.index", "zebra", "--chance", 1e-9, "--paths", "--matches").stdout == ""
    )
    assert "loosen the filter" in diptych("search", made / "shop.index", "a", "--filter", "price > 99").stderr


def test_a_kind_that_is_missing_is_named(made: Path, tmp_path: Path) -> None:
    place, build = tmp_path / "images.index", ("index", made / "run", made / "shop", "--index")
    diptych(*build, place, "--no_texts")
    for more in ((), ("--filter", "price < 5"), ("--paths",)):
        said = diptych("search", place, "thing", "--kind", "text", *more)
        assert said.stdout == ""
        assert said.stderr == (
            "the index holds no texts: index a collection with texts, without --no_texts, or search its images "
            "with --kind image.\n"
        )
    diptych(*build, place)  # as advised
    assert len(found(place, "thing", "--kind", "text", "-k", 3)) == 3
    diptych("index", "remove", place, *(f"images/p{n}.png" for n in range(1, COUNT)))
    said = diptych("search", place, "--like", "images/p0.png")
    assert said.stderr == "the index holds no other image: index more of them, or ask for something else.\n"


def test_lines_and_paths_for_pipes(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made)
    hits = found(made / "shop.index", "thing", "-k", 3)
    lines = diptych("search", "shop.index", "thing", "-k", 3, "--all").stdout.splitlines()
    assert [line.removesuffix("\tbelow the cut-off") for line in lines] == [
        f"{hit['score']:.4f}\tshop/{hit['id']}\tthing number {str(hit['id'])[8:-4]}" for hit in hits
    ]
    assert [not line.endswith("below the cut-off") for line in lines] == [
        hit["matches"] is not False for hit in hits
    ]
    paths = diptych("search", "shop.index", "thing", "-k", 3, "--all", "--paths").stdout.splitlines()
    assert paths == [str(made / "shop" / str(hit["id"])) for hit in hits]
    texts = diptych("search", "shop.index", "thing", "-k", 3, "--all", "--paths", "--kind", "text").stdout
    assert all(Path(line).is_file() for line in texts.splitlines())  # a text's is that of its image


def test_thumbnails_in_a_page(made: Path, tmp_path: Path) -> None:
    picture = made / "shop" / "images" / "p5.png"
    diptych("search", made / "shop.index", picture, "-k", 4, "--all", "--html", tmp_path / "new" / "out.html")
    page = (tmp_path / "new" / "out.html").read_text("utf-8")
    assert page.count("<figure") == 4
    assert page.count("<img") == 5  # and the query's own
    assert page.count("src='data:image/webp;base64,") == 5
    links = re.findall(r"<a href='([^']+)'><img", page)
    assert len(links) == 4
    files = [(tmp_path / "new" / unquote(link)).resolve() for link in links]
    assert all(file.is_file() and file.is_relative_to(made / "shop") for file in files)
    assert all(file.name in page for file in files)
    filtered = ("--filter", "price < 1000", "--html", tmp_path / "filtered.html")
    diptych("search", made / "shop.index", "thing", *filtered)
    assert "Filter: price &lt; 1000." in (tmp_path / "filtered.html").read_text("utf-8")
    asked = ("search", made / "shop.index", "zebra", "--chance", 1e-9, "--html", tmp_path / "none.html")
    diptych(*asked)
    assert "Nothing matches clearly. The nearest:" in (tmp_path / "none.html").read_text("utf-8")
    diptych(*asked, "--matches")
    assert "Nothing in the collection matches." in (tmp_path / "none.html").read_text("utf-8")


def on_terminal(*args: object) -> str:
    """What a command shows on a terminal of 100 columns."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "TERM": "dumb"}
    command = [sys.executable, "-m", "diptych", *map(str, args)]
    with subprocess.Popen(command, stdout=follower, stderr=follower, env=environment) as child:
        os.close(follower)
        shown = b""
        while True:
            try:
                piece = os.read(leader, 4096)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            shown += piece
    os.close(leader)
    assert child.returncode == 0, shown
    return shown.decode()


def test_a_table_on_a_terminal(made: Path) -> None:
    shown = on_terminal("search", made / "shop.index", "17", "--hybrid", "-k", 3, "--chance", 1e-9)
    assert re.search(r"score\s+item\s+text\s+made of", shown)
    assert re.search(r"0\.\d{3}\s.*thing number 17\s+similarity", shown)
    assert re.search(r"2 of 3 are below the cut-off of 0\.\d{3} and dimmed\.", shown)


@pytest.mark.parametrize(("texts", "heads"), [(None, "score item"), (["a cup", ""], "score item text")])
def test_a_table_has_no_empty_column(
    texts: list[str] | None,
    heads: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    with create_index(tmp_path / "own.index", np.eye(2, 3), texts=texts) as index:
        print_hits(index, index.search(np.array([1.0, 0.5, 0])), everything=True)
    assert capsys.readouterr().out.splitlines()[1].split() == heads.split()


# ---------------------------------------------------------------------- upkeep


def test_a_collection_is_brought_up_to_date(own: Path) -> None:
    images = own / "shop" / "images"
    (images / "p0.png").unlink()  # its rows stay in the table
    Image.new("RGB", (20, 20), "red").save(images / "p1.png")
    (images / "p2.png").write_bytes(b"no picture any more")
    Image.new("RGB", (20, 20), "blue").save(images / "new.png")
    with (own / "shop" / "items.csv").open("a", encoding="utf-8") as table:
        table.write("images/new.png,something new,5,blue\n")
    again = diptych("index", own / "run", own / "shop")
    assert f"{COUNT - 1} images, {2 * COUNT - 3} texts" in again.stdout
    assert f"(1 added, 1 updated, {COUNT - 3} unchanged, 2 removed, 2 skipped)" in again.stdout
    skipped = [line for line in again.stderr.splitlines() if line.startswith("skipped ")]
    assert skipped[0] == f"skipped {images / 'p0.png'}: it is named by the collection but not on disk."
    assert skipped[1].startswith("skipped 1/images/p2.png: ")
    assert diptych("index", "verify", own / "shop.index").stdout == "sound\n"
    there = {hit["id"] for hit in found(own / "shop.index", "thing", "-k", 99)}
    assert there == {"1/images/new.png", *(f"1/images/p{n}.png" for n in range(COUNT) if n not in (0, 2))}


def test_info_duplicates_remove_compact(own: Path) -> None:
    place, images = own / "shop.index", own / "shop" / "images"
    shutil.copy(images / "p3.png", images / "p4.png")
    diptych("index", own / "run", own / "shop")
    pairs = diptych("index", "duplicates", place, "--limit", 2).stdout.splitlines()
    assert re.fullmatch(r"1\.0000\t\S*p3\.png\t\S*p4\.png", pairs[0])
    assert diptych("index", "duplicates", place, "--threshold", 0.99999, "--kind", "text").stdout
    assert "no pair among" in diptych("index", "duplicates", place, "--threshold", 1.5).stderr
    assert diptych("index", "remove", place, "1/images/p3.png", "1/images/p4.png").stdout.startswith(
        "removed 2 images"
    )
    about = diptych("index", "info", place).stdout
    assert f"{COUNT - 2} images, {2 * COUNT - 4} texts" in about
    assert "diptych index compact gives their space back" in about
    assert "price (number)" in about
    assert f"in {own / 'shop'}" in about
    assert re.fullmatch(r"freed \d\.\d MB\n", diptych("index", "compact", place).stdout)
    assert "removed      0 rows\n" in diptych("index", "info", place).stdout
    assert diptych("index", "verify", place).stdout == "sound\n"
    file = next(place.glob("vectors-*"))
    data = bytearray(file.read_bytes())
    data[9] ^= 1
    file.write_bytes(data)
    assert "is damaged between rows" in diptych("index", "verify", place, status=1).stdout


def test_the_approximate_index_is_made_on_request(made: Path, tmp_path: Path) -> None:
    pytest.importorskip("usearch")
    place = tmp_path / "i"
    arguments = (made / "run", made / "shop", "--index", place)
    diptych("index", *arguments, "--exact")
    assert "none: every search is exact" in diptych("index", "info", place).stdout
    assert "image" in refused("search", place, "thing", "--approximate")
    diptych("index", "--approximate", *arguments)
    assert f"approximate  {COUNT} images, {2 * COUNT} texts" in diptych("index", "info", place).stdout
    answer = json.loads(diptych("search", place, "thing", "--json", "--all").stdout)
    exact = json.loads(diptych("search", place, "thing", "--json", "--all", "--exact").stdout)
    assert (answer["exact"], exact["exact"]) == (False, True)
    assert answer["hits"] == exact["hits"]


def test_the_default_place_lies_beside_the_data(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "shop", tmp_path / "my shop")
    said = diptych(
        "index", made / "run", f"{tmp_path / 'my shop'}/items.csv?images={tmp_path / 'my shop'}"
    ).stdout
    place = tmp_path / "my shop" / "items.csv.index"
    assert f"next: diptych search '{place}' " in said  # as a shell wants it
    assert diptych("index", "verify", place).stdout == "sound\n"


def test_a_folder_is_indexed_from_inside_it(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made / "shop", tmp_path / "shop")
    monkeypatch.chdir(tmp_path / "shop")
    said = diptych("index", made / "run", ".").stdout
    assert (tmp_path / "shop.index" / "index.db").is_file(), said


def test_a_killed_run_continues_where_it_was(tmp_path: Path) -> None:
    shop = make_shop(tmp_path / "shop", 900)
    run, place = make_model(tmp_path / "run", shop), tmp_path / "shop.index"
    with process("index", run, shop, "--batch_size", 8, start_new_session=True) as child:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if (place / "index.db").is_file():
                with open_index(place) as index:
                    if index.count("image"):
                        break
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
    with open_index(place) as index:
        done = index.count("image")
        assert index.verify() == []
    assert 0 < done < 900
    assert f"({900 - done} added, 0 updated, {done} unchanged" in diptych("index", run, shop).stdout


# ---------------------------------------------------------------------- mistakes

UPKEEP = (("info",), ("verify",), ("compact",), ("remove", "images/p1.png"), ("duplicates",))


def every_command(place: object, run: Path, shop: Path) -> Iterator[tuple[object, ...]]:
    """Each command that takes an index."""
    for name, *ids in UPKEEP:
        yield ("index", name, place, *ids)
    yield ("search", place, "thing")
    yield ("index", run, shop, "--index", place)


def test_a_half_copied_index(made: Path, tmp_path: Path) -> None:
    place = tmp_path / "half"
    for name, sentence in (
        ("vectors-*", "is incomplete: .* is missing; copy the whole index again"),
        ("index.db", "damaged or half copied|is not an index|exists and is not empty"),
    ):
        shutil.copytree(made / "shop.index", place)
        if name == "index.db":
            (place / name).write_bytes((place / name).read_bytes()[:9000])
        else:
            next(place.glob(name)).unlink()
        for command in every_command(place, made / "run", made / "shop"):
            assert re.search(sentence, refused(*command)), command
        shutil.rmtree(place)


def test_a_place_that_is_no_index(made: Path, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    for command in every_command(tmp_path, made / "run", made / "shop"):
        assert re.search("is not an index|exists and is not empty|none of the 1 images", refused(*command))
    assert [file.name for file in tmp_path.iterdir()] == ["photo.jpg"]


def test_a_model_in_the_place_of_an_index(made: Path) -> None:
    run = made / "run"
    for command in (("search", run, "thing"), ("search", run, made / "shop", "thing"), ("serve", run)):
        assert f"{run} is a model" in refused(*command)


def test_another_model(made: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", made / "shop", seed=1)
    for command in (
        ("search", made / "shop.index", "thing", "--model", other),
        ("index", other, made / "shop"),
    ):
        assert f"'{made / 'run'}'" in refused(*command)


def test_a_read_only_folder(made: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        place = shutil.copytree(made / "shop.index", disk / "shop.index")
        make_read_only(disk)
        for command in every_command(place, made / "run", made / "shop"):
            if command[1] in ("info", "verify", "duplicates") or command[0] == "search":
                diptych(*command)
            else:
                assert "Read-only" in refused(*command)
        new = ("index", made / "run", made / "shop", "--index", disk / "new.index")
        assert "Read-only" in refused(*new)
        page = ("search", place, "thing", "--html", disk / "out.html")
        assert "out.html" in refused(*page)


def test_a_full_disk(made: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        place = shutil.copytree(made / "shop.index", disk / "shop.index")
        ballast = fill(disk)
        for command in every_command(place, made / "run", made / "shop"):
            if command[1] in ("info", "verify", "duplicates") or command[0] == "search":
                diptych(*command)
            else:
                assert ".index" in refused(*command)
        new = ("index", made / "run", made / "shop", "--index", disk / "new.index")
        assert ".index" in refused(*new)
        ballast.unlink()
        assert diptych("index", "verify", place).stdout == "sound\n"
        assert diptych("index", "remove", place, "images/p1.png").stdout.startswith("removed 1 image, ")


def test_a_second_writer(made: Path, own: Path) -> None:
    with open_index(own / "shop.index", writable=True):
        for command in every_command(own / "shop.index", own / "run", own / "shop"):
            if command[1] in ("compact", "remove") or command[1] == own / "run":
                assert "shop.index" in refused(*command)
            else:
                diptych(*command)


def test_an_empty_index_and_an_empty_collection(made: Path, tmp_path: Path) -> None:
    model = Retriever.from_pretrained(made / "run")
    place = tmp_path / "empty.index"
    empty_index(place, model.dim, model=str(made / "run"), fingerprint=model.fingerprint()).close()
    assert "empty.index" in refused("search", place, "thing")
    assert "0 images, 0 texts" in diptych("index", "info", place).stdout
    assert diptych("index", "verify", place).stdout == "sound\n"
    assert diptych("index", "compact", place).stdout == "freed 0.0 MB\n"
    assert "no pair among 0 image items" in diptych("index", "duplicates", place).stderr
    assert "'a'" in refused("index", "remove", place, "a")
    (tmp_path / "nothing").mkdir()
    refused("index", made / "run", tmp_path / "nothing")
    assert not (tmp_path / "nothing.index").exists()
    shutil.copytree(made / "shop", tmp_path / "shop")
    shutil.rmtree(tmp_path / "shop" / "images")  # a drive that is not there, say
    assert f"{COUNT} of {COUNT}" in refused("index", made / "run", tmp_path / "shop")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("thing", "-k", 0), "at least 1, not 0"),
        (
            ("thing", "--filter", "pricee < 5"),
            "unknown column 'pricee' at character 1 .* did you mean 'price'",
        ),
        (
            ("thing", "--filter", 'price < 5 and color = "'),
            "opens a quote at character 23 that never closes: close it",
        ),
        (
            ("thing", "--filter", 'price = "5"'),
            "holds number values, not text: take the value out of its quotes",
        ),
        (('"thing" + ',), "ends after '\\+' at character 9"),
        (("./nowhere.jpg",), "there is no file ./nowhere.jpg"),
        (("nosuch.jpg",), "there is no file nosuch.jpg .*: check the path, or search for these letters"),
        (("https://example.org/a.jpg",), "is a web address: download the image .*--allow_urls"),
        (("--like", "nobody"), "'nobody' is not in the index"),
        ((), "there is nothing to search for: give"),
        (("thing", "--rerank", 5), "no pair scorer to re-rank with: leave re-ranking out"),
        (("thing", "--chance", 0), "--chance"),
        (("thing", "--json", "--paths"), "cannot be combined: choose one"),
        (("thing", "--kind", "sound"), "'sound' is not one of 'image', 'text'"),
    ],
)
def test_mistakes_in_a_search(made: Path, arguments: tuple[object, ...], sentence: str) -> None:
    assert re.search(sentence, refused("search", made / "shop.index", *arguments))


def test_mistakes_in_indexing(made: Path, tmp_path: Path) -> None:
    assert "inffo" in refused("index", "inffo", made / "shop.index")
    assert f"diptych index {made / 'run'} {made / 'shop'}" in refused("index", made / "shop", made / "run")
    place = ("--index", made / "shop.index", "--precision", "binary")
    assert "float32" in refused("index", made / "run", made / "shop", *place)
    assert "nobody" in refused("index", "remove", made / "shop.index", "images/p1.png", "nobody")
    assert "images/p1.png" in {hit["id"] for hit in found(made / "shop.index", "thing", "-k", 99)}
    assert "--limit" in refused("index", "duplicates", made / "shop.index", "--limit", 0)
