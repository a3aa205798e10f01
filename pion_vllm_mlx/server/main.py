"""``pion-server``: start, listen, stop; ``chores`` is what runs in between."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial

from pion_vllm_mlx import __version__
from pion_vllm_mlx.config import EXIT_FOLDER_BUSY, EmbeddedDefaults, ServerEnvironment
from pion_vllm_mlx.errors import (
    ConfigError,
    DamagedData,
    DataFolderBusy,
    PionError,
)
from pion_vllm_mlx.server import chores, log_format, metrics, options
from pion_vllm_mlx.server import commands as commands  # fills the command table
from pion_vllm_mlx.server.collecting import SetsAside
from pion_vllm_mlx.server.commands.export import remove_old_exports
from pion_vllm_mlx.server.directory import Directory
from pion_vllm_mlx.server.ephemeral import ephemeral_folder
from pion_vllm_mlx.server.folder import DataFolder
from pion_vllm_mlx.server.inbound import WindowPool
from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.ledger import Ledger
from pion_vllm_mlx.server.listening import (
    Listener,
    bind_affinity,
    bind_doors,
    connections_allowed,
    listen,
)
from pion_vllm_mlx.server.memory_limit import past_at_start, refuse_below_own_use
from pion_vllm_mlx.server.session import Server, ServerConfig
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.findings import Kind
from pion_vllm_mlx.server.store.folder_use import left_behind
from pion_vllm_mlx.server.store.store import Store

log = logging.getLogger("pion_vllm_mlx.server")

#: under a disk budget a log gets so much of it, as long as that is enough to be worth a save.
BUDGET_OF_LOGS = 32
LEAST_LOG_BYTES = 1 << 20
#: how long a stop waits for commands that run, and for readers that read slowly.
STOP_SECONDS = 2.0
#: with places for so many, fewer than the default are not worth a word.
_MANY_CLIENTS = 1000
#: what can be done about a damaged file.
DAMAGE_ADVICE = (
    "; pion-vllm-mlx doctor --dir PATH says what is damaged, --repair sets the file aside and "
    "starts with what verifies"
)


def _log_bytes(config: ServerConfig) -> int:
    """--wal-size, less where a log of that size would be much of the disk budget."""
    if not config.disk_budget:
        return config.wal_size
    return min(config.wal_size, max(LEAST_LOG_BYTES, config.disk_budget // BUDGET_OF_LOGS))


def store_config(config: ServerConfig) -> StoreConfig:
    """What of the server's configuration the store has to know."""
    return StoreConfig(
        config.folder,
        worker=config.worker,
        workers=config.workers,
        wal=config.wal and not config.ephemeral,
        wal_size=_log_bytes(config),
        appendfsync=config.appendfsync,
        max_sessions=config.max_sessions,
        disk_budget=config.disk_budget,
        share_equal=config.share_equal,
        salvage=config.repair or config.embedded,
        disk_allows=EmbeddedDefaults().budget_of if config.budget_follows_disk else None,
    )


def _left_behind(config: ServerConfig) -> str:
    """What is said, once, of files of workers that an earlier start had and this one has not."""
    left = left_behind(config.folder, config.workers) if config.worker == 0 else []
    if not left:
        return ""
    names = ", ".join(map(str, left))
    return (
        f"{config.folder} holds files of worker {names}, not running now: they count for the "
        f"disk, and what they hold is served again by -w {left[-1] + 1} --independent-workers"
    )


def _with_descriptors(config: ServerConfig) -> ServerConfig:
    """The configuration, for no more clients than the system has descriptors for."""
    allowed = connections_allowed(config.max_connections)
    asked = config.max_connections != ServerConfig.max_connections
    if allowed < (config.max_connections if asked else _MANY_CLIENTS):
        log.warning(
            "--maxclients %d: this process may open too few files for so many, %d are let in "
            "(ulimit -n)",
            config.max_connections,
            allowed,
        )
    return replace(config, max_connections=allowed)


OpenDoors = Callable[[Server], Awaitable[list[Listener]]]


