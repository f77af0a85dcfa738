"""Pictures of strangers: bounded in time and memory, decoded where they can do no harm."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from bombs import many_scans, tile_bomb, transparent_png
from PIL import Image

from diptych.data.decode import opening
from diptych.data.decode import processes as decoders
from diptych.data.decode.opening import open_image
from diptych.data.decode.processes import Decoders
from diptych.errors import ImageError, Unavailable


@pytest.fixture
def pool() -> Iterator[Decoders]:
    pool = Decoders()
    yield pool
    pool.close()


def png(width: int = 40, height: int = 30, mode: str = "RGB") -> bytes:
    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 255, (height, width, len(mode)), dtype=np.uint8)
    Image.fromarray(noise, mode).save(out, "PNG")
    return out.getvalue()


def memory(pid: int) -> int:
    """Bytes a process has now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def decoding() -> dict[int, int]:
    """Bytes of each decoder that this process has started; one that has only been forked still shares ours."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    used = {}
    for pid in [int(pid) for file in children for pid in file.read_text().split()]:
        with suppress(FileNotFoundError, ProcessLookupError):
            if b"diptych.data.decode.processes" in Path(f"/proc/{pid}/cmdline").read_bytes():
                used[pid] = memory(pid)
    return used


def test_a_picture_is_the_one_that_opening_it_gives(pool: Decoders, tmp_path: Path) -> None:
    for data in (png(), png(mode="RGBA"), png(300, 50)):
        here = open_image(data)
        there = pool.open(data, name="a", longest=512)
        assert np.array_equal(np.asarray(here), np.asarray(there))
    (tmp_path / "a.png").write_bytes(png())
    assert pool.open(tmp_path / "a.png", name="a", longest=20).size == (20, 15)


def test_strips_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = io.BytesIO()
    Image.fromarray(np.random.default_rng(1).integers(0, 65535, (30, 40), dtype=np.uint16)).save(deep, "PNG")
    for data in (png(mode="RGBA"), deep.getvalue()):
        whole = np.asarray(open_image(data))
        monkeypatch.setattr(opening, "STRIP", 100)
        assert np.array_equal(np.asarray(open_image(data)), whole)
        monkeypatch.undo()


def test_what_is_no_picture_is_one_sentence_and_the_process_lives(pool: Decoders) -> None:
    pool.open(png(), name="a", longest=512)
    (process,) = pool._idle
    with pytest.raises(ImageError, match="mine"):
        pool.open(b"garbage", name="mine", longest=512)
    with pytest.raises(ImageError, match="100"):
        pool.open(png(), name="mine", longest=512, max_pixels=100)
    with pytest.raises(ImageError, match="mine"):
        pool.open(Path("/no/such/file.png"), name="mine", longest=512)
    assert pool._idle == [process]


def test_a_jpeg_of_many_scans_is_refused_unread(monkeypatch: pytest.MonkeyPatch, pool: Decoders) -> None:
    out = io.BytesIO()
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(out, "JPEG", progressive=True)
    assert open_image(out.getvalue()).size == (64, 64)  # an ordinary one
    with pytest.raises(ImageError, match=r"50\d\d.*100"):
        open_image(many_scans(5000))
    assert opening._scans(io.BytesIO(b"x" * ((1 << 20) - 1) + b"\xff\xda")) == 1  # across two pieces


def test_a_decoder_that_is_kept_busy_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on scans lifted, in a process that takes its limits from here."""
    pool = Decoders()
    busy = "from diptych.data.decode import opening, processes; opening.MAX_SCANS = 10**9; processes.CPU_SECONDS = 0.5"
    start = decoders.subprocess.Popen

    def patched(command: list[str], **rest: object) -> object:
        code = command[2].replace(
            "from diptych.data.decode.processes", f"{busy}; from diptych.data.decode.processes"
        )
        return start([*command[:2], code], **rest)

    monkeypatch.setattr(decoders.subprocess, "Popen", patched)
    began = time.monotonic()
    with pytest.raises(ImageError, match=r"\ba\b"):
        pool.open(many_scans(20_000), name="a", longest=512)
    assert time.monotonic() - began < 15
    assert pool.open(png(), name="a", longest=512).size == (40, 30)
    pool.close()


def test_a_crash_costs_one_picture(pool: Decoders) -> None:
    pool.open(png(), name="a", longest=512)
    (process,) = pool._idle
    killer = threading.Thread(target=lambda: os.kill(process._process.pid, signal.SIGSEGV))
    killer.start()
    killer.join()
    process._process.wait()
    assert pool.open(png(), name="a", longest=512).size == (40, 30)  # by another
    os.kill(pool._idle[0]._process.pid, signal.SIGSTOP)
    with pytest.raises(ImageError):
        pool.open(png(), name="a", longest=512, patience=0.5)
    assert pool.open(png(), name="a", longest=512).size == (40, 30)


def test_a_tile_larger_than_its_picture_counts(pool: Decoders) -> None:
    with pytest.raises(ImageError, match=r"25000×25000.*625,000,000"):
        pool.open(tile_bomb(), name="a", longest=512)
    with pytest.raises(ImageError, match="25000×25000"):
        open_image(tile_bomb())


def test_memory_is_bounded_and_given_back(pool: Decoders) -> None:
    bomb = transparent_png(5_000)  # 25 million pixels
    assert len(bomb) < 300_000
    before = memory(os.getpid())
    others = set(decoding())  # other tests may have left some
    with ThreadPoolExecutor(4) as clients:
        for _ in range(4):
            clients.submit(pool.open, bomb, name="a", longest=2048, max_pixels=50_000_000, patience=120)
        most = 0
        until = time.monotonic() + 3
        while time.monotonic() < until:
            used = sum(size for pid, size in decoding().items() if pid not in others)
            most = max(most, used)
            time.sleep(0.05)
    assert 200_000_000 < most < 700_000_000
    assert memory(os.getpid()) - before < 200_000_000
    assert pool._idle == []  # each has ended after a picture of this size


def test_a_process_may_not_take_more_than_its_share(pool: Decoders) -> None:
    pool.open(png(), name="a", longest=512, max_pixels=1_000_000)
    limits = Path(f"/proc/{pool._idle[0]._process.pid}/limits").read_text()
    (line,) = [line for line in limits.splitlines() if line.startswith("Max address space")]
    assert int(line.split()[3]) == decoders.SPARE_BYTES + decoders.PIXEL_BYTES * 1_000_000


def test_waiting_for_a_decoder_ends(pool: Decoders) -> None:
    for _ in range(decoders.DECODERS):
        pool._free.acquire()
    with pytest.raises(Unavailable):
        pool.open(png(), name="a", longest=512, patience=0.1)
    for _ in range(decoders.DECODERS):
        pool._free.release()


def test_decoding_needs_no_framework() -> None:
    heavy = "[m for m in ('torch', 'numpy') if m in sys.modules]"
    code = f"import sys; import diptych.data.decode.processes; print({heavy})"
    done = decoders.subprocess.run(
        [decoders.sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
