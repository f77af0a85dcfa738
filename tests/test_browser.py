"""The page in a real browser: typing, dropping an image, filters, more like this, keys, and every kind of state."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import DROP, PASTE, PHONE, chromium, expect, opened, shoot
from colours import ColourModel, draw, make_index, running
from fastapi.testclient import TestClient

from diptych.errors import DataError, SettingsError
from diptych.index.engines.embedded.index import EmbeddedIndex
from diptych.index.protocol import Item
from diptych.index.query.filters import parse_filter
from diptych.reports.audit import Question, audit_page, read_page
from diptych.reports.page import Answer, QueryCard, Section
from diptych.reports.page import page as report_page
from diptych.web.app import create_app
from diptych.web.limits import Limits
from diptych.web.serve import serve

TOKEN = "correct-horse"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    make_index(folder, ColourModel()).close()
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with (
        EmbeddedIndex(folder / "index") as index,
        running(create_app(index, ColourModel(), chance=0.2, local=True)) as url,
    ):
        yield url


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    yield from opened(browser, address)


def data(colour: str, shape: str) -> str:
    out = io.BytesIO()
    draw(colour, shape).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def captions(page: Any, count: int) -> list[str]:
    expect(page.locator("body.busy")).to_have_count(0)  # the answer to what was just asked is there
    texts: list[str] = page.locator("#grid .caption").all_inner_texts()
    return texts[:count]


def ask(page: Any, text: str) -> None:
    page.fill("#query", text)
    page.keyboard.press("Enter")


def test_a_query_fills_the_grid(page: Any) -> None:
    expect(page.locator("#status")).to_contain_text("A look at the collection of 60 images")
    expect(page.locator("#size")).to_have_text("60 images · 60 texts")
    expect(page.locator(".switch", has_text="Re-rank")).to_be_hidden()
    ask(page, "a red circle")
    expect(page.locator("#status")).to_contain_text("5 matches of 60 images")
    assert all("red" in caption for caption in captions(page, 5))
    expect(page.locator(".divider")).to_have_count(1)
    expect(page.locator("#grid li:not(.below) .card")).to_have_count(5)
    assert float(page.locator(".score b").first.inner_text()) > 0.8
    assert "q=a+red+circle" in page.url
    expect(page).to_have_title("a red circle · Diptych")
    shown = page.locator("#grid img").first.evaluate("img => img.decode().then(() => img.naturalWidth)")
    assert shown == 96
    assert shoot(page, "search").stat().st_size > 10_000
    page.click("#more")
    expect(page.locator("#grid .card")).to_have_count(48)


def test_typing_alone_searches(page: Any) -> None:
    page.locator("#query").press_sequentially("teal")
    expect(page.locator("#status")).to_contain_text("5 matches")
    assert all("teal" in caption for caption in captions(page, 5))


def test_half_an_expression_is_waited_for(page: Any) -> None:
    page.locator("#query").press_sequentially("teal")
    expect(page.locator("#status")).to_contain_text("5 matches")
    with page.expect_response(lambda answer: answer.status == 422):
        page.fill("#query", '"2:teal" - ')
    expect(page.locator("#notice")).to_be_hidden()
    assert all("teal" in caption for caption in captions(page, 5))
    page.keyboard.press("Enter")  # now it is meant
    expect(page.locator(".notice.bad")).to_contain_text("The query ends after '-'")
    page.fill("#query", '"2:teal" - "red"')
    expect(page.locator("#status")).to_contain_text("of 60 images")
    expect(page.locator("#notice")).to_be_hidden()


def test_a_dropped_image_finds_images_and_texts_and_mixes_with_words(page: Any) -> None:
    page.evaluate(DROP, [data("purple", "ring"), "mine.png", "image/png"])
    expect(page.locator("#panel")).to_be_visible()
    expect(page.locator("#title")).to_have_text("mine.png")
    expect(page.locator("#status")).to_contain_text("matches of 60 images")
    assert all("purple" in caption for caption in captions(page, 5))
    expect(page.locator("#texts li")).to_have_count(6)
    assert all("purple" in text for text in page.locator("#texts span").all_inner_texts()[:5])
    expect(page.locator("#balance")).to_be_hidden()
    ask(page, "yellow")
    expect(page.locator("#balance")).to_be_visible()
    expect(page.locator("#grid")).to_contain_text("yellow")
    assert {"purple", "yellow"} == {caption.split()[1] for caption in captions(page, 10)}
    page.locator("#weight").fill("2")
    expect(page.locator("#grid .caption").nth(4)).to_contain_text("purple")
    page.click("#chip button")
    expect(page.locator("#panel")).to_be_hidden()
    assert all("yellow" in caption for caption in captions(page, 5))


def test_an_image_is_pasted_or_picked(page: Any, tmp_path: Path) -> None:
    page.evaluate(PASTE, [data("green", "cross"), "pasted.png", "image/png"])
    expect(page.locator("#title")).to_have_text("pasted.png")
    assert "green" in captions(page, 1)[0]
    draw("blue", "square").save(tmp_path / "picked.png")
    page.set_input_files("#file", tmp_path / "picked.png")
    expect(page.locator("#title")).to_have_text("picked.png")
    expect(page.locator("#grid .caption").first).to_contain_text("blue")


def test_filters_by_menu_and_by_text(page: Any) -> None:
    ask(page, "red")
    page.select_option("#picks select[name=shape]", label="ring")
    expect(page.locator("#grid .card")).to_have_count(12)
    assert all(caption.endswith("ring") for caption in captions(page, 12))
    assert captions(page, 1) == ["a red ring"]
    page.fill("#filter", "price < 20")
    page.keyboard.press("Enter")
    expect(page.locator("#grid .card")).to_have_count(4)
    page.reload()  # the address holds the question
    expect(page.locator("#grid .card")).to_have_count(4)
    expect(page.locator("#query")).to_have_value("red")
    page.fill("#filter", "prize < 20")
    page.keyboard.press("Enter")
    expect(page.locator(".notice.bad")).to_contain_text("The filter has a mistake")
    expect(page.locator(".notice.bad")).to_contain_text("at character 1 of the filter")
    expect(page.locator(".notice.bad")).to_contain_text("did you mean 'price'?")
    expect(page.locator(".filter")).to_have_class("filter wrong")
    page.fill("#filter", "price > 1000")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("Nothing in the collection passes the filter")
    page.click("#notice button")
    expect(page.locator("#filter")).to_have_value("")
    expect(page.locator("#grid .card")).to_have_count(24)


EXAMPLES: list[tuple[dict[str, Any], str]] = [
    ({"unit price": 3}, "`unit price` < 50"),
    ({"prix-été.2": 3}, "prix-été.2 < 50"),
    ({"2nd": 3}, "`2nd` < 50"),
    ({"new": False}, "new = false"),
    ({"Like": 'a "b" \\ c'}, '`Like` = "a \\"b\\" \\\\ c"'),
    ({"tags": ["a", "b"]}, 'tags contains "…"'),
    ({"a`b": 1, "color": "red"}, 'color = "red"'),  # no filter can name the first
    ({"nothing": None}, 'nothing = "…"'),
]


def of_one_item(folder: Path, metadata: dict[str, Any]) -> EmbeddedIndex:
    model = ColourModel()
    index = EmbeddedIndex.create(folder / "index", model.dim, fingerprint=model.fingerprint())
    index.add([Item("a", text="red", metadata=metadata)], model.encode_text(["red"]))
    return index


def test_the_example_of_a_filter_is_one(page: Any, browser: Any, tmp_path: Path) -> None:
    expect(page.locator("#filter")).to_have_attribute("placeholder", "Filter, such as price < 50")
    for n, (metadata, example) in enumerate(EXAMPLES):  # what other services would tell this page
        with (
            of_one_item(tmp_path / str(n), metadata) as index,
            TestClient(create_app(index, ColourModel())) as c,
        ):
            parse_filter(example, index.info.columns)
            page.evaluate("told => { about = told; menus(); }", c.get("/api/about").json())
        assert page.get_attribute("#filter", "placeholder") == f"Filter, such as {example}"
    with of_one_item(tmp_path, {"in stock": True}) as index, running(create_app(index, ColourModel())) as url:
        for other in opened(browser, url):
            expect(other.locator("#filter")).to_have_attribute(
                "placeholder", "Filter, such as `in stock` = true"
            )
            other.fill("#filter", "`in stock` = true")
            other.keyboard.press("Enter")
            expect(other.locator("#status")).to_have_text("The 1 image that passes the filter")
            expect(other.locator(".card")).to_have_count(1)


def test_more_like_this_shows_the_item_and_its_texts(page: Any) -> None:
    ask(page, "a green square")
    expect(page.locator("#status")).to_contain_text("5 matches")
    page.locator(".card", has_text="a green square").click()
    expect(page.locator("#title")).to_have_text("a green square")
    expect(page.locator("#status")).to_contain_text("24 best of 60 images")
    expect(page.locator("#grid li.below, .divider")).to_have_count(0)  # no cut-off: the nearest are asked for
    assert all("green" in caption for caption in captions(page, 4))
    assert "a green square" not in captions(page, 4)
    expect(page.locator("#columns")).to_contain_text("square")
    with page.context.expect_page() as picture:
        page.click("#whole")
    assert picture.value.url.endswith("/api/image?id=green%2Fsquare.png")
    expect(page.locator("#texts li").first).to_contain_text("green")
    fitting = page.locator("#texts span").first.inner_text()
    page.locator("#texts button").first.click()
    expect(page.locator("#query")).to_have_value(fitting)
    page.go_back()
    expect(page.locator("#title")).to_have_text("a green square")
    page.go_back()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#query")).to_have_value("a green square")


def test_what_is_typed_while_the_texts_are_looked_up_is_kept(page: Any) -> None:
    ask(page, "red")
    expect(page.locator("#status")).to_contain_text("matches")
    page.locator("#grid .card").first.click()
    expect(page.locator("#texts li")).to_have_count(6)
    held: list[Any] = []
    page.route(re.compile("/api/search.*kind=text"), lambda route: held.append(route))
    with page.expect_request(re.compile("kind=text")) as texts:
        ask(page, "yellow")
    assert "query=" not in texts.value.url  # what fits the image alone
    with page.expect_request(re.compile("kind=image.*hybrid=true")) as images:
        page.locator(".switch", has_text="words").click()
    assert "query=yellow" in images.value.url
    page.wait_for_function("new URL(location).searchParams.get('hybrid') === '1'")
    page.press("#query", "End")
    with page.expect_request(re.compile("kind=image.*yellow.ring")):
        page.locator("#query").press_sequentially(" ring")
    page.unroute_all()  # what was held goes on
    expect(page.locator("body.busy")).to_have_count(0)
    page.locator(".switch", has_text="words").click()
    page.wait_for_function("new URL(location).searchParams.get('q') === 'yellow ring'")
    assert page.input_value("#query") == "yellow ring"


def test_texts_are_found_and_lead_to_images(page: Any) -> None:
    page.locator(".segments label", has_text="Texts").click()
    ask(page, "pink")
    expect(page.locator("#status")).to_contain_text("5 matches of 60 texts")
    expect(page.locator(".grid.lines .card")).to_have_count(24)
    page.locator(".card").first.click()
    expect(page.locator("#status")).to_contain_text("images")
    expect(page.locator("#grid .caption").first).to_contain_text("pink")


def test_words_are_matched_when_asked(page: Any) -> None:
    ask(page, "triangle")
    expect(page.locator("#status")).to_contain_text("of 60 images")
    assert not all("triangle" in caption for caption in captions(page, 4))  # the model knows colours only
    page.locator(".switch", has_text="Match words").click()
    expect(page.locator("#grid .caption").nth(3)).to_contain_text("triangle")


def test_a_model_with_a_pair_scorer_offers_to_re_rank(browser: Any, folder: Path) -> None:
    class Pairs(ColourModel):
        def pair_scorer(self, query: Any, items: Any, files: Any) -> list[float]:
            return [float("cross" in item.text) for item in items]

    with EmbeddedIndex(folder / "index") as index, running(create_app(index, Pairs(), chance=0.2)) as url:
        for page in opened(browser, url):
            ask(page, "red")
            expect(page.locator("#status")).to_contain_text("5 matches")
            page.locator(".switch", has_text="Re-rank").click()
            expect(page.locator("#grid .caption").first).to_have_text("a red cross")
            assert "rerank=1" in page.url


def test_the_keyboard_alone_is_enough(page: Any) -> None:
    expect(page.locator(".card").first).to_be_visible()
    page.keyboard.press("/")
    expect(page.locator("#query")).to_be_focused()
    page.keyboard.type("blue")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("5 matches")
    page.keyboard.press("ArrowDown")
    expect(page.locator(".card").nth(0)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".card").nth(1)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".card").nth(0)).to_be_focused()
    chosen = captions(page, 1)[0]
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text(chosen)
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#query")).to_be_focused()
    expect(page.locator("#query")).to_have_value("blue")
    expect(page.locator("#status")).to_contain_text("5 matches")
    page.keyboard.press("Escape")
    expect(page.locator("#query")).to_have_value("")


def test_nothing_matches_is_shown(page: Any) -> None:
    ask(page, "submarine")
    expect(page.locator("#notice")).to_contain_text("Nothing matches")
    expect(page.locator("#grid li.below")).to_have_count(24)


def test_nothing_that_matches_has_no_bar(page: Any) -> None:
    ask(page, "submarine")
    expect(page.locator("#notice")).to_contain_text("Nothing matches")
    expect(page.locator(".meter:visible")).to_have_count(0)
    ask(page, "red")
    expect(page.locator("#status")).to_contain_text("5 matches")
    expect(page.locator(".meter:visible")).to_have_count(24)


def test_numbers_fall_in_the_order_shown(page: Any) -> None:
    ask(page, "red triangle")
    page.locator(".switch", has_text="Match words").click()
    expect(page.locator("#grid .caption").first).to_have_text("a red triangle")
    captions(page, 1)
    numbers = [float(text) for text in page.locator(".score b").all_inner_texts()]
    assert len(numbers) == 24
    assert numbers == sorted(numbers, reverse=True)
    expect(page.locator(".card").first).to_have_attribute("title", re.compile("similarity 0"))


def test_a_count_under_a_filter_is_of_those_that_pass(page: Any) -> None:
    ask(page, "red")
    expect(page.locator("#status")).to_contain_text("of 60 images")
    page.fill("#filter", 'shape = "square"')
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text("of the 12 images that pass the filter (60 in all)")
    page.fill("#filter", 'id = "green/square.png"')
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_contain_text(
        "1 closest of the 1 image that passes the filter (60 in all)"
    )


def test_the_page_says_how_reliable_the_cut_off_is(browser: Any, folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index, running(create_app(index, ColourModel())) as url:
        for page in opened(browser, url):
            expect(page.locator("#why")).to_be_hidden()  # nothing was asked
            ask(page, "red")
            expect(page.locator("#note")).to_be_hidden()
            page.get_by_label("About the cut-off").click()
            expect(page.locator("#note")).to_contain_text("ut-off: ")
            note = page.evaluate("async () => (await (await fetch('/api/search?text=red')).json()).note")
            assert page.locator("#note").inner_text().lower() == f"{note}.".lower()


def test_controls_that_cannot_work_are_absent(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    with EmbeddedIndex.create(tmp_path / "index", model.dim, fingerprint=model.fingerprint()) as index:
        index.add([Item(f"{n}.png") for n in range(3)], model.encode_text(["red", "green", "blue"]))
        with running(create_app(index, model)) as url:
            for screen in ({}, PHONE):
                for page in opened(browser, url, **screen):
                    ask(page, "red")
                    expect(page.locator("#status")).to_contain_text("3 best of 3 images")
                    expect(page.locator("#size")).to_have_text("3 images")
                    expect(page.locator("#controls :is(label, button):visible")).to_have_count(0)


def test_pairs_of_an_audit_are_judged_by_keyboard(browser: Any, folder: Path, tmp_path: Path) -> None:
    file, picture = tmp_path / "audit.html", base64.b64decode(data("red", "ring"))
    pairs = [
        Question(f"{n}.png", f"{n}#0", f"text {n}", ["another"], "far", picture=picture) for n in range(3)
    ]
    content = audit_page("Audit of rings", ["3 pairs"], pairs, "0" * 16)
    file.write_text(content)
    foreign = content.replace("<main>", "<script>document.title = 'foreign'</script><main>")
    page_and_policy = foreign.encode(), read_page(file)[1]
    with EmbeddedIndex(folder / "index") as index:
        with running(create_app(index, ColourModel(), audit=page_and_policy)) as url:
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{url}/audit")
            expect(page.locator("article")).to_have_count(3)
            expect(page).to_have_title("Audit of rings")  # only scripts that we write are run
            assert (
                page.evaluate("document.images[0].decode().then(() => document.images[0].naturalWidth)") == 96
            )
            for key in "kwu":
                page.keyboard.press(key)
            expect(page.locator("#count")).to_have_text("3 of 3 judged")
            with page.expect_download() as download:
                page.click("#save")
            download.value.save_as(tmp_path / "corrections.csv")
            context.close()
        with pytest.raises(SettingsError, match="without a token"):
            serve(folder / "index", ColourModel(), token=TOKEN, private=True, audit=read_page(file))
        file.write_text(content.replace('"use strict";', '"use strict"; // of another version'))
        with pytest.raises(DataError, match="another version"):
            read_page(file)
        file.write_text("<html>")
        for wrong in (file, tmp_path / "none.html"):
            with pytest.raises(DataError, match="diptych audit"):
                read_page(wrong)
    rows = (tmp_path / "corrections.csv").read_text().splitlines()
    assert [row.split(",")[2] for row in rows] == ["verdict", "keep", "wrong", "unsure"]


def test_equal_captions_are_shown_once(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    with EmbeddedIndex.create(tmp_path / "index", model.dim, fingerprint=model.fingerprint()) as index:
        texts = ["red one", "red one", "red two", "red two", "red three"]
        items = [Item("a.png", text="\n".join(texts))]
        items += [Item(f"t{n}", "text", text=text, image_id="a.png") for n, text in enumerate(texts)]
        index.add(items, model.encode_text(["red"] * len(items)))
        with running(create_app(index, model)) as url:
            for page in opened(browser, url):
                page.locator(".card").click()
                expect(page.locator("#texts li")).to_have_count(3)
                assert page.locator("#own li").all_inner_texts() == ["red two", "red three"]


def test_a_refused_image_is_forgotten(page: Any, address: str) -> None:
    expect(page.locator(".card").first).to_be_visible()
    page.evaluate(DROP, ["AAAA", "broken.png", "image/png"])
    expect(page.locator(".notice.bad")).to_contain_text("broken.png")
    expect(page.locator("#chip")).to_be_hidden()
    page.reload()  # the same address
    expect(page.locator("#status")).to_contain_text("A look at the collection")
    expect(page.locator("#chip")).to_be_hidden()
    expect(page.locator("#notice")).to_be_hidden()
    page.goto(f'{address}/?q="red')  # nothing was found before: the page is not left blank
    expect(page.locator(".notice.bad")).to_contain_text("never closes")
    expect(page.locator("#grid .card")).to_have_count(24)


def test_filters_unfold_on_a_phone(browser: Any, address: str) -> None:
    for page in opened(browser, address, **PHONE):
        ask(page, "red")
        expect(page.locator("#filter")).to_be_hidden()
        page.tap("#options")
        for control in page.locator("#choices :is(select, label)").all():
            box = control.bounding_box()
            if box is not None:
                assert box["x"] >= 0
                assert box["x"] + box["width"] <= 390
        expect(page.locator("#hybrid + i + span")).to_be_visible()
        page.select_option("#picks select[name=shape]", label="ring")
        expect(page.locator("#options")).to_have_text("Filters (1)")
        page.tap("#options")
        expect(page.locator("#filter")).to_be_hidden()


def test_columns_that_mean_nothing_to_users_are_hidden(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    with make_index(tmp_path, model) as index:
        items = [
            Item(f"x{n}.png", text="a red thing", metadata={"split": split, "shelf": shelf})
            for n, (split, shelf) in enumerate((("train", "a"), ("val", "b")))
        ]
        index.add(items, np.asarray(model.encode_text(["red", "red"])))
        with running(create_app(index, model)) as url:
            for page in opened(browser, url):
                expect(page.locator("#picks select[name=shelf]")).to_be_visible()
                expect(page.locator("#picks select[name=split]")).to_have_count(0)
                page.goto(f"{url}/?like=x0.png")
                expect(page.locator("#columns")).to_contain_text("shelf")
                expect(page.locator("#columns")).not_to_contain_text("split")
                page.goto(f"{url}/?filter=split%20%3D%20%22val%22&q=red")  # a typed filter may name it
                expect(page.locator("#grid .caption")).to_have_count(1)


def test_words_and_an_item_are_balanced(page: Any) -> None:
    page.goto(page.url.split("?")[0] + "?like=green%2Fsquare.png&q=red")
    expect(page.locator("#balance")).to_be_visible()
    captions(page, 1)
    page.locator("#weight").fill("-2")
    expect(page.locator("#grid .caption").first).to_contain_text("red")
    page.locator("#weight").fill("2")
    expect(page.locator("#grid .caption").first).to_contain_text("green")


def test_a_picture_is_opened_downloaded_and_its_path_copied(browser: Any, address: str, folder: Path) -> None:
    for page in opened(
        browser, address, accept_downloads=True, permissions=["clipboard-read", "clipboard-write"]
    ):
        page.locator(".card").first.hover()
        with page.context.expect_page() as tab:
            page.locator(".open").first.click()
        assert "/api/image?id=" in tab.value.url
        page.goto(f"{address}/?like=green%2Fsquare.png")
        expect(page.locator("#acts")).to_be_visible()
        assert page.locator("#open").get_attribute("href") == "/api/image?id=green%2Fsquare.png"
        with page.expect_download() as saved:
            page.click("#download")
        assert saved.value.suggested_filename == "square.png"
        page.click("#copy")
        expect(page.locator("#copy")).to_have_text("Copied")
        copied = Path(page.evaluate("navigator.clipboard.readText()"))
        assert copied.is_absolute()
        assert copied == (folder / "pictures" / "green" / "square.png").resolve()


def test_where_a_file_lies_is_told_on_this_machine_only(folder: Path) -> None:
    with EmbeddedIndex(folder / "index") as index:
        for local in (True, False):
            with TestClient(create_app(index, ColourModel(), local=local)) as client:
                (item,) = client.get("/api/items", params={"id": "green/square.png"}).json()
                assert Path(item["file"]).is_file() is local
                assert item["path"] == "green/square.png"
                assert bool(item["file"]) is local


def test_an_error_keeps_the_results_before_it(page: Any) -> None:
    ask(page, "red")
    expect(page.locator("#status")).to_contain_text("5 matches")
    before = captions(page, 24)
    ask(page, '"red')
    expect(page.locator(".notice.bad")).to_contain_text("never closes")
    expect(page.locator("#notice button")).to_be_hidden()  # asking the same again is no help
    expect(page.locator("#status")).to_have_text("What the search before found:")
    assert captions(page, 24) == before
    ask(page, "red")
    expect(page.locator("#notice")).to_be_hidden()
    page.evaluate(DROP, ["AAAA", "broken.png", "image/png"])
    expect(page.locator(".notice.bad")).to_contain_text("broken.png")
    ask(page, "blue")
    expect(page.locator("#notice")).to_be_hidden()
    expect(page.locator("#grid .caption").first).to_contain_text("blue")


def test_what_is_no_image_is_told(page: Any) -> None:
    expect(page.locator(".card").first).to_be_visible()
    page.evaluate(DROP, [data("red", "ring"), "notes.txt", "text/plain"])
    expect(page.locator(".notice.bad")).to_contain_text("notes.txt is not an image")
    page.evaluate(DROP, ["AAAA", "broken.png", "image/png"])
    expect(page.locator(".notice.bad")).to_contain_text("The uploaded image 'broken.png'")


def test_a_refused_image_does_not_leave_the_one_before_beside_it(page: Any) -> None:
    expect(page.locator(".card").first).to_be_visible()
    page.evaluate(DROP, [data("red", "ring"), "ring.png", "image/png"])
    expect(page.locator("#title")).to_have_text("ring.png")
    page.evaluate(DROP, ["AAAA", "broken.png", "image/png"])
    expect(page.locator(".notice.bad")).to_contain_text("broken.png")
    expect(page.locator("#panel")).to_be_hidden()


def test_tall_pictures_and_long_texts_stay_in_their_cards(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    text = "a tall red cross and so many more words about it that no card has the room for all of them"
    with make_index(tmp_path, model) as index:
        where = index.collection("shapes", str(tmp_path / "pictures")).number
        draw("red", "cross").resize((100, 300)).save(tmp_path / "pictures" / "tall.png")
        index.add([Item("tall", path="tall.png", text=text, collection=where)], model.encode_text(["red"]))
        with running(create_app(index, model)) as url:
            for page in opened(browser, url):
                page.goto(f'{url}/?filter=id = "tall"')
                expect(page.locator(".card")).to_have_count(1)
                expect(page.locator(".frame img")).to_have_js_property("complete", True)
                size = page.locator(".frame").bounding_box()
                assert size["height"] == pytest.approx(size["width"], abs=2)
                caption = page.locator(".caption")  # of its third line nothing is to be seen
                height = caption.evaluate("(box) => parseFloat(getComputedStyle(box).lineHeight) * 2")
                assert caption.bounding_box()["height"] == pytest.approx(height, abs=2)


def test_markup_in_texts_stays_text(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    with make_index(tmp_path, model) as index:
        index.add([Item(evil, text=evil + " red", metadata={"a": evil})], model.encode_text(["red"]))
        with running(create_app(index, model)) as url:
            for page in opened(browser, url):
                page.on("dialog", lambda dialog: pytest.fail("a script ran"))
                ask(page, "red")
                expect(page.locator("#grid")).to_contain_text("<script>alert(2)</script>")
                page.locator(".card", has_text="<script>").click()
                expect(page.locator("#columns")).to_contain_text("<script>")


def test_an_empty_collection_and_a_service_that_stops(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    with EmbeddedIndex.create(tmp_path / "index", model.dim, fingerprint=model.fingerprint()) as index:
        pages = None
        with running(create_app(index, model)) as url:
            pages = opened(browser, url)
            page = next(pages)
            expect(page.locator("#notice")).to_contain_text("This collection is empty")
            shoot(page, "empty")
        ask(page, "anything")
        expect(page.locator(".notice.bad")).to_contain_text("The service does not answer")
        expect(page.locator("#notice button")).to_be_visible()
        shoot(page, "stopped")
        for _ in pages:
            pass


def test_a_private_service_asks_for_its_token(browser: Any, folder: Path) -> None:
    with (
        EmbeddedIndex(folder / "index") as index,
        running(create_app(index, ColourModel(), token=TOKEN, private=True, limits=Limits(k=30))) as url,
    ):
        for page in opened(browser, url):
            expect(page.locator("#refusal")).to_contain_text("the token that the service was started with")
            page.fill("#token", "wrong-token")
            page.keyboard.press("Enter")
            expect(page.locator("#refusal")).to_contain_text("The token is wrong")
            shoot(page, "token")
            page.fill("#token", TOKEN)
            page.keyboard.press("Enter")
            expect(page.locator("#grid .card")).to_have_count(24)
            size = page.locator("#grid img").first.evaluate(
                "img => new Promise(done => { const look = () => img.naturalWidth ? done(img.naturalWidth) "
                ": setTimeout(look, 20); look(); })"
            )
            assert size == 96


def test_a_picture_that_comes_late_takes_no_other_ones_place(browser: Any, folder: Path) -> None:
    before = """const make = URL.createObjectURL, end = URL.revokeObjectURL;
      window.live = new Set();
      URL.createObjectURL = (blob) => { const url = make(blob); live.add(url); return url; };
      URL.revokeObjectURL = (url) => { live.delete(url); end(url); };
      sessionStorage.setItem("token", "TOKEN");"""
    colour = """async (img) => { await img.decode(); const place = new OffscreenCanvas(1, 1).getContext("2d");
      place.drawImage(img, 48, 48, 1, 1, 0, 0, 1, 1); return [...place.getImageData(0, 0, 1, 1).data]; }"""
    waiting: list[Any] = []
    with (
        EmbeddedIndex(folder / "index") as index,
        running(create_app(index, ColourModel(), token=TOKEN, private=True)) as url,
    ):
        for page in opened(browser, url):
            page.add_init_script(before.replace("TOKEN", TOKEN))
            page.route("**/api/image?id=red*", lambda route: waiting.append(route))
            page.route("**/api/thumbnail?id=teal*", lambda route: route.fulfill(body="no picture"))
            page.goto(f"{url}/?like=red%2Fcircle.png")
            expect(page.locator("#title")).to_contain_text("red")
            page.evaluate(DROP, [data("blue", "circle"), "mine.png", "image/png"])
            expect(page.locator("#title")).to_have_text("mine.png")
            blue = page.locator("#picture").evaluate(colour)
            with page.expect_response(lambda answer: "/api/image" in answer.url) as answer:
                waiting[0].continue_()
            answer.value.finished()
            page.wait_for_timeout(200)
            assert page.locator("#picture").evaluate(colour) == blue
            ask(page, "teal")
            expect(page.locator("#grid .frame.none").first).to_be_visible()
            expect(page.locator("body.busy")).to_have_count(0)
            page.wait_for_timeout(200)
            assert page.evaluate("live.size") == 1  # that of the dropped image


def test_a_low_limit_on_answers_and_a_column_with_an_odd_name(browser: Any, tmp_path: Path) -> None:
    model = ColourModel()
    with EmbeddedIndex.create(tmp_path / "index", model.dim, fingerprint=model.fingerprint()) as index:
        columns = [{"constructor": "a"}, {"constructor": "b"}] * 4
        items = [Item(f"i{n}", text=f"item {n}", metadata=one) for n, one in enumerate(columns)]
        texts = [Item(f"t{n}", "text", text=f"text {n}") for n in range(8)]
        index.add([*items, *texts], model.encode_text(["red", "teal", "blue", "green"] * 4))
        with running(create_app(index, model, limits=Limits(k=3))) as url:
            for page in opened(browser, url):
                expect(page.locator("#grid .card")).to_have_count(3)
                menu = page.get_by_label("Only constructor")
                expect(menu).to_have_value("")
                expect(menu).not_to_have_class("chosen")
                menu.select_option("b")
                expect(page.locator("#status")).to_have_text("Some of the 4 images that pass the filter")
                page.locator(".card").first.click()
                expect(page.locator("#texts li")).to_have_count(3)
                expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(browser: Any, address: str, scheme: str) -> None:
    for page in opened(browser, address, **PHONE, color_scheme=scheme):
        ask(page, "orange")
        expect(page.locator("#status")).to_contain_text("5 matches")
        page.locator(".card").first.tap()
        expect(page.locator("#panel")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        widths = page.locator(".card").evaluate_all("cards => cards.slice(0, 2).map(c => c.offsetWidth)")
        assert all(150 < width < 200 for width in widths)
        assert page.locator("#controls").evaluate("c => c.offsetHeight") < 60  # one line
        light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(247, 247, 249)"
        assert light == (scheme == "light")
        shoot(page, f"phone-{scheme}", full_page=True)


def test_a_report_fits_a_phone(browser: Any, tmp_path: Path) -> None:
    answers = [
        Answer(f"a picture with a name that is rather long {n}", 0.5, n == 1, draw("red", "ring"))
        for n in range(6)
    ]
    content = report_page(
        "A report", "One.",
        [
            Section("Text → image", "Two.", [QueryCard("a red ring", answers, draw("red", "ring"))]),
            Section("Numbers", "Three.", table=(("", "photos", "vse-infinity"), [
                ("text → image R@10", "71.2", "59.0"), ("RSUM", "312.1 (278.9–347.6)", "247.3 (214.2–279.8)")])),
        ],
        commands="diptych search ./a-folder-with-a-long-name.index 'and a long query too'",
        curves={"loss": [(0, 2.0), (1, 1.0)]},
        reports={"photos": ([("image_to_text_recall@1", "23.1", "20.1–26.3")], {"data_hash": "0123456789abcdef" * 4})},
    )  # fmt: skip
    (tmp_path / "report.html").write_text(content, "utf-8")
    for page in opened(browser, (tmp_path / "report.html").as_uri(), **PHONE):
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        table = page.locator("table").first  # both models, without scrolling sideways
        assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
        assert page.locator("main").count() == 1
        top = page.locator("figure").first.bounding_box()["y"]
        assert top < page.locator("table").first.bounding_box()["y"]
