"""What the docs say is so: commands parse, names exist, links resolve, examples run, tables match the settings."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from generated_docs import pages as made_pages
from small import pictures, texts

from diptych import __version__
from diptych.cli import main, with_underscores
from diptych.data.formats import open_captions
from diptych.errors import SettingsError
from diptych.recipes import RECIPES
from diptych.training.checkpoint import FREE_TO_CHANGE

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CONTENTS = ("methods", "results")
"""Contents pages, each with its parts beside it: methods.md and methods-*.md."""
LONGEST = 320  # lines of a page that a person writes
TRAINING = ROOT / "docs" / "training.md"
SHELLS = ("console", "sh", "bash")
STOPS = {"|", ">", ">>", "2>", "&&", "||", "&", ";"}
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


class Block(NamedTuple):
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    """Fenced blocks."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(language, text) for language, text in found]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


def inline(page: Path) -> list[str]:
    """What stands between backticks in the prose; a line break inside is a space."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(page))]


# commands


class Written(NamedTuple):
    """A command of the docs: what follows ``diptych``, and whether it is whole or only named in a sentence."""

    words: tuple[str, ...]
    whole: bool


def written(page: Path) -> Iterator[Written]:
    for block in blocks(page):
        if block.language in SHELLS:
            for line in block.text.replace("\\\n", " ").splitlines():
                if block.language != "console" or line.startswith("$ "):
                    yield from _commands(line.removeprefix("$ "), whole=True)
    for code in inline(page):
        if code.startswith("diptych "):
            yield from _commands(code.replace("[-", "-").replace("]", ""), whole=False)


def _commands(line: str, whole: bool) -> Iterator[Written]:
    words = shlex.split(line, comments=True)
    if "diptych" not in words:
        return
    words = words[words.index("diptych") + 1 :]
    words = words[: next((i for i, word in enumerate(words) if word in STOPS), len(words))]
    for word in [w for w in words if re.fullmatch(r"[\w-]+(\|[\w-]+)+", w)]:  # info|verify: each of them
        for choice in word.split("|"):
            yield Written(tuple(choice if w == word else w for w in words), whole=False)
        return
    yield Written(tuple(words), whole)


def check(command: Written) -> None:
    """Raise where click would: an unknown command or flag and, of a whole command, anything missing or wrong."""
    node: click.Command = main
    words = list(command.words)
    context = click.Context(main, info_name="diptych", **main.context_settings)
    while isinstance(node, click.Group) and words and not words[0].startswith("-"):
        name, resolved, words = node.resolve_command(context, words)
        assert resolved is not None
        node = resolved
        context = click.Context(node, info_name=name, parent=context)
    if command.whole and isinstance(node, click.Group) and not words:
        raise click.UsageError("this is only the beginning of a command", ctx=context)
    if command.whole:
        node.make_context(context.info_name, list(words))
    known = flags_of(node) | {"--help", "--version"}
    for word in words:
        flag = (
            "--" + with_underscores(word.split("=")[0].removeprefix("--")) if word.startswith("--") else word
        )
        if flag.startswith("--") and flag not in known:
            raise click.NoSuchOption(flag, ctx=context)


def flags_of(command: click.Command) -> set[str]:
    return {
        name
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in [*parameter.opts, *parameter.secondary_opts]
    }


@cache
def all_flags() -> set[str]:
    def walk(command: click.Command) -> set[str]:
        if not isinstance(command, click.Group):
            return flags_of(command)
        context = click.Context(command)
        below = [command.get_command(context, name) for name in command.list_commands(context)]
        return flags_of(command).union(*(walk(c) for c in below if c is not None))

    return walk(main)


def wrong_commands(page: Path) -> list[str]:
    """The commands of a page that would be refused, each with the reason."""
    found = []
    for command in written(page):
        try:
            check(command)
        except (click.UsageError, SettingsError) as error:  # the second of a name that nothing has
            found.append(f"{page.name}: diptych {' '.join(command.words)}: {error}")
    return found


@pages
def test_every_command_parses(page: Path) -> None:
    assert not wrong_commands(page)


@pytest.mark.parametrize(
    "line",
    [
        "diptych train vse-infinity --data d --output_dir r --learning_rat 1",
        "diptych train vse-infinity --data d --output_dir r --precision fp8",
        "diptych train vse-infinty --data d --output_dir r",
        "diptych ablate coder --table 9 --data d --output_dir r",
        "diptych serch photos.index words",
        "torchrun --nproc_per_node 2 -m diptych train coder --data d --outputdir r",
        "diptych index info|verfy photos.index",
        "diptych index run photos --precison float16",
        "diptych train",
    ],
)
def test_a_wrong_command_is_noticed(line: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```console\n$ {line}\n```\n")
    assert len(wrong_commands(page)) == 1


def test_commands_are_found() -> None:
    """The extraction itself: it must not pass because it sees nothing."""
    assert len({w for page in PAGES for w in written(page)}) > 40


@pages
def test_flags_named_in_a_sentence_exist(page: Path) -> None:
    named = {
        "--" + with_underscores(code.split()[0].split("=")[0][2:])
        for code in inline(page)
        if re.match(r"--[a-z]", code)
    }
    assert named <= all_flags() | {"--nproc_per_node", "--nnodes"}


@pages
def test_extras_benchmarks_and_targets_exist(page: Path) -> None:
    content = page.read_text("utf-8")
    extras = {e for names in re.findall(r"diptych\[([\w,-]+)\]", content) for e in names.split(",")}
    assert extras <= set(project()["optional-dependencies"])
    for script in re.findall(r"benchmarks/\w+\.py", content):
        assert (ROOT / script).is_file(), script
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for target in re.findall(r"[`$] ?make (\w+)", content):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


# names of files, functions and tests


@cache
def defined(path: Path) -> dict[str, ast.AST]:
    """Functions, classes, methods (``Class.method``) and constants of a file."""
    found: dict[str, ast.AST] = {}

    def add(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                found[prefix + child.name] = child
                add(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.Assign | ast.AnnAssign) and not prefix:
                targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                found.update({t.id: child for t in targets if isinstance(t, ast.Name)})

    add(ast.parse(path.read_text("utf-8")), "")
    return found


def located(name: str) -> Path | None:
    places = [folder / name for folder in (ROOT, ROOT / "src" / "diptych", ROOT / "tests", ROOT / "docs")]
    return next((place for place in places if place.is_file()), None)


def unknown_names(codes: list[str]) -> list[str]:
    """References ``file.py``, ``file.py:Name.method`` and ``test_file.py::test`` that lead nowhere."""
    wrong = []
    for code in codes:
        if (found := re.fullmatch(r"([\w/]+\.py)(?:::?([\w.]+))?", code)) is None:
            continue
        file, name = located(found[1]), found[2]
        if file is None or (name is not None and name not in defined(file)):
            wrong.append(code)
    return wrong


@pages
def test_every_file_and_function_named_exists(page: Path) -> None:
    assert not unknown_names(inline(page))


def test_a_wrong_name_is_noticed() -> None:
    wrong = [
        "objectives/triplets.py",
        "objectives/triplet.py:Triplet.backward",
        "test_triplet.py::test_nothing",
    ]
    right = ["objectives/triplet.py", "objectives/triplet.py:Triplet.forward", "ops.py:unit"]
    assert unknown_names([*wrong, *right]) == wrong


def test_modules_named_in_docstrings_exist() -> None:
    """``data.arrays`` or ``data.arrays.ranges``: what begins with a folder of the package is a module of it."""
    source, names = ROOT / "src" / "diptych", []
    for file in source.rglob("*.py"):
        names += re.findall(r"``(?:diptych\.)?([a-z_]+(?:\.\w+)+)``", file.read_text("utf-8"))
    named = [name.split(".") for name in names if (source / name.split(".")[0]).is_dir()]
    modules = [parts for parts in named if parts[1] not in ("html", "json", "onnx", "safetensors")]
    assert len(modules) > 10
    for parts in modules:
        places = [source.joinpath(*parts[:count]) for count in range(2, len(parts) + 1)]
        assert places[-1].is_dir() or any(place.with_suffix(".py").is_file() for place in places), parts


def parts_of(contents: str) -> list[Path]:
    """The pages that a contents page is divided into."""
    return sorted((ROOT / "docs").glob(f"{contents}-*.md"))


def inline_methods() -> list[str]:
    return [code for page in [ROOT / "docs" / "methods.md", *parts_of("methods")] for code in inline(page)]


def test_methods_name_enough() -> None:
    codes = inline_methods()
    assert len({c for c in codes if re.fullmatch(r"[\w/]+\.py:\w[\w.]*", c)}) > 40
    assert len({c for c in codes if "::test_" in c}) > 50


def test_arguments_named_in_methods_exist() -> None:
    """``Contrast(stop_gradient=False)``: there is such a class or function, and it takes such an argument."""
    takes: dict[str, set[str]] = {}
    for path in (ROOT / "src" / "diptych").rglob("*.py"):
        for name, node in defined(path).items():
            if isinstance(node, ast.FunctionDef):
                arguments = {a.arg for a in [*node.args.args, *node.args.kwonlyargs]}
                takes.setdefault(name.removesuffix(".__init__"), set()).update(arguments)
            elif isinstance(node, ast.ClassDef):
                fields = {a.target.id for a in node.body if isinstance(a, ast.AnnAssign)}  # type: ignore[union-attr]
                takes.setdefault(name, set()).update(fields)
    calls = [found for code in inline_methods() for found in re.findall(r"([\w.]+)\((\w+)=", code)]
    assert len(calls) > 5
    assert not [f"{name}({argument}=)" for name, argument in calls if argument not in takes.get(name, set())]


def test_the_architecture_names_every_module() -> None:
    described = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    tops = [
        p.name
        for p in (ROOT / "src" / "diptych").iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    ]
    missing = [
        t for t in tops if not t.startswith("__") and f"`{t}`" not in described and f"`{t}/`" not in described
    ]
    assert not missing


# links


def anchors(page: Path) -> set[str]:
    heads = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pages
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(place), f"{page.name} links to {target}"


def test_the_index_of_the_docs_is_complete() -> None:
    listed = (ROOT / "docs" / "README.md").read_text("utf-8")
    missing = [
        p.name for p in (ROOT / "docs").glob("*.md") if p.name != "README.md" and f"({p.name})" not in listed
    ]
    assert not missing


@pytest.mark.parametrize("contents", CONTENTS)
def test_a_contents_page_and_its_parts_link_each_other(contents: str) -> None:
    parts = parts_of(contents)
    assert len(parts) >= 10
    listed = (ROOT / "docs" / f"{contents}.md").read_text("utf-8")
    assert not [page.name for page in parts if f"({page.name})" not in listed]
    assert not [page.name for page in parts if f"({contents}.md)" not in page.read_text("utf-8")]


def test_no_page_is_too_long() -> None:
    made = made_pages()
    long = {
        page.name: lines
        for page in PAGES
        if page.parent.name == "docs" and page not in made
        if (lines := len(page.read_text("utf-8").splitlines())) > LONGEST
    }
    assert not long


@pages
def test_no_paragraph_is_too_long(page: Path) -> None:
    """A point of a list is a paragraph; a table is none. Addresses of links are not read."""
    text = re.sub(r"\]\([^)]*\)", "]", prose(page))
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*[*-] |\s*\d+\. |#)", text)
    long = [p.strip()[:60] for p in paragraphs if "\n|" not in p and len(re.findall(r"[^\W_]\S*", p)) > 120]
    assert not long


# Python


@pages
def test_python_blocks_compile_and_their_imports_exist(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diptych"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{page.name}: {node.module} has no {alias.name}"


NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_are_small_and_without_outputs(notebook: Path) -> None:
    """``make test-scale`` executes them."""
    assert notebook.stat().st_size < 20_000
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            assert cell["execution_count"] is None
            assert not re.findall(r"from diptych\.", source)
            ast.parse(source)
        for target in re.findall(r"\]\(([^)\s#]+)\)", source if cell["cell_type"] == "markdown" else ""):
            assert (notebook.parent / target).is_file(), target


def test_there_are_three_notebooks() -> None:
    listed = (ROOT / "docs" / "README.md").read_text("utf-8")
    assert [f"(notebooks/{path.name})" in listed for path in NOTEBOOKS] == [True] * 3


def test_the_readme_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a tiny model that reads pictures, and an index of two of them, under the names the README gives."""
    from diptych.index.ingest.build import index_collection
    from diptych.model.adapter import TorchModel

    example = next(block.text for block in blocks(ROOT / "README.md") if block.language == "python")
    monkeypatch.chdir(tmp_path)
    drawn = pictures(Path("photos"), 3)
    for path, line in zip(drawn, texts(3), strict=True):
        path.with_suffix(".txt").write_text(line + "\n")
    for name in re.findall(r'"([\w/]+\.jpg)"', example):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(drawn[0].read_bytes())
    recipe = RECIPES["photos"]
    settings = recipe.settings(image_size=64)  # type: ignore[call-arg]
    model = recipe.build(settings, open_captions("photos")).retriever
    model.save_pretrained("runs/photos")
    index_collection(TorchModel(model), "photos", "photos.index", model_name="runs/photos")
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    for line in example.splitlines():
        if (shape := re.match(r"(\w+) = .*# \((\d+), (\d+)\)", line)) is not None:
            assert tuple(names[shape[1]].shape) == (int(shape[2]), int(shape[3]))  # type: ignore[attr-defined]
    assert "model" in names


