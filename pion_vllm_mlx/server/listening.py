"""The listeners of a server process: bound here, or inherited from the launcher of workers."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pion_vllm_mlx.config import AFFINITY_OFFSET, MAX_SOCKET_PATH_BYTES
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.app import Connection
from pion_vllm_mlx.server.binary_lane import BinaryConnection
from pion_vllm_mlx.server.session import Server, ServerConfig
from pion_vllm_mlx.server.tls import HANDSHAKE_SECONDS, tls_context

log = logging.getLogger(__name__)

BACKLOG = 1024
#: how long a worker that cannot accept (no descriptors left) leaves it to the others.
_PAUSE_SECONDS = 0.2
#: descriptors that are kept for the data folder: a part of all, and no fewer than these.
_PART_FOR_FILES, _LEAST_FILES = 4, 64
#: how long an embedded server waits for another one that binds its socket.
_ALONE_SECONDS = 1.0
_NOBODY = 0o177


def connections_allowed(wanted: int) -> int:
    """How many clients there may be, at most ``wanted``: two descriptors each, some for files.

    A client's second one is that of its long replies.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return wanted
    files = max(_LEAST_FILES, limit // _PART_FOR_FILES)
    return max(1, min(wanted, (limit - files) // 2))


class Listener(Protocol):
    """Anything that listens until it is closed."""

    def close(self) -> None: ...


@dataclass
class Doors:
    """Bound sockets by what is spoken there; workers share all but their own two.

    ``affinity`` is a worker's own port, ``own`` its own Unix socket. ``lane`` is the binary
    lane's, for the one worker that serves it.
    """

    tcp: socket.socket
    affinity: socket.socket | None = None
    tls: socket.socket | None = None
    lane: socket.socket | None = None
    unix: socket.socket | None = None
    own: socket.socket | None = None

    def sockets(self) -> list[socket.socket]:
        every = (self.tcp, self.affinity, self.tls, self.lane, self.unix, self.own)
        return [sock for sock in every if sock is not None]

    def close(self) -> None:
        for sock in self.sockets():
            sock.close()


def bind(address: str, port: int, what: str = "") -> socket.socket:
    """A listening TCP socket. Raises OSError that says ``what`` it was for."""
    sock = socket.socket()
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"{what}{address}:{port}: {error.strerror}") from error
    return sock


def bind_affinity(config: ServerConfig, worker: int) -> socket.socket:
    """The port on which a worker alone accepts: ``P + 2 + w``, any one with ``-p 0``."""
    port = config.port + AFFINITY_OFFSET + worker if config.port else 0
    return bind(config.address, port, f"worker {worker} needs a port of its own, ")


def own_socket(path: Path, worker: int) -> Path:
    """The Unix socket on which a worker of several alone accepts."""
    return path.with_name(f"{path.name}.{worker}")


def bind_own(config: ServerConfig, worker: int) -> socket.socket | None:
    """Bind that socket, where there is one for all. Raises OSError, ConfigError."""
    if config.unixsocket is None:
        return None
    return _bind_unix(own_socket(config.unixsocket, worker))


def bind_doors(config: ServerConfig) -> Doors:
    """Bind what the configuration asks for, all but the affinity port. Raises OSError."""
    with contextlib.ExitStack() as undo:
        doors = Doors(bind(config.address, config.port))
        undo.callback(doors.close)
        if config.tls is not None:
            doors.tls = bind(config.address, config.tls.port)
        if config.kvcache and not config.embedded:
            port = config.port + 1 if config.port else 0
            doors.lane = bind(config.address, port, "the binary lane needs the port after -p, ")
        if config.unixsocket is not None:
            shared_folder = config.embedded
            doors.unix = (_bind_beside if shared_folder else _bind_unix)(config.unixsocket)
        undo.pop_all()
    return doors


def _bind_beside(path: Path) -> socket.socket:
    """Bind in the folder of all embedded servers; what dead ones left behind there goes.

    None of them binds while the folder is looked through: a socket that refuses connections
    then is not on its way to be listened on, its process is dead or ending.
    """
    with _alone_in(path.parent) as alone:
        for other in path.parent.glob("*.sock") if alone else ():
            if other != path and _is_dead(other):
                other.unlink(missing_ok=True)
        return _bind_unix(path)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock; False where another process does not let go of it soon.

    Raises ConfigError where there is no such folder.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"--unixsocket: {folder}: {error.strerror}") from error
    try:
        deadline = time.monotonic() + _ALONE_SECONDS
        alone = _lock(descriptor)
        while not alone and time.monotonic() < deadline:
            time.sleep(0.005)
            alone = _lock(descriptor)
        yield alone
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_dead(path: Path) -> bool:
    """Whether a socket is there on which nobody listens."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return path.is_socket()
        except OSError:
            pass  # a full queue, or no socket any more
    return False


def _stays_in_use(path: Path) -> bool:
    """Whether somebody listens on a socket, and is not a process that is just ending."""
    deadline = time.monotonic() + _ALONE_SECONDS
    while path.is_socket() and not _is_dead(path):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def _bind_unix(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"--unixsocket: {path} is longer than {MAX_SOCKET_PATH_BYTES} bytes")
    if _stays_in_use(path):
        raise ConfigError(f"--unixsocket: another process listens on {path}")
    if path.is_socket():
        path.unlink()  # of an earlier process
    elif os.path.lexists(path):
        raise ConfigError(f"--unixsocket: {path} exists and is not a socket")
    sock = socket.socket(socket.AF_UNIX)
    old = os.umask(_NOBODY)
    try:
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        why = error.strerror if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"--unixsocket: cannot listen on {path}: {why}") from error
    finally:
        os.umask(old)
    return sock


@dataclass
class _Acceptor:
    """Accepts one connection a turn, and knows who has not agreed on TLS yet.

    An asyncio server takes all that wait at once: of several workers one would get them all.
    """

    server: Server
    sock: socket.socket
    context: ssl.SSLContext | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def open(self) -> None:
        self.sock.setblocking(False)
        asyncio.get_running_loop().add_reader(self.sock.fileno(), self._ready)

    def close(self) -> None:
        """Accept no more, and wait for no handshake."""
        for task in self.tasks:
            task.cancel()
        if self.sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self.sock.fileno())
            self.sock.close()

    def _ready(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another worker was faster, or the client has gone
        except OSError as error:
            log.error("cannot accept: %s", error)
            loop.remove_reader(self.sock.fileno())
            loop.call_later(_PAUSE_SECONDS, self._again)
            return
        if self.context is not None and self.server.is_full:
            connection.close()  # nothing can be said before TLS is agreed on
            return
        connection.setblocking(False)
        task = loop.create_task(self._connect(connection))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _again(self) -> None:
        if self.sock.fileno() >= 0:
            self.open()

    async def _connect(self, connection: socket.socket) -> None:
        if connection.family == socket.AF_INET:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = Connection(self.server)
        if self.context is not None:
            client.begin_handshake()
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: client,
                connection,
                ssl=self.context,
                ssl_handshake_timeout=HANDSHAKE_SECONDS if self.context else None,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError):
            connection.close()
        finally:
            client.end_handshake()


async def listen(server: Server, doors: Doors) -> list[Listener]:
    """Accept at all doors from now on; what was bound is told in ``server``'s ports."""
    loop = asyncio.get_running_loop()
    config = server.config
    secure = None if config.tls is None else tls_context(config.tls)
    server.port = doors.tcp.getsockname()[1]
    listeners: list[Listener] = []
    if doors.affinity is not None:
        server.affinity_port = doors.affinity.getsockname()[1]
        listeners.append(
            await loop.create_server(
                lambda: Connection(server), sock=doors.affinity, backlog=BACKLOG
            )
        )
    if doors.lane is not None:
        server.binary_port = doors.lane.getsockname()[1]
        listeners.append(
            await loop.create_server(
                lambda: BinaryConnection(server), sock=doors.lane, backlog=BACKLOG
            )
        )
    if doors.tls is not None:
        server.tls_port = doors.tls.getsockname()[1]
    shared = ((doors.tcp, None), (doors.tls, secure), (doors.unix, None), (doors.own, None))
    for sock, context in shared:
        if sock is not None:
            listeners.append(await _listen_on(server, sock, context))
    return listeners


async def _listen_on(
    server: Server, sock: socket.socket, context: ssl.SSLContext | None
) -> Listener:
    # asyncio does not tell of handshakes under way, and they count as clients
    if server.config.workers > 1 or context is not None:
        acceptor = _Acceptor(server, sock, context)
        acceptor.open()
        return acceptor
    loop = asyncio.get_running_loop()

    def connect() -> Connection:
        return Connection(server)

    if sock.family == socket.AF_UNIX:
        return await loop.create_unix_server(connect, sock=sock, backlog=BACKLOG)
    return await loop.create_server(connect, sock=sock, backlog=BACKLOG)
