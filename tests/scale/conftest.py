"""Tests that need minutes or other servers: ``make test-scale``, or the path of one of these files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from milvus_server import MilvusServer, milvus

FOLDER = Path(__file__).parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The rest of the suite leaves this folder out: only who names it runs it."""
    named = [(config.invocation_params.dir / arg.partition("::")[0]).resolve() for arg in config.args]
    return None if any(one.is_relative_to(FOLDER) for one in named) else True


@pytest.fixture(scope="session")
def server() -> Iterator[MilvusServer]:
    """One Milvus for every test that does not kill it."""
    with milvus() as running:
        yield running