# settings


def test_what_is_made_from_the_code_is_up_to_date() -> None:
    for path, content in made_pages().items():
        assert path.read_text("utf-8") == content, f"run 'make docs': {path.name} is not what the code says"


@pytest.mark.parametrize(
    ("module", "phrase"),
    [
        ("training/log.py", "its value when all similarities are"),
        ("training/log.py", "the loss became NaN or infinite at step"),
        ("training/log.py", "belongs to a frozen part but is in training mode"),
        ("evaluation/cards.py", "% of the queries are tied"),
    ],
)
def test_messages_are_quoted_as_they_are(module: str, phrase: str) -> None:
    assert phrase in (ROOT / "src" / "diptych" / module).read_text("utf-8")
    assert phrase in TRAINING.read_text("utf-8")


def test_settings_free_to_change_are_named() -> None:
    (listed,) = re.findall(r"may\s+differ:(.*?)\.\n", TRAINING.read_text("utf-8"), re.DOTALL)
    assert set(re.findall(r"--(\w+)", listed)) == FREE_TO_CHANGE


# what a reader meets first, and what no reader should meet


def test_the_readme_begins_with_both_commands() -> None:
    first_screen = (ROOT / "README.md").read_text("utf-8").splitlines()[:30]
    assert any(line.startswith("$ make demo") for line in first_screen)
    assert any(line.startswith("$ make test") for line in first_screen)


