"""INFO and the value receipt."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeAlias

from pion_vllm_mlx import __version__
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.ledger import Ledger
from pion_vllm_mlx.server.memory_limit import anonymous_bytes
from pion_vllm_mlx.server.session import Context, Server
from pion_vllm_mlx.server.store.findings import told
from pion_vllm_mlx.server.turns import at_once, in_turns
from pion_vllm_mlx.wire.resp import Arg, Map, Simple

#: the Redis version whose dialect is spoken.
REDIS_VERSION = "7.0.0"
Pairs: TypeAlias = list[tuple[str, object]]
_PAGE = resource.getpagesize()


def resident_bytes() -> tuple[int, int]:
    """Resident memory of this process now and at its peak, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024
    try:
        now = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        now = peak_bytes
    return now, max(now, peak_bytes)


def _server(server: Server) -> Pairs:
    return [
        ("redis_version", REDIS_VERSION),
        ("pion_version", f"{__version__}+python"),
        ("process_id", server.config.launcher_pid or os.getpid()),
        ("tcp_port", server.port),
        ("tls_port", server.tls_port),
        ("binary_port", server.binary_port),
        ("affinity_port", server.affinity_port),
        ("worker_id", server.ledger.worker_id),
        ("worker_process_id", os.getpid()),
        ("workers", server.config.workers),
        ("uptime_in_seconds", server.ledger.uptime()),
        ("unix_socket", server.config.unixsocket or ""),
        ("config_dir", server.config.folder),
    ]


def _memory(server: Server) -> Pairs:
    now, peak = resident_bytes()
    return [
        ("used_memory", now),
        ("used_memory_peak", peak),
        ("memory_store_bytes", server.memory.stored_bytes),
        ("attend_bytes", server.attention.slots.nbytes),
        ("attend_budget_bytes", server.attention.slots.budget),
        ("used_memory_anonymous", anonymous_bytes()),
        ("maxmemory", server.memory_limit.maxmemory),
        ("maxmemory_policy", server.memory_limit.policy),
        ("maxmemory_refusing_writes", int(server.memory_limit.exceeded())),
    ]


def _clients(server: Server) -> Pairs:
    return [
        ("connected_clients", len(server.clients)),
        ("maxclients", server.config.max_connections),
        ("in_flight_bytes", server.pool.held + server.long_arguments.held),
    ]


def _stats(server: Server) -> Pairs:
    return [
        ("total_connections_received", server.connections_total),
        ("total_commands_processed", server.commands_total),
        ("housekeeping_errors", server.housekeeping_errors),
    ]


def _persistence(server: Server) -> Pairs:
    return [
        ("loading", 0),
        ("appendfsync", server.config.appendfsync),
        ("wal_bytes", server.store.vstore_wal.size),
        ("ssm_wal_bytes", server.store.ssm_wal.size),
        ("keyspace_wal_bytes", server.keyspace.wal_bytes),
        ("disk_used_bytes", server.store.space.used_bytes()),
        ("disk_budget_bytes", server.store.space.disk_budget),
        *told([*server.store.replayed.notes, *server.keyspace.notes]).items(),
    ]


def _replication(server: Server) -> Pairs:
    return [("role", "master")]


def _pion(server: Server) -> Pairs:
    return [("stats_scope", "worker"), *server.ledger.fields()]


def _keyspace(server: Server) -> Pairs:
    data, now = server.keyspace.data, server.keyspace.now
    count = data.size(now)
    return [("db0", f"keys={count},expires={data.timed(now)},avg_ttl=0")] if count else []


class _OwnKeys:
    """Counts the keys of one tenant among everybody's."""

    def __init__(self, context: Context) -> None:
        self._mine = context.stored(b"")
        self._data, self._now = context.server.keyspace.data, context.server.keyspace.now
        self._keys = self._timed = 0

    def look(self, key: bytes) -> None:
        if key.startswith(self._mine) and (entry := self._data.find(key, self._now)) is not None:
            self._keys += 1
            self._timed += bool(entry.deadline)

    def parts(self) -> Iterator[list[bytes]]:
        return self._data.parts(0, self._data.last_place)

    def pairs(self) -> Pairs:
        """As ``_keyspace``, of what was looked at."""
        keys, timed = self._keys, self._timed
        return [("db0", f"keys={keys},expires={timed},avg_ttl=0")] if keys else []


def _seen_by_tenant(context: Context, own: _OwnKeys) -> dict[str, Callable[[], Pairs]]:
    """What INFO tells a tenant: the server as such, and what is its own."""
    server, tenant = context.server, context.client.tenant
    hidden = ("unix_socket", "config_dir")
    return {
        "server": lambda: [pair for pair in _server(server) if pair[0] not in hidden],
        "clients": lambda: [
            ("connected_clients", sum(c.tenant == tenant for c in server.clients.values()))
        ],
        "persistence": lambda: [("loading", 0)],
        "replication": lambda: _replication(server),
        "keyspace": own.pairs,
    }


_SECTIONS: dict[str, Callable[[Server], Pairs]] = {
    "server": _server,
    "clients": _clients,
    "memory": _memory,
    "persistence": _persistence,
    "stats": _stats,
    "replication": _replication,
    "pion": _pion,
    "keyspace": _keyspace,
}


def section_text(title: str, pairs: Pairs) -> str:
    """One section as INFO prints it."""
    return f"# {title}\r\n" + "".join(f"{name}:{value}\r\n" for name, value in pairs)


@command("INFO", -1, "The server in numbers.", syntax="[section...]", tenant=True)
def info(context: Context, args: list[Arg]) -> Reply | Awaitable[Reply]:
    wanted = {arguments.word(arg).decode("latin-1").lower() for arg in args[1:]}
    everything = not wanted or wanted & {"all", "everything", "default"}
    own = _OwnKeys(context)
    if context.client.tenant:
        known = _seen_by_tenant(context, own)
    else:
        known = {name: partial(pairs, context.server) for name, pairs in _SECTIONS.items()}

    def text() -> str:
        # only what is asked for is counted: some of it takes time
        sections = [
            section_text(name.capitalize(), pairs())
            for name, pairs in known.items()
            if everything or name in wanted
        ]
        return "\r\n".join(sections)

    async def counted() -> Reply:
        await in_turns(own.parts(), own.look)
        return text()

    if not context.client.tenant or not (everything or "keyspace" in wanted):
        return text()
    if context.overlay is None:
        return counted()
    # a transaction is of one moment
    at_once(own.parts(), own.look)
    return text()


@command("PION.STATS", -1, "The value receipt of this worker; RESET zeroes it.", syntax="[RESET]")
def pion_stats(context: Context, args: list[Arg]) -> Reply:
    server = context.server
    if len(args) == 2 and arguments.word(args[1]).upper() == b"RESET":
        # the uptime stays
        server.ledger = Ledger(server.ledger.worker_id, server.ledger.started)
        return Simple("OK")
    return Map([(name, value) for name, value in server.ledger.fields()])
