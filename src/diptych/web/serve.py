"""Running the service: opening the index and its model, binding, and leaving cleanly."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from diptych.errors import MissingExtra, SettingsError
from diptych.index.base import Index
from diptych.index.engines.opening import open_index
from diptych.index.models import open_model, tell
from diptych.model.protocol import Model
from diptych.progress import PrintableLines, echo

try:
    import python_multipart  # noqa: F401  fastapi asks for it only when a form comes
    import uvicorn
    from fastapi import FastAPI
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    from diptych.web.app import create_app
    from diptych.web.bodies import LOOPBACK_NAMES, check_token, is_loopback
    from diptych.web.connections import CONNECTIONS, PatientProtocol
except ModuleNotFoundError as missing:
    if missing.name and missing.name.startswith("diptych"):
        raise
    raise MissingExtra(str(missing.name), "serve", "The search service") from missing

# seconds that requests being answered have to finish at shutdown; what goes on then is told to stop
GRACE = 8
ADDRESS_BYTES = 65_536  # largest first line and headers of a request


def serve(
    place: str | Path,
    model: Model | str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    private: bool = False,
    hosts: Sequence[str] | None = None,
    model_name: str = "",
    rerankers: Sequence[str | Path] = (),
    audit: tuple[bytes, str] | None = None,
    **options: Any,
) -> None:
    """Serve an index (a path or a database URL) until interrupted.

    ``model`` is a model, or the folder of one. On any address but loopback, and wherever it is ``private``, a
    token is required, and needed for everything. Port 0 takes a free one. ``hosts`` are the names the service
    answers to beside those of loopback; not on loopback and without them, it answers to any. ``rerankers`` are runs
    whose pair scorers re-rank; without them, the model's own does, where it has one. ``audit`` and ``options`` are
    those of ``create_app`` and ``Service``.
    """
    reachable = not is_loopback(host)
    _check_access(host, token, private)
    if audit is not None and (reachable or private):
        raise SettingsError(
            "a browser opens the page of an audit without a token: open its file, or serve on loopback."
        )
    listening = _bind(host, port)
    try:
        if isinstance(model, str | Path):
            model_name = model_name or str(model)
            model = open_model(model)
        from diptych.index.query.reranking import reranker_of

        with open_index(place) as index:
            fingerprint = index.info.fingerprint  # the model's, or the application refuses the index below
            own = _host_of(listening)  # the address it announces, which may be 127.0.0.2
            names = None if reachable and hosts is None else (*LOOPBACK_NAMES, own, *(hosts or ()))
            app = create_app(
                index, model, token=token, private=private or reachable, hosts=names, model_name=model_name,
                pair_scorer=reranker_of(place, model, rerankers), audit=audit,
                local=not reachable and not hosts,  # of a name, others come through a proxy
                writer=partial(open_index, place, writable=True, fingerprint=fingerprint), **options,
            )  # fmt: skip
            listening.listen(CONNECTIONS)  # from now on clients wait instead of being refused
            _announce(index, listening, "; pairs to judge: /audit" if audit else "")
            for sentence in app.state.service.pictures.withheld():
                tell(sentence)
            _run(app, listening)
    finally:
        listening.close()


def _check_access(host: str, token: str | None, private: bool) -> None:
    check_token(token)
    if token is None and not is_loopback(host):
        raise SettingsError(f"other machines can reach {host}: give a token (--token), or bind to 127.0.0.1.")
    if token is None and private:
        raise SettingsError("a private service needs a token: give one (--token).")


def _run(app: FastAPI, listening: socket.socket) -> None:
    """Answer until interrupted."""
    said = logging.StreamHandler()
    said.setFormatter(PrintableLines("%(levelname)s: %(message)s"))
    log = logging.getLogger("uvicorn")
    log.handlers, log.propagate = [said], False
    config = uvicorn.Config(
        app, log_config=None, log_level="warning", access_log=False, server_header=False, ws="none",
        http=PatientProtocol,  # of h11, whose limit on the size of addresses and headers is known
        h11_max_incomplete_event_size=ADDRESS_BYTES, timeout_graceful_shutdown=GRACE,
    )  # fmt: skip
    with _leaving_cleanly(), _sharing_cores():
        uvicorn.Server(config).run(sockets=[listening])


@contextmanager
def _sharing_cores() -> Iterator[None]:
    """Half the cores to one product of matrices: requests run side by side, and idle threads of one that spin for
    work take the cores from the others (measured: a tenth of the answers a second)."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    half = max(1, (os.cpu_count() or 1) // 2)
    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch else 0
    if torch:
        torch.set_num_threads(half)
    try:
        with threadpool_limits(half, user_api="blas"):
            yield
    finally:
        if torch:
            torch.set_num_threads(before)


@contextmanager
def _leaving_cleanly() -> Iterator[None]:
    """uvicorn, once it has shut down, raises the signal again that made it: here it has done its work by then."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the model is loaded: a taken port is told at once."""
    if not 0 <= port <= 65_535:
        raise SettingsError(f"port {port} does not exist: choose one from 1 to 65535, or 0 for a free one.")
    listening = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        if listening is not None:
            listening.close()
        raise SettingsError(
            f"cannot listen on {host}:{port} ({error}): choose another host or port."
        ) from error
    return listening


def _host_of(listening: socket.socket) -> str:
    """The address it is bound to, as a URL has it."""
    address: str = listening.getsockname()[0]
    return f"[{address}]" if ":" in address else address


def _announce(index: Index, listening: socket.socket, note: str) -> None:
    info = index.info
    echo(
        f"serving {info.counts['image']} images and {info.counts['text']} texts of {info.path} "
        f"at http://{_host_of(listening)}:{listening.getsockname()[1]}   (Ctrl-C to stop{note})"
    )