def test_the_readme_fits_and_shows_itself() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    assert len(lines) <= 250
    pictures = [found[1] for line in lines[:12] if (found := re.match(r"!\[[^\]]+\]\(([^)]+)\)", line))]
    assert pictures
    assert all((ROOT / picture).is_file() for picture in pictures)


def test_every_extra_is_listed_with_its_size() -> None:
    rows = re.findall(
        r"^\| `([\w-]+)` \|.*\| (\d+|–) \|$", (ROOT / "docs" / "install.md").read_text("utf-8"), re.MULTILINE
    )
    assert {name for name, _ in rows} == set(project()["optional-dependencies"]) - {"test"}


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("README.md", "CPU build of torch"),
        ("docs/install.md", "CPU build of torch"),
        ("docs/install.md", "home folder that cannot be written"),
        ("docs/quickstart.md", "This is work for a GPU"),
        ("docs/search.md", "--like ID` needs no model"),
    ],
)
def test_what_new_users_missed_is_said(page: str, words: str) -> None:
    assert words in (ROOT / page).read_text("utf-8")


@pages
def test_no_command_needs_a_release(page: Path) -> None:
    """There is none yet: what pip is asked for is the clone, or a package of somebody else."""
    if page.name != "CHANGELOG.md":
        assert "pip install 'diptych" not in page.read_text("utf-8")
        assert "pip install diptych" not in page.read_text("utf-8")


