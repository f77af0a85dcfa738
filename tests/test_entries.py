"""Folders that may come from a stranger are read and written through ``Entries`` or the functions of storage.py."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dual_folders import clip_folder
from shard_data import embedded_tars
from test_runtime import picture_model, written

from diptych.cache.contents import cell_pack, contents
from diptych.cache.feature_pack import FeaturePack
from diptych.cache.rows import HIDDEN, kept_rows
from diptych.data.images import PixelInput
from diptych.encoders.dual import load_dual
from diptych.entries import MODEL
from diptych.errors import CheckpointError, DataError
from diptych.index.models import open_model
from diptych.model.retriever import Retriever
from diptych.runtime.folder import cached_folder
from diptych.settings import TrainingSettings
from diptych.storage import cache_folder, replace_folder
from diptych.training.checkpoint import Progress, RunCard, load_rest, read_run, save_state
from diptych.training.log import Log, read_log
from diptych.vectors.files import open_vectors
from diptych.vectors.manifest import MANIFEST, SHARDS, is_vectors

PACKAGE = Path(__file__).parent.parent / "src" / "diptych"
TOUCHING = {
    "open", "read_bytes", "read_text", "write_bytes", "write_text", "unlink", "rename", "truncate", "touch",
    "symlink_to", "hardlink_to", "rmdir", "rmtree", "copyfile", "copytree", "memmap", "fromfile", "safe_open",
    "load_file", "save_file", "from_file", "InferenceSession", "connect", "FileIO", "ZipFile", "TarFile", "ParquetFile",
    "ParquetWriter", "read_table", "memory_map", "renames", "link", "symlink", "mkfifo", "mknod", "chmod", "chown",
    "utime", "removedirs", "copy2", "savez", "savetxt", "loadtxt", "genfromtxt", "NamedTemporaryFile", "mkstemp",
    "FileResponse", "system", "Popen", "open_memmap", "tofile", "savez_compressed", "savemat", "loadmat",
    "write_to_dataset", "read_metadata", "read_schema", "read_parquet", "read_csv", "to_csv", "to_parquet", "OSFile",
    "GzipFile", "BZ2File", "LZMAFile", "open_code", "FileHandler", "TemporaryFile", "mkdtemp",
    "extractall", "unpack_archive", "load_from_disk", "save_to_disk", "serialize_file", "FileLock",
    "urlretrieve", "check_call", "run_path", "spec_from_file_location", "setxattr", "removexattr",
    "lchown", "imread", "getlines", "imwrite", "imsave", "write_feather", "write_table", "write_image", "read_image",
    "read_feather", "SpooledTemporaryFile", "mktemp", "RotatingFileHandler", "TimedRotatingFileHandler",
    "WatchedFileHandler", "basicConfig", "input_stream", "output_stream", "open_input_file", "open_output_stream",
    "open_append_stream", "create_memory_map", "CDLL", "PyDLL", "LoadLibrary", "load_library", "StaticFiles",
    "load_extension", "is_zipfile", "is_tarfile", "iterparse", "read_file", "write_file", "write_jpeg",
    "fromregex", "DataSource", "SourceFileLoader", "create_subprocess_exec", "create_subprocess_shell", "hardlink",
}  # fmt: skip
ALSO_OF_TEXTS = {"replace", "remove", "copy", "move"}  # of a module that changes files, or of a path
HARMLESS: dict[str, set[str]] = {
    "os": {
        "path", "environ", "sep", "strerror", "cpu_count", "sysconf", "sched_getaffinity", "urandom", "_exit", "access",
        "fspath", "fsencode", "fsdecode", "supports_dir_fd", "PathLike", "stat", "walk", "scandir", "fdopen", "close",
        "fstat", "fsync", "ftruncate", "pwrite", "preadv", "posix_fallocate",
    },
    "shutil": {"which", "get_terminal_size", "copyfileobj"},
    "tempfile": {"TemporaryDirectory"},  # in a place of its own: not with an argument
    "subprocess": {"TimeoutExpired", "PIPE", "DEVNULL"},
    "tarfile": {"TarInfo", "TarError", "ReadError", "BLOCKSIZE"},
    "ctypes": set(), "zipfile": set(), "gzip": set(), "bz2": set(), "lzma": set(), "shelve": set(), "dbm": set(),
    "fileinput": set(), "linecache": set(), "runpy": set(), "tokenize": set(), "builtins": set(), "posix": set(),
}  # fmt: skip
"""Modules that open and change files: all else of them needs a line in ``ALLOWED``, whatever it is called."""
HANDED = {"open", "unlink", "rmtree", "truncate", "read_bytes", "read_text", "rename", "touch"}
ALSO_OF_ARRAYS = {
    ("np", "load"), ("np", "save"), ("torch", "load"), ("torch", "save"), ("onnx", "load"), ("onnx", "save"),
    ("h5py", "File"), ("sqlite3", "Connection"), ("jit", "load"),
}  # fmt: skip
BY_NAME = {"getattr", "methodcaller", "attrgetter", "import_module", "__import__"}  # of what is called later
OF_A_JOINED_NAME = {"save", "savefig", "mkdir", "save_pretrained"}  # of pictures, models and folders
STATEMENT = re.compile(r"\bATTACH\b|\bVACUUM\s+INTO\b|load_extension", re.IGNORECASE)  # of SQL
THROUGH = {"FILES", "HIDDEN", "MODEL", "CACHE", "_FILES", "names"}  # Entries
NO_FILES = {
    ("psycopg", "connect"), ("graph", "rename"), ("_writer", "write_table"),
    *((whose, "open") for whose in ("Searcher", "RuntimeModel", "engine", "_av", "_decoders", "files", "sources")),
}  # fmt: skip
"""What has an ``open`` of its own, for bytes, for an index or for a picture of the user."""
USERS = (
    "data/readers/", "data/decode/", "data/arrays.py", "data/concepts.py", "data/corrections.py", "data/files.py",
    "data/labels.py", "data/vocabulary.py",
    "evaluation/judgements.py", "evaluation/report.py", "evaluation/senteval.py", "evaluation/trec.py",
    "index/ingest/photos.py", "reports/audit.py", "runs/embeddings.py", "runs/extract.py",
    "targets/published_teachers.py", "web/uploads.py",
)  # fmt: skip
"""Data that a person names, which may contain links, and the results that a person asks for."""
A_PART = "the name of an attribute, in a folder of replace_folder"
ALLOWED = {
    ("parts.py", "read_text"): "sources of this package",
    ("branches/concept.py", "write"): A_PART,
    ("encoders/backbones.py", "save_pretrained"): A_PART,
    ("encoders/backbones.py", "write"): A_PART,
    ("encoders/clip.py", "save_pretrained"): A_PART,
    ("encoders/open_clip_models.py", "mkdir"): A_PART,
    ("encoders/open_clip_models.py", "save_pretrained"): A_PART,
    ("encoders/open_clip_models.py", "write"): A_PART,
    ("encoders/transformer.py", "save_pretrained"): A_PART,
    ("runs/demo.py", "save"): "a report whose name is written there",
    ("runtime/session.py", "CDLL"): "the C library that is loaded already",
    ("locks.py", "FileLock"): "of a path from Entries.check_alone",
    ("cache/local_features.py", "connect"): "of a path from CACHE.check",
    ("encoders/lite0.py", "load"): "a file of another package",
    (
        "index/engines/embedded/connections.py",
        "connect",
    ): "memory, or the catalog, whose folder is checked before",
    ("index/engines/embedded/store.py", "connect"): "into a folder of create_folder, whose name nobody knows",
    ("index/engines/embedded/verify.py", "connect"): "memory",
    ("index/query/words.py", "connect"): "memory",
    ("index/query/readable.py", "load"): "a file of this package",
    ("runs/columns.py", "write_text"): "a file of the system",
    ("runs/published.py", "load"): "a published checkpoint that a person names",
    ("runtime/session.py", "open"): "of a descriptor from MODEL.open",
    ("runtime/session.py", "InferenceSession"): "of a path from MODEL.check",
    ("vectors/files.py", "ParquetFile"): "of a file from Entries",
    ("vectors/files.py", "ParquetWriter"): "of a file from Entries",
    ("encoders/class_words.py", "load_file"): "a file of this package",
    ("index/query/readable.py", "open"): "a file of this package",
    ("tables.py", "read_text"): "files of this package",
    ("reports/page.py", "read_text"): "a file of this package",
    ("web/reference.py", "read_text"): "a file of this package",
    ("web/app.py", "read_bytes"): "files of this package",
    ("weights.py", "load_file"): "of a path from MODEL.check",
    ("weights.py", "save_file"): "into a folder of replace_folder, whose name nobody knows",
    ("training/checkpoint.py", "save_file"): "into a folder of replace_folder, whose name nobody knows",
    ("runtime/folder.py", "safe_open"): "of a path from MODEL.check",
    ("cache/rows.py", "memmap"): "of a path from HIDDEN.check",
    ("cache/rows.py", "replace"): "renames a file, whatever has the other name",
    ("cache/feature_pack.py", "touch"): "of a path from FILES.path",
    ("cache/contents.py", "unlink"): "removes a name, not what it leads to",
    ("cache/contents.py", "rmtree"): "removes names in a folder that is no link, not what they lead to",
    ("model/runtime_export.py", "rmtree"): "of a folder that was made just before",
    ("index/ingest/target.py", "rmtree"): "of an index that was made just before",
    ("runs/train.py", "rmdir"): "an empty folder that was made just before",
    ("index/engines/embedded/approximate.py", "unlink"): "of a path from FILES.path, after a failed save",
}


def last_name(node: ast.AST | None) -> str:
    """``c`` of a.b.c, and of a["c"]."""
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", ""))
    return str(getattr(node, "attr", getattr(node, "id", "")))


def joins(node: ast.AST) -> bool:
    """Whether a path is made of a folder and a name that is no constant."""

    def constant(name: ast.AST) -> bool:
        return isinstance(name, ast.Constant) or last_name(name).isupper()

    return any(
        (isinstance(one, ast.BinOp) and isinstance(one.op, ast.Div) and not constant(one.right))
        or (isinstance(one, ast.Call) and last_name(one.func) in ("joinpath", "with_name", "join"))
        for one in ast.walk(node)
    )


def imported(node: ast.AST) -> Iterator[str]:
    """What an import makes known under a name by which it would not be found."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        module = getattr(node, "module", None)
        for one in node.names:
            renamed = one.asname is not None and one.name in TOUCHING | ALSO_OF_TEXTS | HARMLESS.keys()
            of_files = module in HARMLESS and one.name not in HARMLESS[module]
            if renamed or of_files or (module == "pathlib" and "Path" not in one.name):
                yield one.name


