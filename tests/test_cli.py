"""The command line itself: every verb explains itself, every setting is a flag, Ctrl-C ends with a sentence."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from commands import diptych, process, refused, training
from small import pictures, precomputed

import diptych as package
from diptych.cli import main
from diptych.cli.flags import OUTPUT, OUTPUT_FILE
from diptych.recipes import RECIPES
from diptych.registries import COMMANDS, EXPORTERS


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """A command and all below it, with the words that call them."""
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, (*path, name))


ALL = dict(commands(main))


@pytest.mark.parametrize("path", list(ALL), ids=" ".join)
def test_every_command_and_flag_explains_itself(path: tuple[str, ...]) -> None:
    command = ALL[path]
    said = diptych(*path, "--help").stdout
    assert command.help
    _, _, listed = said.partition("Commands:")
    assert not [line for line in listed.splitlines() if line.endswith("...")], "cut off"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{' '.join(path)} {parameter.name} has no help"


def test_the_verbs_are_listed() -> None:
    said = diptych("--help").stdout
    assert re.findall(r"^  ([a-z]+) ", said, re.MULTILINE) == list(COMMANDS)
    assert re.findall(r"^([A-Z]\w+):$", said, re.MULTILINE) == [
        "Options", "Data", "Train", "Evaluate", "Search", "Exchange"
    ]  # fmt: skip
    assert package.__version__ in diptych("--version").stdout
    assert "Usage: " in diptych(status=2).stderr


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_setting_is_a_flag(name: str) -> None:
    flags = {flag for option in ALL["train", name].params for flag in (*option.opts, *option.secondary_opts)}
    for field in dataclasses.fields(RECIPES[name].settings):
        assert f"--{field.name}" in flags
        if isinstance(field.default, bool):
            assert f"--no_{field.name}" in flags


HEAVY = ("torch", "numpy", "transformers", "PIL")


@pytest.mark.parametrize(
    "words",
    [(), ("search",), ("index", "build"), ("serve",), ("data",), ("evaluate",), ("compare",), ("teach",)],
    ids=" ".join,
)
def test_help_imports_nothing_heavy(words: tuple[str, ...]) -> None:
    """In a process of its own, timed by its CPU seconds: a busy machine does not make it slower."""
    code = (
        "import resource, sys; from diptych.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        f"print([m for m in {HEAVY} if m in sys.modules], used.ru_utime + used.ru_stime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, check=True
    )
    assert "Usage: " in done.stdout
    heavy, _, seconds = done.stdout.splitlines()[-1].rpartition(" ")
    assert heavy == "[]"
    assert float(seconds) < 3.0  # measured: 0.1; a tenth of what torch alone takes


def test_the_help_page_says_what_the_verbs_say_themselves() -> None:
    said = diptych("--help").stdout
    for verb in COMMANDS:
        assert f"{verb} " in said
        assert ALL[verb,].get_short_help_str(200) == COMMANDS.own[verb].help
    for name in EXPORTERS:
        assert ALL["export", name].get_short_help_str(200) == EXPORTERS.own[name].help


def test_hyphens_are_as_good_as_underscores(tmp_path: Path) -> None:
    folder = precomputed(tmp_path / "data")
    words = training("vse-infinity", folder, epochs=1, batch_size=12)
    hyphens = [str(word).replace("_", "-") if str(word).startswith("--") else word for word in words]
    diptych(*hyphens, "--output-dir", tmp_path / "run", "--no-train-text", "--patience=2")
    said = diptych(
        "search", tmp_path / "nowhere.index", "x", "--allow-urls", "--compute-precision", "no", status=2
    )
    assert "option" not in said.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("train", "vse-infinity", "--lr", "1"), "there is no option --lr: did you mean --learning_rate?"),
        (("train", "vse-infinity", "--output", "x"), "--output"),
        (("train", "vse-infinity", "--freeze-text"), "--no_train_text"),
        (("search", "x.index", "dog", "--k", "5"), "--k"),
        (("search", "x.index", "dog", "--top-k", "5"), "--top_k"),
        (("search", "x.index", "dog", "--wwwww"), "--wwwww"),
        (("train", "--data", "photos"), "--data"),
        (("ablate", "--table", "3"), "--table"),
    ],
)
def test_the_option_that_was_meant(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


def test_arguments_that_are_missing_or_too_many(tmp_path: Path) -> None:
    assert "--data" in refused("train", "coder", "--output_dir", tmp_path / "run")
    both = ("--output_dir", tmp_path / "a", "--resume_from_checkpoint", tmp_path / "b")
    assert "--output_dir" in refused(*training("coder", tmp_path), *both)
    sentence = refused(*training("coder", tmp_path))
    assert "--output_dir" in sentence
    assert sentence.endswith("train coder --help')")
    assert "--output_dir" in refused("extract", tmp_path, "--outptu_dir", tmp_path)
    assert "'fly'" in refused("fly")


def test_a_file_that_may_not_be_read_is_a_sentence(tmp_path: Path) -> None:
    data = precomputed(tmp_path / "toy_precomp")
    if os.geteuid() == 0:
        (data / "train_caps.txt").unlink()
        (data / "train_caps.txt").mkdir()  # root may read everything but not a folder as a file
    else:
        (data / "train_caps.txt").chmod(0)
    assert "train_caps.txt" in refused(*training("vse-infinity", data), "--output_dir", tmp_path / "run")


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="needs a file that no disk can read")
def test_what_is_written_may_lie_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ``--output=~/a.json`` a shell leaves the ``~``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for kind in (OUTPUT, OUTPUT_FILE):
        assert kind.convert("~/a.json", None, None) == tmp_path / "a.json"


def test_a_disk_that_fails_is_a_sentence(tmp_path: Path) -> None:
    """The system gives no name with what it cannot read: its own memory at 0 is such a place."""
    (tmp_path / "texts.csv").symlink_to("/proc/self/mem")
    assert "Input/output error" in refused("data", "check", tmp_path / "texts.csv")


@pytest.mark.parametrize("when", ["starting", "working"])
def test_ctrl_c_ends_with_a_sentence(when: str, tmp_path: Path) -> None:
    pictures(tmp_path / "photos", 400, size=8)
    features = tmp_path / "features"
    running = process("extract", tmp_path / "photos", "--output_dir", features, "--batch_size", 1)
    maps = Path(f"/proc/{running.pid}/maps")  # the libraries it has opened so far
    try:
        for _ in range(3000):  # until it imports what it needs, or has begun to write
            if features.exists() if when == "working" else "libtorch" in maps.read_text():
                break
            time.sleep(0.01)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 130, said
    assert said.strip().splitlines()[-1] == "interrupted: what was saved before is intact."
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("word", "status", "said"), [("--version", 0, "version"), ("fly", 2, "there is no command")]
)
def test_one_of_several_processes_ends_with_its_status_and_all_it_said(
    word: str, status: int, said: str
) -> None:
    """It ends without the interpreter's own way out."""
    done = subprocess.run(
        [sys.executable, "-m", "diptych", word],
        env={**os.environ, "WORLD_SIZE": "2"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, said in done.stdout + done.stderr) == (status, True)
