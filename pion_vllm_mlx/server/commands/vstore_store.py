"""V.STOREBATCH: rows of one layer of one side."""

from __future__ import annotations

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.command import Effect, command
from pion_vllm_mlx.server.incoming_rows import WHERE, StoredRows, open_rows, store_rows
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.records import Record
from pion_vllm_mlx.wire.resp import Arg, Simple


@command(
    "V.STOREBATCH",
    -6,
    "Stores consecutive rows of one layer; without FMT they come as fp32.",
    syntax="sid layer start rows blob [FMT (F16|STORED)] [LAYOUT (HND|NHD)] [CRC crc32c]",
    extensions=("STORED", "LAYOUT", "CRC"),
    write=True,
    kvcache=True,
    home="session",
    keys=(1, 1),
    tenant=True,
    grows=True,
    prepare=store_rows,
    open_bulk=open_rows,
)
def v_storebatch(context: Context, args: list[Arg], stored: StoredRows) -> Effect:
    """The rows are in their place; they count once their record is logged."""
    effects: list[Record] = []
    session = context.session(stored.request.sid, WHERE)
    if stored.shape is not None:
        if session.spec(stored.request.layer) != stored.shape.spec:
            raise CommandError(f"{WHERE}: session not found (another took its place)")
        effects.append(stored.record())
        context.store.counters.bytes_stored += stored.shape.data_bytes
    return Effect(effects, Simple("OK"))