def names_it(node: ast.Name | ast.Attribute, is_called: bool) -> bool:
    """Whether this is a function of a module that changes files, or one that is handed on to be called elsewhere."""
    name, whose = last_name(node), last_name(getattr(node, "value", None))
    if whose in HARMLESS:
        return not (name in HARMLESS[whose] or name.isupper())
    if whose == "Path":
        return name in TOUCHING | ALSO_OF_TEXTS
    if is_called or not isinstance(node.ctx, ast.Load):
        return False
    of_a_path = name in HANDED - {"open"} and whose not in ("", *THROUGH)
    return of_a_path or (name in HANDED and whose in ("", "io", "codecs"))


def touches(node: ast.Call) -> bool:
    """Whether a call opens, changes or removes a file."""
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    name, whose = last_name(node.func), last_name(owner)
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    if name in BY_NAME:
        known = TOUCHING | ALSO_OF_TEXTS | HARMLESS.keys()
        return any(isinstance(one, ast.Constant) and one.value in known for one in given)
    if whose in THROUGH:  # the name is compared with those of the folder by ``path`` alone
        return any(map(joins, given))
    if name in ALSO_OF_TEXTS:
        return name == "replace" and owner is not None and len(given) == 1
    if name == "TemporaryDirectory":
        return bool(given)
    if name in OF_A_JOINED_NAME and any(map(joins, [node.func, *given])):
        return True
    of_storage = owner is None and name in ("write_bytes", "write_text")
    known_name = name in TOUCHING and (whose, name) not in NO_FILES and not of_storage
    return (whose, name) in ALSO_OF_ARRAYS or (known_name and "(__file__)" not in ast.unparse(node.func))


