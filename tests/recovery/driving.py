"""A server's commands without its process: fast enough to start a store thousands of times.

``Driver`` runs commands through the server's own path on an event loop of its own.
``Driver.content`` is what the store holds, row by row, each verified: two stores with
the same content are the same store to every client.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import commands, dispatch
from pion_vllm_mlx.server.inbound import WindowPool
from pion_vllm_mlx.server.ledger import Ledger
from pion_vllm_mlx.server.outbound import Computed, FileRange, Stream
from pion_vllm_mlx.server.session import Client, Context, Server, ServerConfig
from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.files import pread_exactly
from pion_vllm_mlx.server.store.index import LayerRows, place_file
from pion_vllm_mlx.server.store.rows import read_layer
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.server.tenants import Tenant
from pion_vllm_mlx.wire.resp import Arg

assert commands.__all__

Word = bytes | str | int

#: sid and layer → count, the stored ranges, and the bytes of all rows
Content = dict[tuple[str, bytes, int], tuple[Any, ...]]


def plain(stream: Stream) -> bytes:
    """The bytes a stream would send."""
    out = bytearray()
    for chunk in stream.chunks:
        for piece in chunk.windows() if isinstance(chunk, Computed) else (chunk,):
            if isinstance(piece, FileRange):
                out += pread_exactly(piece.file.fd, piece.length, piece.offset)
            else:
                out += piece
    return bytes(out)


def one_bulk(data: bytes) -> bytes:
    """The value of a reply that is one bulk string."""
    length, _, rest = data.partition(b"\r\n")
    assert length == b"$%d" % (len(rest) - 2)
    return rest[:-2]


@dataclass(frozen=True)
class Options:
    """How to open a store."""

    salvage: bool = False
    wal: bool = True
    appendfsync: str = "no"
    max_sessions: int = 256
    disk_budget: int = 0
    #: commands come from a tenant with a quota of so many bytes
    quota: int = 0


class Driver:
    """One start of a store on ``folder``."""

    def __init__(self, folder: Path, options: Options | None = None) -> None:
        chosen = options or Options()
        config = StoreConfig(
            folder,
            wal=chosen.wal,
            appendfsync=chosen.appendfsync,
            max_sessions=chosen.max_sessions,
            disk_budget=chosen.disk_budget,
            salvage=chosen.salvage,
        )
        self.loop = asyncio.new_event_loop()
        try:
            self.store = self.loop.run_until_complete(self._open(config))
        except BaseException:
            self.loop.close()
            raise
        tenant = Tenant(b"t", "password", chosen.quota) if chosen.quota else None
        tenants = {tenant.name: tenant} if tenant else {}
        settings = ServerConfig(folder, kvcache=True, tenants=tenants)
        self.server = Server(settings, self.store, Ledger(), WindowPool())
        client = Client(1, "127.0.0.1:1", local=True, tenant=tenant.name if tenant else b"")
        self.context = Context(self.server, client)

    async def _open(self, config: StoreConfig) -> Store:
        return Store(config)

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.crash()

    def crash(self) -> None:
        """Let go of everything without flushing, saving or closing the store."""
        if not self.loop.is_closed():
            self.store.io.shutdown()
            self.store._log_thread.shutdown()
            self.loop.close()

    def ask(self, *words: Word) -> Any:
        """The reply of one command; a bulk reply as bytes. Raises CommandError."""
        return self.loop.run_until_complete(self._ask(words))

    async def _ask(self, words: tuple[Word, ...]) -> Any:
        args: list[Arg] = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        reply: Any = dispatch.execute(self.context, args)
        if isinstance(reply, Awaitable):
            reply = await reply
        return plain(reply) if isinstance(reply, Stream) else reply

    def map(self, namespace: str) -> dict[str, Any]:
        """The answer of KV.PREFIX.MAP."""
        answer: dict[str, Any] = json.loads(self.ask("KV.PREFIX.MAP", namespace))
        return answer

    def state_of(self, sid: str, layer: int) -> bytes | None:
        reply = self.ask("SSM.PREFIX.FETCH", sid, layer)
        return None if reply is None else one_bulk(reply)

    def content(self) -> Content:
        """Everything stored; every run and state is verified first and drops what does not."""
        state = self.store.state
        for session in list(state.sessions.values()):
            if state.sessions.get(session.sid) is session:
                self.loop.run_until_complete(verified(self.store, [session]))
        for sid, layers in list(state.states.items()):
            for layer in list(layers):
                self.ask("SSM.PREFIX.FETCH", sid, layer)
        found: Content = {}
        for session in state.sessions.values():
            described = (session.dim, session.requested, session.heads, dict(session.specs))
            found["session", session.sid, -1] = described
            for layer, rows in session.layers.items():
                found["rows", session.sid, layer] = (rows.count, *_rows(rows))
        for sid, layers in state.states.items():
            for layer, blob in layers.items():
                file = place_file(blob.place)
                data = pread_exactly(file.fd, blob.length, blob.place.offset)
                found["state", sid, layer] = (data,)
        return found

    def access_order(self) -> list[bytes]:
        return [session.sid for session in self.store.state.by_access()]


def _rows(rows: LayerRows) -> tuple[Any, ...]:
    ranges: list[tuple[int, int]] = []
    for extent in rows.extents:
        if ranges and ranges[-1][1] == extent.start:
            ranges[-1] = (ranges[-1][0], extent.end)
        else:
            ranges.append((extent.start, extent.end))
    return tuple(ranges), read_layer(rows, 0, rows.count).tobytes()


def refused(driver: Driver, *words: Word) -> str:
    """The sentence a command is refused with."""
    try:
        answer = driver.ask(*words)
    except CommandError as error:
        return error.sentence
    raise AssertionError(f"not refused: {words[:4]} answered {answer!r}")
