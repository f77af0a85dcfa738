"""A real Chromium for tests, driven by Playwright."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
PATIENCE = 20_000  # milliseconds: a test machine is busy
PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True}
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run",
]  # fmt: skip
DROP = """([data, name, type]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const transfer = new DataTransfer();
  transfer.items.add(new File([bytes], name, { type }));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    document.body.dispatchEvent(new DragEvent(kind, { dataTransfer: transfer, bubbles: true, cancelable: true }));
  }
}"""
PASTE = DROP.replace('["dragenter", "dragover", "drop"]', '["paste"]').replace(
    "new DragEvent(kind, { dataTransfer", "new ClipboardEvent(kind, { clipboardData"
)


@contextmanager
def chromium() -> Iterator[Any]:
    """The system's browser; where there is none, CI fails and others skip."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        assert os.environ.get("CI") != "true", "CI has no chromium: apt-get install -y chromium"
        pytest.skip("no chromium: apt-get install -y chromium")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, headless=True, args=FLAGS)
        yield browser
        browser.close()


def opened(browser: Any, address: str, **options: Any) -> Iterator[Any]:
    """A page that tells every mistake of its script, and every request to anywhere else."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}, **options})
    page, faults = context.new_page(), []
    page.set_default_timeout(PATIENCE)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console", lambda line: faults.append(line.text) if "Content Security Policy" in line.text else None
    )
    page.on("request", lambda r: None if r.url.startswith((address, "blob:")) else faults.append(r.url))
    page.goto(address)
    yield page
    context.close()
    assert faults == []


def violations(page: Any) -> list[str]:
    """What axe-core finds wrong with the page as it stands, one line for each rule."""
    page.evaluate((resources.files("axe_playwright_python") / "axe.min.js").read_text("utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{rule['id']} ({len(rule['nodes'])}): {rule['nodes'][0]['html'][:200]} {rule['nodes'][0]['failureSummary']}"
        for rule in found
    ]


def expect(locator: Any) -> Any:
    from playwright.sync_api import expect

    return expect(locator)


def shoot(page: Any, name: str, **options: Any) -> Path:
    """Leave a picture of the page in ``build/screenshots``."""
    path = SCREENSHOTS / f"{name}.png"
    page.screenshot(path=path, **options)
    return path