def touched(source: str) -> list[tuple[str, int]]:
    """(name, line) of what opens, changes or removes a file without ``Entries``."""
    found: list[tuple[str, int]] = []
    tree = ast.parse(source)
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            found += [(name, node.lineno) for name in imported(node)]
        elif isinstance(node, ast.Name | ast.Attribute) and names_it(node, id(node) in called):
            found.append((last_name(node), node.lineno))
        elif isinstance(node, ast.Call) and touches(node):
            found.append((last_name(node.func), node.lineno))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and STATEMENT.search(node.value):
            found.append(("statement", node.lineno))
    return found


def test_nothing_goes_round_it() -> None:
    """Every call of the package that opens, changes or removes a file, but for those that a person's data need."""
    seen, users = set(), set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        for call, line in (
            touched(path.read_text("utf-8")) if name not in ("entries.py", "storage.py") else ()
        ):
            if name.startswith(USERS):
                users |= {user for user in USERS if name.startswith(user)}
                continue
            assert (name, call) in ALLOWED, f"{name}:{line} calls {call}: go through Entries"
            seen.add((name, call))
    assert seen == set(ALLOWED), "the list allows more than is used"
    assert users == set(USERS), "the list allows more than is used"


@pytest.mark.parametrize(
    "source",
    [
        "(folder / name).read_bytes()", "open(path)", "os.open(path, 0)", "path.unlink()", "os.rename(a, b)",
        "os.replace(a, b)", "a.replace(b)", "os.remove(a)", "shutil.rmtree(a)", "load_file(path)",
        "(folder / name).open()", "Path.open(folder / name)", "np.load(folder / name)", "np.save(path, a)",
        "np.memmap(path)", "Image.open(folder / name)", "sqlite3.connect(folder / name)", "io.FileIO(path)",
        "mmap.mmap(os.open(path, 0), 0)", "io.open(path)", "tarfile.open(path)", "zipfile.ZipFile(path)",
        "torch.load(path)", "shutil.copy2(a, b)", "shutil.move(a, b)", "a.replace(target=b)", "os.symlink(a, b)",
        "op = open", "map(os.unlink, names)", "from os import unlink as gone", "a.chmod(0)", "FileResponse(a / b)",
        "from os import replace", "from shutil import move", "partial(os.replace, a)", "stack.callback(os.remove, a)",
        "executor.submit(shutil.copy, a, b)", "stack.callback(path.unlink)", "rows.tofile(a / b)", "engine.unlink(a)",
        "np.savez_compressed(a, b=b)", "h5py.File(a / b)", "parquet.read_metadata(a / b)", "gzip.GzipFile(a / b)",
        "tar.extractall(a)", "onnx.load(a / b)", "subprocess.run(['rm', a])", "FileLock(a / b)", "files.read_text(a)",
"Path.replace(a, b)", "import os as system; system.remove(a)", "import shutil as sh",
        "getattr(os, 'unlink')(a)", "operator.methodcaller('unlink')(path)", "sys.modules['os'].remove(a)",
        "__import__('os').remove(a)", "pathlib.os.remove(a)", "from pathlib import os", "os.makedirs(a / b)",
        "os.mkfifo(a)", "os.posix_spawn(a, b, c)", "os.open(name, 0, dir_fd=folder)", "os.sendfile(a, b, 0, 9)",
        "image.save(folder / name)", "FILES.open(folder / row[3])", "MODEL.read(folder.joinpath(name))",
        "shutil.copystat(a, b)", "shutil.make_archive(a, 'zip')", "(folder / name).mkdir()",
        "TemporaryDirectory(dir=folder)", "tempfile.mktemp(dir=folder)", "from zipfile import Path",
        "zipfile.is_zipfile(a)", "subprocess.check_output(['cat', a])", "db.execute('ATTACH ? AS other', (a,))",
        "db.execute('VACUUM INTO ?', (a,))", "db.load_extension(a)", "ctypes.CDLL(a)", "RotatingFileHandler(a)",
        "logging.basicConfig(filename=a)", "cv2.imwrite(a, b)", "StaticFiles(directory=a)", "pa.input_stream(a)",
        "feather.write_feather(a, b)", "linecache.getline(a, 1)", "op = codecs.open",
        "from os import remove as gone", "builtins.open(a)", "torch.ops.load_library(a)", "os.truncate(a, 0)",
        "np.fromfile(a)", "np.lib.format.open_memmap(a)", "torch.UntypedStorage.from_file(a)",
        "serialize_file({}, a)",
    ],
)  # fmt: skip
def test_the_search_would_notice(source: str) -> None:
    assert touched(source)
    assert not touched(
        "FILES.open(path), text.replace(a, b), write_text(path, a), MODEL.read(folder / 'config.json')"
    )
    assert not touched("TemporaryDirectory(), os.path.join(a, b), picture.save(buffer, 'PNG'), os.O_RDONLY")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return embedded_tars(tmp_path)


