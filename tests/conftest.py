"""What many tests share: a temporary cache folder, a PostgreSQL server, and no deadline for Hypothesis."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

import diptych  # noqa: F401  loaded before ONNX Runtime, which then reports nothing

with suppress(ImportError):
    import onnxruntime  # noqa: F401  loaded after usearch 2.26, ONNX Runtime 1.31 ends the process

if TYPE_CHECKING:
    from servers import Server

# an example that takes long on a busy machine is no failure; settings() keeps Hypothesis' profile for CI
settings.register_profile("diptych", settings(), deadline=None)
settings.load_profile("diptych")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The cache folder of this session, shared by the processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "diptych-cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DIPTYCH_CACHE", str(folder))
        patch.setenv("DIPTYCH_HOME", str(folder.with_name("diptych-home")))
        patch.delenv("DIPTYCH_BACKEND", raising=False)  # the default is tested: ONNX Runtime, on a CPU
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A PostgreSQL server for one file of tests."""
    from servers import postgres

    with postgres() as running:
        yield running
