"""ATTEND.PREFIX.* in arrays: what is asked on either lane, and what came back."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.conftest import RunningServer, free_port_block
from tests.server.memory.lane import OK, QUERY_FUSED, Lane, named
from tests.server.wire import Wire, Word

Floats = NDArray[np.float32]


def normal(seed: int, *shape: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype("<f4")


def floats(answer: object, *shape: int) -> Floats:
    """A bulk reply as an array."""
    assert isinstance(answer, bytes), answer
    return np.frombuffer(answer, "<f4").reshape(shape)


def fused_body(  # noqa: PLR0913 - the fields of the frame
    sid: str,
    layer: int,
    q: Floats,
    suffix: tuple[Floats, Floats],
    head_map: bytes,
    window: int | None = None,
) -> bytes:
    """The body of a frame, from the table of the protocol."""
    heads, rows, dim = q.shape
    kv_heads, tokens, _ = suffix[0].shape
    sizes = [("H", layer), ("H", heads), ("H", dim), ("H", kv_heads), ("I", rows), ("I", tokens)]
    rest = q.tobytes() + suffix[0].tobytes() + suffix[1].tobytes() + head_map
    rest += b"" if window is None else struct.pack("<I", window)
    return named(sid, *sizes, rest=rest)


@dataclass(frozen=True)
class Asking:
    """Both lanes of a server, and a session."""

    wire: Wire
    lane: Lane
    sid: str
    layer: int = 3

    def at(self, sid: str | None = None, layer: int | None = None) -> Asking:
        """The same lanes, somewhere else."""
        return replace(
            self,
            sid=self.sid if sid is None else sid,
            layer=self.layer if layer is None else layer,
        )

    def command(self, name: str, *words: Word) -> Any:
        return self.wire.ask(f"ATTEND.PREFIX.{name}", self.sid, self.layer, *words)

    def store(self, keys: Floats, values: Floats) -> None:
        """K and V ``[H, N, D]``."""
        words = ("STORE", *keys.shape, keys.tobytes(), values.tobytes())
        assert self.command(*words) == "OK"

    def lookup(self) -> str:
        return str(self.command("LOOKUP"))

    def query(self, q: Floats, *window: int) -> Any:
        """Q ``[H, M, D]``: the raw answer."""
        return self.command("QUERY", q.shape[0], q.shape[2], 1024, q.tobytes(), *window)

    def fused(  # noqa: PLR0913 - the arguments of the command
        self,
        q: Floats,
        keys: Floats,
        values: Floats,
        head_map: bytes = b"",
        *window: int,
    ) -> Any:
        """Q ``[H_q, M, D]``, suffix K and V ``[H_kv, S, D]``: the raw answer of RESP."""
        heads, _, dim = q.shape
        kv_heads, tokens, _ = keys.shape
        blobs = (q.tobytes(), keys.tobytes(), values.tobytes(), head_map)
        return self.command("QUERY_FUSED", heads, dim, tokens, kv_heads, *blobs, *window)

    def framed(
        self,
        q: Floats,
        suffix: tuple[Floats, Floats],
        head_map: bytes,
        window: int | None = None,
    ) -> tuple[int, bytes]:
        """The same on the binary lane: status and body."""
        body = fused_body(self.sid, self.layer, q, suffix, head_map, window)
        return self.lane.ask(QUERY_FUSED, body)

    def framed_ok(
        self,
        q: Floats,
        suffix: tuple[Floats, Floats],
        head_map: bytes,
        window: int | None = None,
    ) -> bytes:
        status, body = self.framed(q, suffix, head_map, window)
        assert status == OK, (status, body)
        return body

    def info(self) -> dict[str, int]:
        """The numbers of the attention cache."""
        fields = self.wire.info("KV.PREFIX.INFO")
        return {k: int(v) for k, v in fields.items() if k.startswith("sdpa_")}


@contextmanager
def connected(server: RunningServer, sid: str = "s") -> Iterator[Asking]:
    """Connections to both lanes of a server."""
    with Wire.tcp(server.port) as wire, Lane.tcp(server.port + 1) as lane:
        yield Asking(wire, lane, sid, 0)


@contextmanager
def flagged(folder: Path, *flags: str) -> Iterator[RunningServer]:
    """A server with flags on the new folder ``folder``, stopped at the end."""
    folder.mkdir(mode=0o700)
    server = RunningServer(port=free_port_block(), dir=folder, flags=flags)
    try:
        yield server.start()
    finally:
        server.stop()