def read_all(out: Path) -> None:
    for shard in open_vectors(out).shards:
        shard.check()
        list(shard.batches())


@pytest.mark.parametrize("what", ["manifest", "receipt", "shard", "shards"])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_vectors_with_links_and_pipes(what: str, kind: str, out: Path, tmp_path: Path) -> None:
    """Whoever opened a pipe would wait for ever."""
    place = {
        "manifest": out / MANIFEST,
        "receipt": next((out / SHARDS).glob("*.json")),
        "shard": next((out / SHARDS).glob("*.parquet")),
        "shards": out / SHARDS,
    }[what]
    target = tmp_path / "elsewhere"
    shutil.move(place, target)
    if kind == "link":
        place.symlink_to(target)
    else:
        os.mkfifo(place)
    if what == "manifest":
        assert not is_vectors(out)
    if what == "receipt":  # read only of a folder that is not finished
        return
    with pytest.raises(DataError):
        read_all(out)


def displace(place: Path, target: Path, kind: str) -> None:
    """Put a link to the same thing elsewhere, or a pipe, in its place."""
    shutil.move(place, target)
    if kind == "link":
        place.symlink_to(target)
    else:
        os.mkfifo(place)


@pytest.fixture(scope="module")
def sound_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("sound") / "model"
    written(picture_model(), home)
    return home


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "vocabulary.json", "probes.safetensors", "runtime",
             "runtime/runtime.json", "runtime/image.onnx", "runtime/text.onnx", "runtime/vocabulary.json"],
)  # fmt: skip
def test_models_with_links_and_pipes(kind: str, name: str, sound_model: Path, tmp_path: Path) -> None:
    home = shutil.copytree(sound_model, tmp_path / "model")
    displace(home / name, tmp_path / "elsewhere", kind)
    with pytest.raises(CheckpointError, match="plain file"):
        open_model(home, backend="onnx")
    with pytest.raises(CheckpointError, match="plain file"):
        Retriever.from_pretrained(home)


