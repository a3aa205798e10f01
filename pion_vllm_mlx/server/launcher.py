"""``-w N --independent-workers``: start the workers, start them again, stop them.

The launcher owns the folder and binds every port; the workers inherit both, so that a port
and its queue outlive a worker and the folder stays taken as long as one of them lives. It
serves nobody and has one thread; for a worker that cannot be started it says so (``StandIn``),
the others go on. Limits of the whole server are dealt out in equal shares.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from pion_vllm_mlx import __version__
from pion_vllm_mlx.config import module_command, module_environment
from pion_vllm_mlx.errors import PionError
from pion_vllm_mlx.server.directory_file import DirectoryFile
from pion_vllm_mlx.server.folder import DataFolder
from pion_vllm_mlx.server.listening import bind_affinity, bind_doors, bind_own, own_socket
from pion_vllm_mlx.server.session import ServerConfig
from pion_vllm_mlx.server.stand_in import StandIn
from pion_vllm_mlx.server.worker import MODULE, SHUT_DOWN, Orders

log = logging.getLogger("pion_vllm_mlx.server")

#: how long a worker that died is dead; doubled every time it does not even recover.
FIRST_WAIT_SECONDS = 0.1
#: it is never dead for longer than that by choice.
LONGEST_WAIT_SECONDS = 60.0
#: after so many deaths in a row without a recovery a worker is down.
MAX_DEATHS = 6
#: how long a stop waits for workers that bring everything to disk.
STOP_SECONDS = 60.0


class WorkersFailed(PionError):
    """A worker cannot be kept running."""


def share(config: ServerConfig, worker: int) -> ServerConfig:
    """The configuration of one worker: its number, its part of what is limited."""

    def part(whole: int) -> int:
        return max(1, whole // config.workers) if whole else 0

    tenants = {
        name: replace(tenant, quota=part(tenant.quota)) for name, tenant in config.tenants.items()
    }
    return replace(
        config,
        worker=worker,
        launcher_pid=os.getpid(),
        disk_budget=part(config.disk_budget),
        maxmemory=part(config.maxmemory),
        metrics_port=config.metrics_port + worker if config.metrics_port else 0,
        tenants=tenants,
    )


@dataclass
class _Child:
    """A worker's process; ``ready`` is the pipe on which it says that it has recovered."""

    worker: int
    process: subprocess.Popen[bytes]
    ready: int
    recovered: bool = False

    def let_in(self) -> None:
        """It may serve clients from now on."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"g")
            self.process.stdin.flush()

    def close(self) -> None:
        """Its pipes; the process is over."""
        if self.ready >= 0:
            os.close(self.ready)
            self.ready = -1
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


class Launcher:
    """See the module's docstring."""

    def __init__(self, config: ServerConfig, folder: DataFolder) -> None:
        """Bind every port. Raises OSError, ConfigError."""
        self.config = config
        self.folder = folder
        self.directory = DirectoryFile(config.folder)
        self.doors = bind_doors(config)
        self.affinity: list[socket.socket] = []
        self.own: list[socket.socket | None] = []
        self.children: dict[int, _Child] = {}
        self.deaths: dict[int, int] = {}
        self.waiting: dict[int, float] = {}
        self.down: dict[int, StandIn] = {}
        self.started = time.time()
        self.open = False
        self.stopping = False
        try:
            for worker in range(config.workers):
                self.affinity.append(bind_affinity(config, worker))
                self.own.append(bind_own(config, worker))
            #: closed after every socket when a process dies: who finds the folder free finds
            #: the ports free
            self.locks = folder.copies_of_locks()
        except (OSError, PionError):
            self._close_sockets()
            self.directory.close()
            raise

    def run(self) -> None:
        """Until SIGTERM, SIGINT or a client's SHUTDOWN. Raises WorkersFailed."""
        with self._signals() as woken:
            try:
                for worker in range(self.config.workers):
                    self._start(worker)
                while not self.stopping:
                    self._turn(woken)
            finally:
                self._stop()

    @contextmanager
    def _signals(self) -> Iterator[socket.socket]:
        """A socket that can be read after every signal."""
        reading, writing = socket.socketpair()
        reading.setblocking(False)
        writing.setblocking(False)

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopping = True

        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(-1)
            reading.close()
            writing.close()

    def _turn(self, woken: socket.socket) -> None:
        """Wait for something to happen to a worker, and see to it."""
        dues = [*self.waiting.values(), *(one.due for one in self.down.values())]
        due = min(dues, default=math.inf)
        timeout = max(0, math.ceil((due - time.monotonic()) * 1e3)) if due < math.inf else None
        pipes = [child.ready for child in self.children.values() if child.ready >= 0]
        doors = {sock.fileno(): (sock, one) for one in self.down.values() for sock in one.sockets}
        watched = select.poll()  # select() knows no descriptor above 1023
        for descriptor in (woken.fileno(), *pipes, *doors):
            watched.register(descriptor, select.POLLIN)
        readable = {descriptor for descriptor, _ in watched.poll(timeout)}
        for sock, stand_in in (doors[door] for door in readable if door in doors):
            stand_in.attend(sock)
        for stand_in in self.down.values():
            stand_in.tidy(time.monotonic())
        with contextlib.suppress(BlockingIOError):
            while woken.recv(4096):
                pass
        for child in list(self.children.values()):
            if child.ready in readable:
                self._heard(child)
            if child.process.poll() is not None and not self.stopping:
                self._died(child)
        now = time.monotonic()
        for worker in [worker for worker, at in self.waiting.items() if at <= now]:
            del self.waiting[worker]
            try:
                self._start(worker)
            except OSError as error:
                self._failed(worker, str(error), recovered=False)

    # -- workers ---------------------------------------------------------------

    def _start(self, worker: int) -> None:
        config = share(self.config, worker)
        lane = self.doors.lane if worker == 0 else None
        affinity, own = self.affinity[worker], self.own[worker]
        doors = replace(self.doors, affinity=affinity, lane=lane, own=own)
        named = {name: sock.fileno() for name, sock in vars(doors).items() if sock is not None}
        reading, writing = os.pipe()
        port = self.doors.lane.getsockname()[1] if self.doors.lane else 0
        orders = Orders(config, named, port, writing, self.directory.descriptor)
        try:
            process = subprocess.Popen(
                module_command(MODULE),
                env=module_environment(),
                stdin=subprocess.PIPE,
                pass_fds=(*named.values(), writing, *self.locks, self.directory.descriptor),
                start_new_session=True,  # Ctrl-C is for the launcher
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.children[worker] = _Child(worker, process, reading)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(orders.encode())
            process.stdin.flush()

    def _heard(self, child: _Child) -> None:
        """It has recovered, or died on the way."""
        child.recovered = os.read(child.ready, 1) == b"r"
        os.close(child.ready)
        child.ready = -1
        if self.open and child.recovered:
            self._is_up(child.worker)
            child.let_in()
        elif not self.open and all(other.recovered for other in self.children.values()):
            self.open = True
            self._publish()  # whoever is answered finds it
            for other in self.children.values():
                other.let_in()
            self._announce()

    def _publish(self) -> None:
        path = str(self.config.unixsocket) if self.config.unixsocket else None
        port = self.doors.tcp.getsockname()[1]
        self.folder.publish_status(
            started=self.started,
            port=port,
            unixsocket=path,
            version=__version__,
            down=sorted(self.down),
        )

    def _announce(self) -> None:
        config, port = self.config, self.doors.tcp.getsockname()[1]
        print(
            f"pion-server {__version__}, {config.workers} INDEPENDENT WORKERS with "
            f"SEPARATE KEYSPACES, data in {config.folder.absolute()}, "
            f"ready on {config.address}:{port}",
            flush=True,
        )

    def _died(self, child: _Child) -> None:
        """Start it again, soon, unless a client has told it to stop the server.

        Raises WorkersFailed where it is the first start, or no worker is left.
        """
        child.close()
        worker = child.worker
        del self.children[worker]
        if child.process.returncode == SHUT_DOWN:
            self.stopping = True
            return
        if not self.open:
            raise WorkersFailed(f"worker {worker} could not start")
        self._failed(worker, f"status {child.process.returncode}", child.recovered)

    def _failed(self, worker: int, how: str, recovered: bool) -> None:
        """Try again after a while, the longer the more often it was in vain.

        Raises WorkersFailed where no worker is left.
        """
        deaths = self.deaths[worker] = 1 if recovered else self.deaths.get(worker, 0) + 1
        # the exponent is bounded: no float holds 2 ** 1100
        wait = min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(deaths - 1, 16))
        self.waiting[worker] = time.monotonic() + wait
        if deaths < MAX_DEATHS:
            log.error("worker %d ended (%s): started again", worker, how)
            return
        log.error(
            "worker %d is DOWN: %d starts in a row failed (%s); the others go on, the next try is "
            "in %.0f s",
            *(worker, deaths - 1, how, wait),
        )
        if worker not in self.down:
            self.down[worker] = self._stand_in(worker)
            if len(self.down) == self.config.workers:
                raise WorkersFailed("no worker can be started")
            self._publish()

    def _stand_in(self, worker: int) -> StandIn:
        affinity, own = self.affinity[worker], self.own[worker]
        lane = self.doors.lane if worker == 0 else None
        resp = (affinity,) if own is None else (affinity, own)
        return StandIn(worker, resp, () if lane is None else (lane,))

    def _is_up(self, worker: int) -> None:
        """It has recovered, and takes over from who stands in for it."""
        stand_in = self.down.pop(worker, None)
        if stand_in is not None:
            stand_in.close()
            log.warning("worker %d is up again", worker)
            self._publish()

    def _stop(self) -> None:
        """SIGTERM to all, and wait until they have brought everything to disk."""
        self.stopping = True
        for child in self.children.values():
            child.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        for child in self.children.values():
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("worker %d does not stop: killed", child.worker)
                child.process.kill()
                child.process.wait()
            child.close()
        for stand_in in self.down.values():
            stand_in.close()
        self._close_sockets()
        for lock in self.locks:
            os.close(lock)
        self.directory.close()
        if self.config.unixsocket is not None:
            self.config.unixsocket.unlink(missing_ok=True)
            for worker in range(self.config.workers):
                own_socket(self.config.unixsocket, worker).unlink(missing_ok=True)

    def _close_sockets(self) -> None:
        self.doors.close()
        for sock in (*self.affinity, *self.own):
            if sock is not None:
                sock.close()


def run(config: ServerConfig, folder: DataFolder) -> None:
    """Keep the workers of a folder running. Raises PionError, OSError."""
    Launcher(config, folder).run()
