"""What a model that is divided over processes (FSDP2) cannot do, and the Slurm file; the runs are in tests/scale."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from commands import refused, training
from small import precomputed
from test_docs import wrong_commands

from diptych.errors import SettingsError
from diptych.recipes import RECIPES
from diptych.training.processes import check_settings


def test_what_a_divided_model_cannot_do_is_refused(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    said = refused(*training("vse-infinity", data), f"--output_dir={tmp_path / 'run'}", "--shard_model")
    assert "--shard_model" in said
    recipe = RECIPES["vse-infinity"].settings
    for changes, wrong in (({"compile": True}, "--compile"), ({"precision": "fp16"}, "--precision fp16")):
        with pytest.raises(SettingsError, match=f"--shard_model.*{wrong}"):
            check_settings(recipe(shard_model=True, **changes), "cuda", 2)  # type: ignore[arg-type]


def test_the_slurm_file_is_sound(tmp_path: Path) -> None:
    file = Path(__file__).parents[1] / "docs" / "train.slurm"
    subprocess.run(["bash", "-n", str(file)], check=True)
    lines = file.read_text("utf-8").replace("\\\n", " ").splitlines()
    commands = [line for line in lines if "-m diptych" in line]
    assert len(commands) == 2
    page = tmp_path / "page.md"
    page.write_text("```console\n" + "\n".join(f"$ {line.strip()}" for line in commands) + "\n```\n", "utf-8")
    assert not wrong_commands(page)