def test_a_model_folder_may_be_reached_through_a_link(sound_model: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(sound_model)
    wanted = Retriever.from_pretrained(sound_model).fingerprint()
    assert open_model(tmp_path / "model", backend="onnx").fingerprint() == wanted
    assert Retriever.from_pretrained(tmp_path / "model").fingerprint() == wanted


@pytest.mark.parametrize("kind", ["link", "pipe"])
@pytest.mark.parametrize("name", ["run.json", "last", "last/progress.json", "best", "log.jsonl"])
def test_runs_with_links_and_pipes(kind: str, name: str, sound_model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunCard("recipe", TrainingSettings(), "data", "0").save(run)
    save_state(run, {}, Progress(), [])
    Log(run).write(1, {})
    shutil.copytree(sound_model, run / "best")
    displace(run / name, tmp_path / "elsewhere", kind)
    before = Path(tmp_path, "elsewhere").stat()
    opening: dict[str, Callable[[], object]] = {
        "run.json": lambda: read_run(run),
        "best": lambda: Retriever.from_pretrained(run),
        "log.jsonl": lambda: (read_log(run / name), Log(run)),
    }
    missing = kind == "pipe" and name in ("run.json", "last", "best")
    wanted = "state|no run|model folder" if missing else "plain file"
    with pytest.raises(CheckpointError, match=wanted):
        opening.get(name, lambda: load_rest(run, None, None))()  # type: ignore[arg-type]
    assert Path(tmp_path, "elsewhere").stat() == before


@pytest.mark.parametrize("inside", [True, False])
def test_links_of_a_snapshot_end_in_its_own_cache(inside: bool, tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--someone--clip"
    snapshot = clip_folder(model / "snapshots" / ("0" * 40))
    (model / "blobs").mkdir()
    place = model / "blobs" / "1" if inside else tmp_path / "hub" / "secret"
    displace(snapshot / "config.json", place, "link")
    if inside:
        assert isinstance(load_dual(snapshot).image_input, PixelInput) or load_dual(snapshot).text_input
    else:
        with pytest.raises(CheckpointError):
            load_dual(snapshot)


def test_removing_a_link_of_a_snapshot_leaves_what_it_leads_to(tmp_path: Path) -> None:
    """Other snapshots of the model share it; it was removed in place of the link."""
    model = tmp_path / "models--someone--clip"
    for folder in (model / "blobs", model / "snapshots" / "0"):
        folder.mkdir(parents=True)
    (model / "blobs" / "1").write_bytes(b"weights")
    link = model / "snapshots" / "0" / "model.safetensors"
    link.symlink_to(model / "blobs" / "1")
    MODEL.remove(link)
    assert (model / "blobs" / "1").read_bytes() == b"weights"
    assert not link.is_symlink()


@pytest.mark.parametrize("name", ["images", "images/KEY", "runtimes"])
def test_links_in_the_cache_folder_are_not_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New packs were written where the link led, and ``cache clear`` removed rows of a pack there."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path / "cache"))
    other = FeaturePack(tmp_path / "other" / "images" / "KEY", "")
    other.append(["a"], np.ones((1, 3), np.float16))
    place = tmp_path / "cache" / name
    place.parent.mkdir(parents=True)
    place.symlink_to(tmp_path / "other" / name if "runtimes" not in name else tmp_path / "other")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "other").rglob("*"))
    with pytest.raises(DataError, match=name):
        cached_folder("f") if name == "runtimes" else cell_pack("b", "i", "p", "t").append(
            ["a"], np.ones((1, 3))
        )
    for entry in contents():
        entry.remove()
    assert sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "other").rglob("*")) == before


