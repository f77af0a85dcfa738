"""The package from a checkout: what lies beside a script must not hide it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import diptych

LEFTOVERS = ["diptych/README.md", "diptych/diptych/__pycache__/old.pyc", "diptych/__pycache__/old.pyc"]


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_a_script_beside_the_checkout_imports_the_package(tmp_path: Path, leftover: str) -> None:
    """Beside a folder ``diptych``: a clone, an old clone that was updated, or what ``git clean`` leaves of one."""
    (tmp_path / leftover).parent.mkdir(parents=True)
    (tmp_path / leftover).write_bytes(b"")
    script = tmp_path / "script.py"
    script.write_text("from diptych import open_captions\nimport diptych\nprint(diptych.__file__)\n")
    for words in ([str(script)], ["-c", script.read_text()], ["-m", "diptych", "--version"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert diptych.__file__ in done.stdout or diptych.__version__ in done.stdout
