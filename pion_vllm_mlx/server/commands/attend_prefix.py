"""ATTEND.PREFIX.STORE, LOOKUP and the dense queries: attention over K/V that are resident.

Each handler reads its words and hands over; what is computed, and how it is refused, is
the same on the binary lane.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.attention.requests import Arrays, Dense, Request, Sizes, raw
from pion_vllm_mlx.server.attention.resident import Blob, Shape
from pion_vllm_mlx.server.attention.slots import Key
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.outbound import bulk_in_memory
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
MAX_LAYER = 65_535
MAX_WIRE_HEADS = 1024
_MAX_DIM = 65_535
#: windows are as long as prefixes may be; −1 asks for the server's default.
_MAX_WINDOW = (1 << 32) - 1

Handler = Callable[..., Any]


def on_slot(name: str, arity: int, summary: str, **options: Any) -> Callable[[Handler], Handler]:
    """Declare a command on the slot that its session and layer name."""
    options |= {"kvcache": True, "keys": (1, 1), "tenant": True, "long_arguments": True}
    return command(name, arity, summary, **options)


def key_of(args: list[Arg]) -> Key:
    """The slot that the first two arguments name. Raises CommandError."""
    sid = arguments.sid(args[1])
    return Key(sid, arguments.integer(args[2], "layer", 0, MAX_LAYER))


def heads_of(arg: Arg, name: str) -> int:
    """A number of heads. Raises CommandError."""
    return arguments.integer(arg, name, 1, MAX_WIRE_HEADS)


def dim_of(arg: Arg) -> int:
    """A head dimension; whether there are kernels for it is said later. Raises CommandError."""
    return arguments.integer(arg, "D", 1, _MAX_DIM)


def window_of(context: Context, args: list[Arg]) -> int:
    """The window of a query from what follows its fixed words. Raises CommandError."""
    asked = arguments.integer(args[0], "fa_window", -1, _MAX_WINDOW) if args else -1
    return context.server.attention.window(asked)


def blobs(args: list[Arg]) -> list[Blob]:
    """Arguments of any length. Raises CommandError."""
    return [arguments.data(arg) for arg in args]


def answer(context: Context, key: Key, request: Request) -> Awaitable[Reply]:
    """Begin a query; its reply. Raises CommandError, ColdMiss, NotStored."""
    return _bulk(context.server.attention.query(key, request, context.connected))


async def _bulk(pending: Awaitable[Arrays]) -> Reply:
    return bulk_in_memory([raw(array) for array in await pending])


@on_slot(
    "ATTEND.PREFIX.STORE",
    8,
    "Makes K and V of a layer resident.",
    syntax="sid layer heads tokens dim k_blob v_blob",
    grows=True,
)
async def attend_prefix_store(context: Context, args: list[Arg]) -> Reply:
    key = key_of(args)
    heads = heads_of(args[3], "H")
    tokens = arguments.integer(args[4], "N", 1, arguments.MAX_TOKENS)
    shape = Shape(heads, tokens, dim_of(args[5]))
    await context.server.attention.store(key, shape, *blobs(args[6:8]))
    return OK


@on_slot(
    "ATTEND.PREFIX.LOOKUP",
    -3,
    "Whether K and V of a layer are resident: HIT, COLD or MISS; with SHAPE also H, N and D.",
    syntax="sid layer [SHAPE]",
    extensions=("SHAPE",),
)
def attend_prefix_lookup(context: Context, args: list[Arg]) -> Reply:
    given = arguments.options(args[3:], {"SHAPE": 0}, "ATTEND.PREFIX.LOOKUP")
    key, slots = key_of(args), context.server.attention.slots
    state = Simple(slots.state(key))
    return [state, *slots.shape(key)] if "SHAPE" in given else state


@on_slot(
    "ATTEND.PREFIX.QUERY",
    -7,
    "Attention of one query, or of several with their log-sum-exp, over a resident prefix.",
    syntax="sid layer heads dim top_k q_blob [fa_window]",
)
def attend_prefix_query(context: Context, args: list[Arg]) -> Awaitable[Reply]:
    where = "ATTEND.PREFIX.QUERY"
    arguments.at_most(args, 8, where)
    key, heads, dim = key_of(args), heads_of(args[3], "H"), dim_of(args[4])
    # every query is dense: clients that do not know N ask for 1024
    arguments.integer(args[5], "top_k", 1, arguments.MAX_TOKENS)
    sizes = Sizes(where, heads, heads, dim, window_of(context, args[7:]))
    return answer(context, key, Dense(sizes, sizes.queries(*blobs(args[6:7])), None, with_lse=True))


@on_slot(
    "ATTEND.PREFIX.QUERY_FUSED",
    -11,
    "Attention over a resident prefix and the suffix that comes along, as one softmax.",
    syntax="sid layer q_heads dim suffix_tokens kv_heads q_blob k_blob v_blob head_map [fa_window]",
)
def attend_prefix_query_fused(context: Context, args: list[Arg]) -> Awaitable[Reply]:
    where = "ATTEND.PREFIX.QUERY_FUSED"
    arguments.at_most(args, 12, where)
    key, heads, dim = key_of(args), heads_of(args[3], "H_q"), dim_of(args[4])
    suffix = arguments.integer(args[5], "S_suf", 0, arguments.MAX_TOKENS)
    kv_heads = heads_of(args[6], "H_kv")
    sizes = Sizes(where, heads, kv_heads, dim, window_of(context, args[11:]))
    q, k, v, head_map = blobs(args[7:11])
    return answer(
        context,
        key,
        Dense(sizes, sizes.queries(q), sizes.head_map(head_map), sizes.suffix(suffix, k, v)),
    )