def test_a_file_of_the_cache_may_go_while_it_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process writes there: its temporary files are listed, and gone."""
    monkeypatch.setenv("DIPTYCH_CACHE", str(tmp_path))
    (tmp_path / "images").mkdir()
    listed = [(str(tmp_path / "images"), ["cleared"], [".new-index-0"])]
    monkeypatch.setattr(os, "walk", lambda folder: listed)
    cell_pack("b", "i", "p", "t").append(["a"], np.ones((1, 3), np.float16))


def test_a_note_of_use_with_a_second_name_is_not_touched(tmp_path: Path) -> None:
    pack = FeaturePack(tmp_path / "pack")
    pack.append(["a"], np.ones((1, 3), np.float16))
    (used,) = (tmp_path / "pack").glob("*.used")
    os.utime(used, (0, 0))
    os.link(used, tmp_path / "thesis")
    with pytest.raises(DataError, match="second name"):
        pack.append(["b"], np.ones((1, 3), np.float16))
    assert used.stat().st_mtime == 0


def test_a_file_of_a_terabyte_is_one_sentence(tmp_path: Path) -> None:
    """It was read into memory, though nothing of it was ever written."""
    RunCard("recipe", TrainingSettings(), "data", "0").save(tmp_path)
    os.truncate(tmp_path / "run.json", 1 << 40)
    with pytest.raises(CheckpointError, match=r"run\.json"):
        read_run(tmp_path)


@pytest.mark.parametrize("write", ["replace_folder", "new_file"])
def test_a_pipe_in_the_place_of_remains_is_not_waited_for(write: str, tmp_path: Path) -> None:
    """Saving into a run of a stranger waited for ever. In a process of its own: who waits hears no signal."""
    os.mkfifo(tmp_path / ".new-last-0123456789ab")
    call = f"with storage.{write}(pathlib.Path(sys.argv[1])): pass"
    command = [sys.executable, "-c", f"import pathlib, sys; from diptych import storage\n{call}"]
    subprocess.run([*command, str(tmp_path / "last")], timeout=30, check=True)
    assert (tmp_path / "last").exists()


@pytest.mark.parametrize("name", ["last", ".old-last", ".new-last-0123456789ab"])
def test_links_in_the_place_of_remains_are_not_followed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the link led to was opened and locked for a moment, and a run could not be saved into."""
    (tmp_path / "last").mkdir()
    (tmp_path / "thesis").mkdir()
    if name == "last":
        (tmp_path / name).rmdir()
    (tmp_path / name).symlink_to(tmp_path / "thesis")
    opened, open_file = [], os.open

    def seen(*given: Any, **options: Any) -> int:
        handle = open_file(*given, **options)
        opened.append(os.fstat(handle).st_ino)
        return handle

    monkeypatch.setattr(os, "open", seen)
    with replace_folder(tmp_path / "last") as new:
        (new / "state").touch()
    assert [path.name for path in (tmp_path / "last").iterdir()] == ["state"]
    assert (tmp_path / "thesis").stat().st_ino not in opened


