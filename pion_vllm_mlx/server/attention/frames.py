"""ATTEND.PREFIX.QUERY_FUSED on the binary lane.

======  =============================================================================
field   meaning
======  =============================================================================
u16     length of the session id, which follows
u16     layer, H_q, D, H_kv: four numbers
u32     M, S: two numbers
f32     Q [H_q, M, D], K_suf and V_suf [H_kv, S, D]
u8      head_map [H_q]
u32     fa_window, only where four bytes are left; without it the server's default
======  =============================================================================
"""

from __future__ import annotations

import asyncio
import struct

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import check_prefix
from pion_vllm_mlx.server.attention.requests import Arrays, Dense, Sizes, raw
from pion_vllm_mlx.server.attention.slots import Key
from pion_vllm_mlx.server.memory.layer_store import Piece
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.frames import BodyReader

WHERE = "ATTEND.PREFIX.QUERY_FUSED"
_FIELDS = struct.Struct("<HHHHII")
_WINDOW_BYTES = 4


def query_fused(context: Context, body: BodyReader) -> asyncio.Future[list[Piece]]:
    """Begin a query; its reply f32 ``[H_q, M, D]``. Raises CommandError, ColdMiss, NotStored."""
    key, request = _read(context, body)

    def pieces(arrays: Arrays) -> list[Piece]:
        found: list[Piece] = [raw(array) for array in arrays]
        context.answer_early(found)
        return found

    return context.server.attention.query_then(key, request, pieces, context.connected)


def query_fused_now(context: Context, body: BodyReader) -> list[Piece] | None:
    """The same, computed here, on the thread that attends.

    None for what is not resident and for what takes long; raises CommandError.
    """
    arrays = context.server.attention.attended_now(*_read(context, body))
    return None if arrays is None else [raw(array) for array in arrays]


def _read(context: Context, body: BodyReader) -> tuple[Key, Dense]:
    """Which slot is asked for what. Raises CommandError."""
    attention = context.server.attention
    sid = body.sid()
    check_prefix([sid], context.server.config.ns_prefix)
    layer, heads, dim, kv_heads, rows, suffix = body.fields(_FIELDS)
    rest = body.rest()
    q_end, k_end, v_end, end = _ends(
        rest, 4 * heads * rows * dim, 4 * kv_heads * suffix * dim, heads
    )
    asked = int.from_bytes(rest[end:], "little") if end < len(rest) else -1
    sizes = Sizes(WHERE, heads, kv_heads, dim, attention.window(asked))
    queries = sizes.queries(rest[:q_end])
    rows_behind = sizes.suffix(suffix, rest[q_end:k_end], rest[k_end:v_end])
    return Key(sid, layer), Dense(sizes, queries, sizes.head_map(rest[v_end:end]), rows_behind)


def _ends(rest: memoryview, query: int, side: int, heads: int) -> list[int]:
    """Where Q, K_suf, V_suf and head_map end. Raises CommandError for another length."""
    ends = [query, query + side, query + 2 * side, query + 2 * side + heads]
    if len(rest) - ends[-1] not in (0, _WINDOW_BYTES):
        raise CommandError(
            f"{WHERE}: blob size {len(rest)} instead of {ends[-1]}, or {_WINDOW_BYTES} more"
        )
    return ends