async def serve(config: ServerConfig, open_doors: OpenDoors, directory: Directory) -> None:
    """Run until told to stop. Raises PionError or OSError when it cannot start.

    ``open_doors`` lets clients in; it is called when everything is recovered.
    """
    refuse_below_own_use(config.maxmemory)
    store = Store(store_config(config))
    keyspace = Keyspace.open(store_config(config))
    config = _with_descriptors(config)
    store.give_back = keyspace.give_back
    store.space.wasted = keyspace.wasted_bytes
    keyspace.on_saved = store.space.use.look_again
    # the index stays: collecting it again and again would only stop everybody
    gc.freeze()
    gc.callbacks.append(SetsAside())
    left = _left_behind(config)
    found = [*store.replayed.notes, *keyspace.notes]
    # what was set aside is told in the moment in which it is
    notes = [note for note in found if note.kind is not Kind.SET_ASIDE]
    for note in (*notes, left, past_at_start(config.maxmemory)):
        if note:
            log.warning("%s", note)
    if store.replayed.vstore:
        print(f"V-store WAL replayed: {store.replayed.vstore} records", flush=True)
    if store.replayed.ssm:
        print(f"SSM WAL replayed: {store.replayed.ssm} records", flush=True)
    if keyspace.replayed:
        print(f"keyspace log replayed: {keyspace.replayed} records", flush=True)
    server = Server(
        config,
        store,
        Ledger(config.worker),
        WindowPool(),
        keyspace=keyspace,
        directory=directory,
    )
    remove_old_exports(server)
    if notice := await server.attention.start():
        print(notice, flush=True)
    listeners = await open_doors(server)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop_by_signal)
    tasks = chores.begin(server)
    await server.stopping.wait()
    await _stop(server, listeners, tasks)


async def _stop(server: Server, listeners: list[Listener], tasks: list[asyncio.Task[None]]) -> None:
    """Stop listening, let running commands end, bring everything to disk."""
    for listener in listeners:
        listener.close()
    if server.config.unixsocket is not None and server.config.workers == 1:
        server.config.unixsocket.unlink(missing_ok=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    running = [c.running for c in server.connections.values() if c.running is not None]
    if running:
        await asyncio.wait(running, timeout=STOP_SECONDS)
    for connection in list(server.connections.values()):
        connection.close()
    await asyncio.sleep(0)
    try:
        server.attention.close()
        await server.keyspace.close()
    finally:
        await server.store.close()


async def _open_alone(server: Server, folder: DataFolder) -> list[Listener]:
    """Bind every port of a server with one worker, and say that it is there."""
    config = server.config
    listeners: list[Listener] = [*await metrics.listen(server)]
    doors = bind_doors(config)
    try:
        if not config.embedded:
            doors.affinity = bind_affinity(config, 0)
        listeners += await listen(server, doors)
    except (OSError, PionError):
        doors.close()
        raise
    socket_path = str(config.unixsocket) if config.unixsocket else None
    folder.publish_status(port=server.port, unixsocket=socket_path, version=__version__)
    print(
        f"pion-server {__version__}, data in {config.folder.absolute()}, "
        f"ready on {config.address}:{server.port}",
        flush=True,
    )
    return listeners


def run_loop(work: Coroutine[None, None, None]) -> None:
    """Run on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        with contextlib.closing(uvloop.new_event_loop()) as loop:
            asyncio.set_event_loop(loop)
            loop.run_until_complete(work)


def _run(config: ServerConfig) -> None:
    log_format.configure(config.log_format)
    folder = DataFolder(config.folder, dedicated=config.embedded or config.ephemeral)
    try:
        if config.workers > 1:
            from pion_vllm_mlx.server import launcher

            launcher.run(config, folder)
        else:
            doors = partial(_open_alone, folder=folder)
            run_loop(serve(config, doors, Directory()))
    finally:
        folder.close()


def _ephemeral(config: ServerConfig) -> None:
    """Run on a private folder that goes away with the process."""
    with ephemeral_folder() as folder:
        _run(replace(config, folder=folder))


def main(argv: Sequence[str]) -> int:
    """The command line; its exit code. 1: cannot start, 3: another process owns the folder."""
    if any(word in ("-h", "--help") for word in argv):
        print(options.usage())
        return 0
    if any(word in ("-v", "--version") for word in argv):
        print(f"pion-server {__version__}")
        return 0
    try:
        config, notices = options.parse(argv, ServerEnvironment.from_environment())
        for notice in notices:
            print(notice, flush=True)
        (_ephemeral if config.ephemeral else _run)(config)
    except DataFolderBusy as error:
        print(f"FATAL {error}", file=sys.stderr, flush=True)
        return EXIT_FOLDER_BUSY
    except DamagedData as error:
        print(f"FATAL {error}{DAMAGE_ADVICE}", file=sys.stderr, flush=True)
        return 1
    except OSError as error:
        print(f"FATAL {in_words(error)}", file=sys.stderr, flush=True)
        return 1
    except (PionError, ConfigError) as error:
        print(f"FATAL {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def in_words(error: OSError) -> str:
    """What the system refused, and for which file, without its number."""
    if error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
