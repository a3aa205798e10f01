"""``pion-vllm-mlx serve``: the front's start, its signals and its end.

The first Ctrl-C or SIGTERM drains: open requests finish, new ones get 503, then the engine is
stopped. The second one ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import socket
import sys
from collections.abc import Awaitable, Sequence
from types import FrameType

import uvicorn
import uvloop

from pion_vllm_mlx.serve import app as endpoints
from pion_vllm_mlx.serve.engine_process import EngineFailed
from pion_vllm_mlx.serve.gate import Gate
from pion_vllm_mlx.serve.options import ENGINES, ServeOptions, parse
from pion_vllm_mlx.serve.supervisor import Supervisor

log = logging.getLogger("pion_vllm_mlx.serve")

BACKLOG = 512


class _Server(uvicorn.Server):
    """uvicorn's server, whose first signal drains instead of closing the port."""

    def __init__(self, configuration: uvicorn.Config, gate: Gate) -> None:
        super().__init__(configuration)
        self._gate = gate
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal; runs between two instructions of whatever runs."""
        self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        if self._draining is None:
            if self._gate.in_flight:
                log.info("finishing %d requests; once more ends at once", self._gate.in_flight)
            self._draining = asyncio.create_task(self._drain())
        else:
            # it would tell of each reply that is broken off
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            self.should_exit = self.force_exit = True

    async def _drain(self) -> None:
        await self._gate.drain()
        self.should_exit = True


def main(arguments: Sequence[str]) -> int:
    """The command; its exit code. 1: the engine or the port is not to be had."""
    options = parse(arguments)
    if options is None:
        return 0
    engine = ENGINES[options.engine]
    if importlib.util.find_spec(engine.package) is None:
        print(
            f"pion-vllm-mlx serve: the engine {options.engine} is not installed: "
            f"pip install 'pion-vllm-mlx[{engine.extra}]'",
            file=sys.stderr,
        )
        return 1
    return run(options)


def run(options: ServeOptions, module: str | None = None) -> int:
    """Serve until a signal comes; ``module``: the engine's, if not the chosen one's."""
    logging.basicConfig(level=options.log_level, format="%(asctime)s - %(levelname)s - %(message)s")
    try:
        listening = listen(options.host, options.port)
    except OSError as error:
        where = f"{options.host}:{options.port}"
        print(f"pion-vllm-mlx serve: cannot listen on {where}: {error}", file=sys.stderr)
        return 1
    with listening, contextlib.closing(uvloop.new_event_loop()) as loop:
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(_serve(options, listening, module))
        finally:
            loop.run_until_complete(_end_tasks())


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the first address of ``host``. Raises ``OSError``."""
    flags = socket.AI_PASSIVE
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=flags)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


async def _serve(options: ServeOptions, listening: socket.socket, module: str | None) -> int:
    supervisor = Supervisor(options.command(module), options.unload_after)
    front = endpoints.Front(supervisor, options.normalize, options.media_urls)
    gate = endpoints.build(front, options.door)
    configuration = uvicorn.Config(
        gate,
        http="h11",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        backlog=BACKLOG,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=75,
    )
    server = _Server(configuration, gate)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"pion-vllm-mlx serve on http://{shown}:{port} ({options.engine})", flush=True)
    wanted = options.unload_after is None
    work = supervisor.start() if wanted else supervisor.check()
    first = asyncio.create_task(_begin(work, server))
    try:
        await server.serve(sockets=[listening])
    finally:
        failed = first.done() and first.result() is False
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await supervisor.close()
    return 1 if failed else 0


async def _end_tasks() -> None:
    """Ends what still runs: the replies that a second signal has broken off."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _begin(work: Awaitable[object], server: uvicorn.Server) -> bool:
    """Start or check the engine with the front, which ends when that fails; whether it did not."""
    try:
        await work
    except EngineFailed:  # logged where it was found
        server.should_exit = True
        return False
    return True