def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    """With a program that exists in the place of the one in /opt."""
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze on this machine: the unit is not verified")
    unit = (ROOT / "docs" / "diptych.service").read_text("utf-8")
    (command,) = re.findall(r"^ExecStart=(\S+) (.*)$", unit, re.MULTILINE)
    assert all(isinstance(word, str) for word in _parsed(command[1]))
    (tmp_path / "diptych.service").write_text(unit.replace(command[0], sys.executable))
    done = subprocess.run([tool, "verify", str(tmp_path / "diptych.service")], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def _parsed(line: str) -> list[str]:
    """The arguments of a command line that the command line reader accepts."""
    words = shlex.split(line)
    command = main.get_command(click.Context(main), words[0])
    assert command is not None
    command.make_parser(click.Context(command)).parse_args(list(map(str, words[1:])))
    return words


def test_the_citation_is_that_of_this_version() -> None:
    said = dict(
        line.split(": ", 1)
        for line in (ROOT / "CITATION.cff").read_text("utf-8").splitlines()
        if re.match(r"[a-z-]+: ", line)
    )
    assert (said["cff-version"], said["version"], said["license"]) == (
        "1.2.0",
        __version__,
        project()["license"],
    )
    assert {"message", "title"} <= said.keys()


@pages
def test_nothing_private_is_told(page: Path) -> None:
    content = page.read_text("utf-8")
    assert not re.findall(r"(?<![\w.])/(?:work|root|tmp)/\S*|/home/\w+", content)
    assert not re.findall(r"(?i)(?<![\w-])(?:sub)?agents?\b", content)


@pages
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert not re.findall(r"^[A-Z][A-Z0-9_]{4,}$|\b(?:TODO|FIXME|XXX)\b", prose(page), re.MULTILINE)


def test_the_changelog_knows_the_version() -> None:
    assert re.search(
        rf"^## \[?{re.escape(__version__)}\]?", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE
    )
    assert project()["version"] == __version__


def test_moved_modules_are_where_the_changelog_says() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    table = changelog.split("### Moved modules")[1].split("\n## ")[0]
    moved = re.findall(
        r"^\| `(diptych[\w.]+?)(?:\.\*)?` \| `(diptych[\w.]+?)(?:\.\*)?` \|$", table, re.MULTILINE
    )
    assert len(moved) == table.count("\n| `diptych") > 80

    def place(module: str) -> Path:
        return ROOT / "src" / Path(*module.split("."))

    assert not [
        new for _, new in moved if not (place(new).is_dir() or place(new).with_suffix(".py").is_file())
    ]
    assert not [old for old, _ in moved if place(old).with_suffix(".py").is_file()]


def test_the_licence_is_the_declared_one() -> None:
    assert project()["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")[:200]
