"""The demo's emoji in a real browser, served by the real command: words, a dropped image, a category, a phone."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from browsers import DROP, PHONE, chromium, expect, opened, shoot
from emoji_index import make_emoji_index
from servers import served

from diptych.data.formats import open_captions

DEMO = Path(__file__).parent.parent / "demo" / "emoji.index"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """After ``make demo`` its own index, otherwise a small one made on the spot."""
    place = DEMO if (DEMO / "index.db").is_file() else make_emoji_index(tmp_path_factory.mktemp("demo"))
    with served(place) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


def drawing(code: str) -> str:
    """The picture of an emoji as a client would send it."""
    captions = open_captions("emoji")
    out = io.BytesIO()
    captions.images[list(captions.image_ids).index(code)].save(out, "PNG")  # type: ignore[union-attr]
    return base64.b64encode(out.getvalue()).decode()


def test_the_demo_is_searched_in_the_browser(browser: Any, address: str) -> None:
    for page in opened(browser, address):
        expect(page.locator("#grid .card")).to_have_count(24)
        shoot(page, "demo-start")
        page.fill("#query", "dog face")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text(re.compile(r"of [\d,]+ images · \d+ ms"))
        expect(page.locator("#grid .caption", has_text=re.compile("^dog face$"))).to_be_visible()
        sides = page.locator("#grid img").evaluate_all(
            "all => Promise.all(all.slice(0, 8).map(i => i.decode().then(() => i.naturalWidth)))"
        )
        assert min(sides) >= 72
        shoot(page, "demo-words")

        page.fill("#query", "")
        page.evaluate(DROP, [drawing("1F34E"), "apple.png", "image/png"])
        expect(page.locator("#title")).to_have_text("apple.png")
        expect(page.locator("#grid .caption").first).to_have_text("red apple")
        expect(page.locator("#texts li").first).to_be_visible()
        shoot(page, "demo-image")

        page.select_option("#picks select[name=category]", label="Animals & Nature")
        expect(page.locator("#grid .caption").first).not_to_have_text("red apple")
        shown = page.locator("#grid .card").evaluate_all("cards => cards.map(card => card.dataset.id)")
        items = page.request.get(f"{address}/api/items?{urlencode([('id', id) for id in shown])}").json()
        assert len(items) > 10
        assert {item["metadata"]["category"] for item in items} == {"Animals & Nature"}
        shoot(page, "demo-category")


def test_the_demo_fits_a_phone(browser: Any, address: str) -> None:
    for page in opened(browser, address, **PHONE):
        page.fill("#query", "a fruit")
        page.keyboard.press("Enter")
        expect(page.locator("#status")).to_contain_text(re.compile(r"of [\d,]+ images · \d+ ms"))
        expect(page.locator("#grid .card").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        shoot(page, "demo-phone")
