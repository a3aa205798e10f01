"""ATTEND.PREFIX.QUERY_SPARSE and its AUTO forms: one query over part of a resident prefix."""

from __future__ import annotations

from collections.abc import Awaitable

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.attention.requests import Auto, Sizes, Sparse
from pion_vllm_mlx.server.command import Reply
from pion_vllm_mlx.server.commands.attend_prefix import (
    answer,
    blobs,
    dim_of,
    heads_of,
    key_of,
    on_slot,
    window_of,
)
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg


@on_slot(
    "ATTEND.PREFIX.QUERY_SPARSE",
    -9,
    "Attention of one query to the tokens that it names, head by head.",
    syntax="sid layer heads dim k_max q_blob indices counts [fa_window]",
)
def attend_prefix_query_sparse(context: Context, args: list[Arg]) -> Awaitable[Reply]:
    where = "ATTEND.PREFIX.QUERY_SPARSE"
    arguments.at_most(args, 10, where)
    key, heads, dim = key_of(args), heads_of(args[3], "H"), dim_of(args[4])
    most = arguments.integer(args[5], "K_sparse_max", 1, arguments.MAX_TOKENS)
    sizes = Sizes(where, heads, heads, dim, window_of(context, args[9:]))
    q, indices, counts = blobs(args[6:9])
    return answer(context, key, Sparse.of(sizes, most, q, indices, counts))


def _selection(args: list[Arg], selector: list[Arg]) -> api.Selection:
    """B and K_top, and the selector that may follow the window. Raises CommandError."""
    tokens = arguments.integer(args[0], "B", 1, arguments.MAX_TOKENS)
    top = arguments.integer(args[1], "K_top", 1, arguments.MAX_TOKENS)
    quest = bool(selector) and arguments.integer(selector[0], "selector", 0, 1) == 1
    return api.Selection(tokens, top, "quest" if quest else "mean")


@on_slot(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
    -10,
    "Attention of one query to the blocks that its keys choose.",
    syntax="sid layer q_heads dim block_size top_blocks kv_heads q_blob head_map "
    "[fa_window [selector]]",
)
def attend_prefix_query_sparse_auto(context: Context, args: list[Arg]) -> Awaitable[Reply]:
    where = "ATTEND.PREFIX.QUERY_SPARSE_AUTO"
    arguments.at_most(args, 12, where)
    key, heads, dim = key_of(args), heads_of(args[3], "H_q"), dim_of(args[4])
    selection = _selection(args[5:7], args[11:])
    kv_heads = heads_of(args[7], "H_kv")
    sizes = Sizes(where, heads, kv_heads, dim, window_of(context, args[10:11]))
    q, head_map = blobs(args[8:10])
    query = sizes.blob("Q", q, heads, dim)
    return answer(context, key, Auto(sizes, query, sizes.head_map(head_map), selection))


@on_slot(
    "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED",
    -13,
    "The same, and attention to the whole suffix that comes along, as one softmax.",
    syntax="sid layer q_heads dim block_size top_blocks kv_heads suffix_tokens q_blob k_blob "
    "v_blob head_map [fa_window [selector]]",
)
def attend_prefix_query_sparse_auto_fused(context: Context, args: list[Arg]) -> Awaitable[Reply]:
    where = "ATTEND.PREFIX.QUERY_SPARSE_AUTO_FUSED"
    arguments.at_most(args, 15, where)
    key, heads, dim = key_of(args), heads_of(args[3], "H_q"), dim_of(args[4])
    selection = _selection(args[5:7], args[14:])
    kv_heads = heads_of(args[7], "H_kv")
    tokens = arguments.integer(args[8], "S_suf", 0, arguments.MAX_TOKENS)
    sizes = Sizes(where, heads, kv_heads, dim, window_of(context, args[13:14]))
    q, k, v, head_map = blobs(args[9:13])
    query, suffix = sizes.blob("Q", q, heads, dim), sizes.suffix(tokens, k, v)
    asked = Auto(sizes, query, sizes.head_map(head_map), selection, suffix)
    return answer(context, key, asked)
