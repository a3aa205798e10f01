"""The embedded server: started by the first process that wants it, stopped by the last one out.

``attach(folder)`` returns a handle on the server that owns a data folder.  If one lives, be it a
``pion-server`` somebody started or the embedded server of another process, it is joined; else one
is started, apart from this process: a SIGKILL of its starter does not touch it.  Each process
holds one open connection per folder (``lifeline``), however many handles it gives out, and the
server ends by itself shortly after the last such connection has closed, by whatever death.

Several processes may start a server at the same moment: the lock of the folder lets one of them
live, the others exit with code 3, and their starters join the winner.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from pathlib import Path

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.connection import Address
from pion_vllm_mlx.cache.data_folder import LOG_NAME, read_status
from pion_vllm_mlx.cache.lifeline import Lifeline, greet
from pion_vllm_mlx.errors import DeadlineExceeded, GreetingRefused, StillStarting, StoreUnavailable

START_SECONDS = 15.0
GREET_SECONDS = 2.0
POLL_SECONDS = 0.02
LONGEST_PAUSE_SECONDS = 1.0
LOG_LIMIT_BYTES = 4 << 20
SOCKET_NAME_BYTES = 21


class EmbeddedServer:
    """A handle on the server of one data folder; it lives at least as long as the handle.

    A handle may be used by several threads, and by a forked child, which attaches anew on its
    first use.
    """

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._release = weakref.finalize(self, shared.release)

    @property
    def address(self) -> Address:
        """Where to connect; not checked again, so that it costs nothing (see ``ensure``)."""
        return self._shared.lifeline(check=False).address

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._shared.lifeline(check=False).pid

    @property
    def data_dir(self) -> Path:
        """The data folder, symbolic links resolved."""
        return self._shared.folder

    def alive(self) -> bool:
        """Whether the server this handle was given still runs."""
        return self._shared.alive()

    def ensure(self) -> Address:
        """Join or start a server again if this one has gone; may take the start's time.

        Raises ``StoreUnavailable`` when none can be started.
        """
        return self._shared.lifeline(check=True).address

    def close(self) -> None:
        """Let go of the server; it stops if nobody else holds it. May be called twice."""
        self._release()

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attach(
    path: Path | str | None = None,
    *,
    start_timeout: float = START_SECONDS,
    patience: float | None = None,
    password: str | None = None,
) -> EmbeddedServer:
    """Join the server that owns the folder ``path`` (default: the user's), or start one.

    ``start_timeout`` is in seconds, as is ``patience``, the time for another's server to answer
    (default: the same); both hold for later joins too, as the process's first call for a folder
    gave them. ``password`` defaults to the one in the environment.

    Raises ``StoreUnavailable`` when the folder cannot be written or the server does not start,
    with what it said last, ``StillStarting`` when that takes too long, ``DeadlineExceeded`` when
    one is there and silent.
    """
    folder = config.data_dir() if path is None else Path(path).expanduser()
    known = password or config.ServerEnvironment.from_environment().password
    times = _Times(start_timeout, start_timeout if patience is None else patience)
    return _PROCESS.attach(folder.resolve(), known, times)


@dataclass(frozen=True)
class _Times:
    """How long to wait, in seconds: for a server on its way up, for one that is there."""

    start: float
    patience: float


class _Shared:
    """What all the handles of this process on one folder have in common."""

    def __init__(self, folder: Path, password: str | None, times: _Times) -> None:
        self.folder = folder
        self._handles = 0
        self._password = password
        self._times = times
        self._lifeline: Lifeline | None = None
        # Reentrant: a handle may be finalized, and release, while its thread is in here.
        self._lock = threading.RLock()

    def lifeline(self, *, check: bool) -> Lifeline:
        """The open lifeline; made anew if there is none or, with ``check``, if it is dead."""
        with self._lock:
            line = self._lifeline
            if line is not None and (not check or line.alive()):
                return line
            if line is not None:
                line.close()
            self._lifeline = _join_or_start(self.folder, self._password, self._times)
            return self._lifeline

    def alive(self) -> bool:
        with self._lock:
            return self._lifeline is not None and self._lifeline.alive()

    def hold(self) -> None:
        """One handle more."""
        with self._lock:
            self._handles += 1

    def release(self) -> None:
        """One handle less; the last one closes the lifeline."""
        with self._lock:
            self._handles -= 1
            if self._handles <= 0:
                self.let_go()

    def let_go(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that is not here."""
        self._lock = threading.RLock()
        # Closes the child's copy alone: an idle child must not keep the server alive.
        self.let_go()


class _Process:
    """The folders this process is attached to."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._folders: dict[Path, _Shared] = {}

    def attach(self, folder: Path, password: str | None, times: _Times) -> EmbeddedServer:
        with self._lock:
            shared = self._folders.setdefault(folder, _Shared(folder, password, times))
        shared.hold()
        server = EmbeddedServer(shared)
        try:
            server.ensure()
        except StoreUnavailable:
            server.close()
            raise
        return server

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        for shared in self._folders.values():
            shared.after_fork()


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.after_fork)


@dataclass
class _Start:
    """A server process on its way up, and where its words begin in the log."""

    process: subprocess.Popen[bytes]
    log: Path
    log_offset: int

    def failure(self) -> str | None:
        """Why the process ended for good; None while it runs, or when another start may help."""
        code = self.process.poll()
        # 0: it was ready, and gone for want of a client, before we came.
        if code is None or code in (0, config.EXIT_FOLDER_BUSY):
            return None
        return f"the server ended with code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The last lines it printed."""
        with self.log.open("rb") as log:
            log.seek(self.log_offset)
            lines = log.read(64 << 10).decode(errors="replace").splitlines()
        return " / ".join(lines[-5:]) or "it said nothing"


def _join_or_start(folder: Path, password: str | None, times: _Times) -> Lifeline:
    """Knock until a server answers, starting one whenever none is on its way."""
    began = time.monotonic()
    start: _Start | None = None
    pause = POLL_SECONDS
    next_start = 0.0
    while True:
        try:
            return _knock(folder, password, min(GREET_SECONDS, times.patience / 2))
        except GreetingRefused:
            raise
        except StoreUnavailable as error:
            reason = str(error)  # not the error: its frames would keep a handle alive
            silent = isinstance(error, DeadlineExceeded)
        if start is not None:
            failure = start.failure()
            if failure is not None:
                raise StoreUnavailable(f"{folder}: {failure}")
        now = time.monotonic()
        on_its_way = start is not None and start.process.poll() is None
        seconds = times.start if on_its_way else times.patience
        if now > began + seconds:
            words = start.last_words() if start is not None else ""
            kind = DeadlineExceeded if silent else StillStarting
            raise kind(f"no server of {folder} answered within {seconds:g} s: {reason} ({words})")
        if not on_its_way and now >= next_start:
            start = _start_server(folder)
            # A folder that stays busy is not stormed with new processes.
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
            next_start = now + pause
        time.sleep(POLL_SECONDS)


def _knock(folder: Path, password: str | None, seconds: float) -> Lifeline:
    status = read_status(folder)
    if status is None:
        raise StoreUnavailable("no server has said that it is ready")
    return greet(status, password, seconds)


def _start_server(folder: Path) -> _Start:
    """Start a server on ``folder`` in a session of its own, its output going to the log."""
    log = folder / LOG_NAME
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        output = os.open(log, flags, 0o600)
    except OSError as error:
        raise StoreUnavailable(f"the data folder {folder} cannot be written: {error}") from error
    try:
        if os.fstat(output).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(output, 0)
        offset = os.fstat(output).st_size
        process = subprocess.Popen(
            _command(folder),
            cwd=folder,
            env=config.module_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise StoreUnavailable(f"the server cannot be started: {error}") from error
    finally:
        os.close(output)
    # Reaps the process whenever it ends, so that no zombie is left of it.
    threading.Thread(target=process.wait, name="pion-embedded-reaper", daemon=True).start()
    return _Start(process, log, offset)


def _command(folder: Path) -> list[str]:
    if not sys.executable:
        raise StoreUnavailable("no Python interpreter is known to start the server with")
    name = hashlib.sha256(os.fsencode(folder)).hexdigest()[:16] + ".sock"
    socket_path = config.socket_dir(SOCKET_NAME_BYTES) / name
    return [
        *(*config.module_command("pion_vllm_mlx"), "server", "--kvcache", "--embedded"),
        *("--dir", str(folder), "--bind", "127.0.0.1", "-p", "0"),
        *("--unixsocket", str(socket_path)),
    ]
