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

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.arguments import check_prefix
from pion_vllm_mlx.server.attention.requests import Arrays, Dense, Sizes, raw
from pion_vllm_mlx.server.attention.slots import Key
from pion_vllm_mlx.server.memory.layer_store import Piece
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.frames import BodyReader

WHERE = "ATTEND.PREFIX.QUERY_FUSED"
_WINDOW_BYTES = 4


def query_fused(context: Context, body: BodyReader) -> asyncio.Future[list[Piece]]:
    """Begin a query; its reply f32 ``[H_q, M, D]``. Raises CommandError, ColdMiss, NotStored."""
    attention = context.server.attention
    key = Key(body.sid(), body.u16())
    check_prefix([key.sid], context.server.config.ns_prefix)
    heads, dim, kv_heads = body.u16(), body.u16(), body.u16()
    rows, suffix = body.u32(), body.u32()
    rest = body.rest()
    ends = _ends(rest, 4 * heads * rows * dim, 4 * kv_heads * suffix * dim, heads)
    q, k, v, head_map, window = (
        rest[begin:end] for begin, end in zip([0, *ends], [*ends, len(rest)], strict=True)
    )
    asked = int.from_bytes(window, "little") if window else -1
    sizes = Sizes(WHERE, heads, kv_heads, dim, attention.window(asked))
    request = Dense(sizes, sizes.queries(q), sizes.head_map(head_map), sizes.suffix(suffix, k, v))

    def pieces(arrays: Arrays) -> list[Piece]:
        found: list[Piece] = [raw(array) for array in arrays]
        context.answer_early(found)
        return found

    return attention.query_then(key, request, pieces, context.connected)


def _ends(rest: memoryview, query: int, side: int, heads: int) -> list[int]:
    """Where Q, K_suf, V_suf and head_map end. Raises CommandError for another length."""
    ends = [query, query + side, query + 2 * side, query + 2 * side + heads]
    if len(rest) - ends[-1] not in (0, _WINDOW_BYTES):
        raise CommandError(
            f"{WHERE}: blob size {len(rest)} instead of {ends[-1]}, or {_WINDOW_BYTES} more"
        )
    return ends
