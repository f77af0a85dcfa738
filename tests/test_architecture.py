"""The house: imports point one way, files fit in the head, importing the package is light."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.recipes import RECIPES

PACKAGE = Path(__file__).parent.parent / "src" / "diptych"
TABLE = (PACKAGE.parent.parent / "docs" / "architecture.md").read_text("utf-8")
ROW = re.compile(r"^\| `(\w+)(?:\.py|/)` \|[^|]+\|([^|]*)\|$", re.MULTILINE)
ALLOWED = {room: {"errors", *re.findall(r"`(\w+)`", allowed)} for room, allowed in ROW.findall(TABLE)}
"""Which rooms a room may import, as the table of docs/architecture.md says."""
FILES = sorted(p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE)


def layer(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_layers(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module == "diptych":
            names = [f"diptych.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("diptych.")}
    return found - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    own = layer(path)
    if own != "__main__":
        assert own in ALLOWED, f"{own} has no row in docs/architecture.md"
        wrong = imported_layers(path) - ALLOWED[own] - {own}
        assert not wrong, f"{path.name} imports rooms that {own} may not: {sorted(wrong)}"


def test_the_table_allows_no_more_than_is_used() -> None:
    used: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for path in FILES:
        used.setdefault(layer(path), set()).update(imported_layers(path))
    spare = {room: ALLOWED[room] - used[room] - {"errors", room} for room in ALLOWED}
    assert not any(spare.values()), {room: more for room, more in spare.items() if more}


def test_the_rooms_are_a_partial_order() -> None:
    below = {room: set(allowed) - {room} for room, allowed in ALLOWED.items()}
    while free := [room for room, allowed in below.items() if not allowed]:
        below = {room: allowed - set(free) for room, allowed in below.items() if room not in free}
    assert not below, f"rooms that import each other: {sorted(below)}"


def test_the_order_would_notice_a_wrong_import(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from diptych.runs.train import run_recipe\nfrom diptych import cli\n")
    assert imported_layers(wrong) == {"runs", "cli"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_fit_in_the_head(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 415


LONGEST = 60


def long_functions(path: Path) -> set[str]:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, functions) and node.end_lineno - node.lineno >= LONGEST
    }


def test_functions_fit_on_a_page() -> None:
    found = {f"{path.relative_to(PACKAGE)} {name}" for path in FILES for name in long_functions(path)}
    assert not found


def test_a_long_function_would_be_noticed(tmp_path: Path) -> None:
    source = tmp_path / "long.py"
    source.write_text("def fits():\n" + "    pass\n" * 59 + "def long():\n" + "    pass\n" * 60)
    assert long_functions(source) == {"long"}


def test_a_class_name_stands_for_one_thing() -> None:
    """Except the settings of each recipe, and what only its own module names."""
    homes: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(layer(path))
    twice = {name: rooms for name, rooms in homes.items() if len(rooms) > 1}
    assert {room for rooms in twice.values() for room in rooms} == {"recipes"}
    assert all(name.endswith("Settings") for name in twice)


def test_types_of_encoders_are_asked_inside_their_room() -> None:
    asked = re.compile(r"isinstance\([^()]*(\([^()]*\))?[^()]*\bBackbone\b")
    found = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if layer(path) != "encoders" and asked.search(path.read_text("utf-8"))
    }
    assert not found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_folders_are_two_levels_deep(path: Path) -> None:
    """Except below ``data/`` and ``index/``, where each engine has a folder of its own."""
    parts = path.relative_to(PACKAGE).parts
    deepest = {"data": 3, "index": 4 if "engines" in parts else 3}
    assert len(parts) <= deepest.get(parts[0], 2)


def imported_modules(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diptych"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if is_module(name)}
            found |= modules | ({node.module} if inner - modules else set())
    return found


def is_module(name: str) -> bool:
    path = PACKAGE.parent / Path(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_no_engine_imports_from_another() -> None:
    folder = PACKAGE / "index" / "engines"
    engines = [inner.name for inner in folder.iterdir() if (inner / "__init__.py").is_file()]
    assert {"embedded", "milvus", "postgres"} == set(engines)
    for engine in engines:
        for path in (folder / engine).glob("*.py"):
            others = [f"diptych.index.engines.{other}" for other in engines if other != engine]
            wrong = [
                name for name in imported_modules(path) if name.startswith((*others, "diptych.index.ingest"))
            ]
            assert not wrong, f"{path.name} imports from another engine or from ingest: {wrong}"


def test_queries_know_no_engine() -> None:
    flat = [*(PACKAGE / "index").glob("*.py"), *(PACKAGE / "index" / "query").glob("*.py")]
    flat.remove(PACKAGE / "index" / "places.py")  # turns a place into an index, so it opens engines
    assert len(flat) > 10
    for path in flat:
        wrong = [
            name
            for name in imported_modules(path)
            if name.startswith(("diptych.index.engines", "diptych.index.ingest"))
        ]
        assert not wrong, f"{path.name} imports an engine or ingest: {wrong}"


def module_name(path: Path) -> str:
    parts = ["diptych", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_import_cycle_inside_any_folder() -> None:
    names = {module_name(path): path for path in FILES}
    graph = {
        name: {m for m in imported_modules(path) if m in names and m != name} for name, path in names.items()
    }
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' → '.join([*trail[trail.index(name) :], name])}"
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_reports_import_no_model_class() -> None:
    models = {"encoders", "aggregators", "branches", "interaction", "recipes"}
    for path in (PACKAGE / "reports").glob("*.py"):
        assert not imported_layers(path) & models, f"{path.name} imports a model"
        assert not imported_modules(path) & {
            f"diptych.model.{name}" for name in ("retriever", "twin", "named")
        }


def test_recipe_names_stay_in_recipes() -> None:
    spoken = {name for recipe in RECIPES for name in (recipe, recipe.replace("-", "_")) if "-" in recipe}
    assert len(spoken) > 20  # one word may mean other things too: "coder" names a normalisation
    for path in FILES:
        if layer(path) in ("recipes", "cli"):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Compare):
                constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                assert not set(constants) & spoken, f"{path.name} branches on a recipe's name"


def test_importing_the_package_is_light() -> None:
    heavy = ("torch", "transformers", "PIL", "torchvision")
    code = f"import sys, diptych; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_onnx_runtime_reports_nothing(tmp_path: Path) -> None:
    """Where it would report, it keeps an id of the machine and a queue of events below the home folder."""
    silent = {"CI", "ORT_DISABLE_TELEMETRY", "ORT_RUNNING_UNIT_TESTS", "XDG_CACHE_HOME", "GITHUB_ACTIONS"}
    here = {name: value for name, value in os.environ.items() if name not in silent}
    code = "import diptych.runtime.session as session; session._limit_memory()"
    subprocess.run([sys.executable, "-c", code], env={**here, "HOME": str(tmp_path)}, check=True)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_torchvision_is_never_imported() -> None:
    for path in FILES:
        nodes = [
            node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Import)
        ]
        names = [alias.name for node in nodes for alias in node.names]
        assert not any(name.startswith("torchvision") for name in names), path.name


SEARCH_HALF = ("cli", "data", "index", "runtime", "vectors", "web")
BLOCKED = """
import importlib, sys
from diptych.errors import MissingExtra
blocked = ("torch", "transformers", "accelerate")
sys.modules.update(dict.fromkeys(blocked))  # importing them raises
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except MissingExtra as error:  # of an engine whose client is not installed here
        if error.__cause__ is None or error.__cause__.name in blocked:
            raise
"""


def without_torch(*modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules in a process in which importing torch raises."""
    return subprocess.run([sys.executable, "-c", BLOCKED, *modules], capture_output=True, text=True)


def test_the_search_half_imports_no_torch() -> None:
    modules = {module_name(path) for path in FILES if layer(path) in SEARCH_HALF}
    assert len(modules) > 100
    done = without_torch(*sorted(modules))
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_block_would_notice_an_import_of_torch() -> None:
    assert "import of torch halted" in without_torch("diptych.model.retriever").stderr


def test_a_recipe_is_imported_only_when_it_is_used() -> None:
    code = "import sys; from diptych.recipes import RECIPES; RECIPES['vse-infinity']; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("diptych.recipes.")}
    shared = {"recipe", "provide", "towers"}
    assert found == {f"diptych.recipes.{name}" for name in ("vse_infinity", *shared)}


def test_the_runtime_never_imports_torch_not_even_inside_a_function() -> None:
    for path in (PACKAGE / "runtime").glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        names += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
        assert not {name.split(".")[0] for name in names} & {"torch", "transformers", "onnx"}, path.name
