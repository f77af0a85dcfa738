"""Tests that need minutes or other servers: ``make test-scale``, or the path of one of these files."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from milvus_server import MilvusServer, milvus

FOLDER = Path(__file__).parent
Seen = TypeVar("Seen", pytest.TestReport, pytest.CollectReport)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The rest of the suite leaves this folder out: only who names it runs it."""
    named = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(one.is_relative_to(FOLDER) for one in named) else True


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A file that cannot be run for want of a package."""
    return _without_skips((yield))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that has no server."""
    return _without_skips((yield))


def _without_skips(report: Seen) -> Seen:
    """In CI a test of this folder that is skipped has failed: make test-scale installs all it needs."""
    if report.skipped and os.environ.get("CI") == "true":
        report.outcome, report.longrepr = "failed", f"skipped, and CI=true: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def server() -> Iterator[MilvusServer]:
    """One Milvus for every test that does not kill it."""
    with milvus() as running:
        yield running