def test_names_that_are_not_in_the_folder_on_some_system(tmp_path: Path) -> None:
    for names, name in ((MODEL, "C:secret"), (MODEL, "..\\secret"), (HIDDEN, "./../../secret.log")):
        with pytest.raises((CheckpointError, DataError), match="secret"):
            names.path(tmp_path, name)


def test_clearing_a_cache_with_a_link_removes_the_link_alone(tmp_path: Path) -> None:
    """It removed every file of the folder that the link led to."""
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    (thesis / "thesis.tex").write_text("years of work")
    for name in ("images", "runtimes"):
        within = cache_folder(tmp_path / "cache") / name
        within.mkdir(parents=True)
        (within / "one").symlink_to(thesis)
        (within / "two").mkdir()
        (within / "two" / "runtime").symlink_to(thesis)
        for entry in contents(tmp_path / "cache"):
            entry.remove()
        assert not list(within.iterdir())
    assert (thesis / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("lock", "write"),
    [
        ("append.lock", lambda folder: FeaturePack(folder, "").append(["a"], np.ones((1, 3), np.float16))),
        (".rows.npy.lock", lambda folder: kept_rows(folder / "rows.npy", "key", lambda done: ())),
    ],
)
def test_a_lock_with_a_second_name_is_refused(
    lock: str, write: Callable[[Path], object], tmp_path: Path
) -> None:
    """Some versions of filelock empty the file they lock."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "thesis").write_bytes(b"years of work")
    os.link(tmp_path / "thesis", tmp_path / "folder" / lock)
    with pytest.raises(DataError, match="second name"):
        write(tmp_path / "folder")
