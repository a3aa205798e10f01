"""One worker of several: a process that the launcher starts, feeds and outlives.

Its standard input brings its orders and then one byte, once all workers have recovered;
until then nobody is served. When the input ends, the launcher has died, and the worker
does the same: at once, as a crash would, so that the folder is free for the next server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import socket
import struct
import sys
import time
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.errors import CommandError, ConfigError, DamagedData, PionError
from pion_vllm_mlx.server import log_format, metrics
from pion_vllm_mlx.server.listening import Doors, Listener, listen
from pion_vllm_mlx.server.main import DAMAGE_ADVICE, in_words, run_loop, serve
from pion_vllm_mlx.server.session import Server, ServerConfig
from pion_vllm_mlx.server.shared_directory import SharedDirectory
from pion_vllm_mlx.server.store.eviction import drop_session
from pion_vllm_mlx.server.store.records import Record

log = logging.getLogger("pion_vllm_mlx.server")

MODULE = "pion_vllm_mlx.server.worker"
_SIZE = struct.Struct("<I")
_STDIN = 0
_CRASHED = 70
#: how a worker ends that a client told to stop the server.
SHUT_DOWN = 71


@dataclass(frozen=True)
class Orders:
    """What a worker is told: its configuration, its sockets by name, whom to tell it is ready.

    ``directory`` is the descriptor of the directory's file.
    """

    config: ServerConfig
    descriptors: dict[str, int]
    binary_port: int
    ready: int
    directory: int

    def encode(self) -> bytes:
        data = pickle.dumps(self)
        return _SIZE.pack(len(data)) + data


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(_STDIN, count - len(data))
        if not piece:
            os._exit(_CRASHED)
        data += piece
    return data


def _orders() -> Orders:
    (length,) = _SIZE.unpack(_read(_SIZE.size))
    orders: Any = pickle.loads(_read(length))
    assert isinstance(orders, Orders)
    return orders


@dataclass
class _Worker:
    """Gets a server ready, waits for the others, lets clients in."""

    orders: Orders
    directory: SharedDirectory
    server: Server | None = None

    async def open_doors(self, server: Server) -> list[Listener]:
        self.server = server
        await self._publish(server)
        listeners: list[Listener] = [*await metrics.listen(server)]
        await self._wait_for_others()
        sockets = {
            name: socket.socket(fileno=number) for name, number in self.orders.descriptors.items()
        }
        listeners += await listen(server, Doors(**sockets))
        server.binary_port = self.orders.binary_port
        return listeners

    async def _publish(self, server: Server) -> None:
        """Tell the others what was recovered; what one of them has, too, goes here."""
        store = server.store
        known = {sid: server.known(sid) for sid in store.state.sessions}
        doubled = self.directory.start({sid: k for sid, k in known.items() if k is not None})

        def build() -> list[Record]:
            sessions = [store.state.sessions[sid] for sid in doubled]
            effects = (
                drop_session(store.state, session, "held by another worker", int(time.time()))
                for session in sessions
            )
            return list(dict.fromkeys(record for records in effects for record in records))

        try:
            await store.commit(build)
        except CommandError as error:
            # all that names them is sent to the other one, which the directory knows
            log.warning("what another worker holds, too, is not dropped here now: %s", error)

    async def _wait_for_others(self) -> None:
        go = asyncio.Event()

        def heard() -> None:
            if not os.read(_STDIN, 1):
                os._exit(_CRASHED)
            go.set()

        asyncio.get_running_loop().add_reader(_STDIN, heard)
        os.write(self.orders.ready, b"r")
        os.close(self.orders.ready)
        await go.wait()


def main() -> int:
    """Serve as one worker; the exit code."""
    orders = _orders()
    log_format.configure(orders.config.log_format)
    try:
        config = orders.config
        directory = SharedDirectory(orders.directory, config.worker, config.ns_prefix)
        worker = _Worker(orders, directory)
        run_loop(serve(orders.config, worker.open_doors, worker.directory))
    except (PionError, ConfigError, OSError) as error:
        advice = DAMAGE_ADVICE if isinstance(error, DamagedData) else ""
        what = in_words(error) if isinstance(error, OSError) else f"{error}{advice}"
        print(f"FATAL worker {orders.config.worker}: {what}", file=sys.stderr, flush=True)
        return 1
    told = worker.server is not None and not worker.server.signalled
    return SHUT_DOWN if told else 0


if __name__ == "__main__":
    # orders are unpickled by the module's proper name
    from pion_vllm_mlx.server import worker

    sys.exit(worker.main())
