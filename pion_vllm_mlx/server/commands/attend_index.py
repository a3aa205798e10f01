"""ATTEND.CREATE to ATTEND.INFO: value rows found by the distance of their keys; memory only.

``store_rows``, ``finalize_layer`` and ``search`` are what both lanes call: the replies
of the binary lane are those of RESP byte for byte.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.memory.attend_index import IndexShape, value_format
from pion_vllm_mlx.server.memory.nearest import attend_best
from pion_vllm_mlx.server.memory_command import layer_of, on_name
from pion_vllm_mlx.server.outbound import bulk_in_memory
from pion_vllm_mlx.server.session import Context, Server
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
MAX_DIM = 65_535
MAX_K = 4096
_MAX_COUNT = (1 << 32) - 1


def floats(data: bytes | memoryview) -> NDArray[np.float32]:
    """A blob of float32, whole numbers of them, where it lies."""
    return np.frombuffer(data, "<f4")


def raw(array: NDArray[np.float32]) -> memoryview:
    """The bytes of an array, where it lies."""
    return np.ascontiguousarray(array, "<f4").reshape(-1).view(np.uint8).data


async def store_rows(
    server: Server,
    sid: bytes,
    layer: int,
    count: int,
    blobs: tuple[bytes | memoryview, bytes | memoryview],
) -> None:
    """Append ``count`` keys and values to a layer. Raises CommandError, NotStored."""
    keys, values = blobs
    session = server.memory.index.session(sid)
    session.check_rows(count, len(keys), len(values))

    def work() -> None:
        key_rows = floats(keys).reshape(count, session.shape.key_dim)
        session.store(layer, key_rows, floats(values).reshape(count, session.shape.value_dim))

    async with session.lock:
        await server.store.run(work)


async def finalize_layer(server: Server, sid: bytes, layer: int) -> None:
    """Give back what a complete layer does not need. Raises NotStored."""
    session = server.memory.index.session(sid)
    async with session.lock:
        await server.store.run(lambda: session.finalize(layer))


async def search(
    server: Server, sid: bytes, layer: int, k: int, query: bytes | memoryview
) -> tuple[memoryview, memoryview]:
    """Value rows of the ``k`` nearest keys and their distances, both float32.

    Raises CommandError for arguments out of range, NotStored.
    """
    if not 1 <= k <= MAX_K:
        raise CommandError(f"k must be 1 to {MAX_K}")
    index = server.memory.index
    session = index.session(sid)
    session.check_query(layer, len(query))
    async with session.lock:
        if not session.is_current(layer):
            await server.store.run(lambda: session.bring_up_to_date(layer))
        view = session.layers[layer].view()
    rows, distances = await server.store.run(lambda: view.query(floats(query), k))
    index.queries += 1
    return raw(rows), raw(distances)


def _shape(args: list[Arg]) -> IndexShape:
    """Key and value widths and options of an ATTEND.CREATE. Raises CommandError."""
    where = "ATTEND.CREATE"
    key_dim = arguments.integer(args[2], "key_dim", 1, MAX_DIM)
    value_dim = arguments.integer(args[3], "value_dim", 1, MAX_DIM)
    known = {"KQUANT": 1, "VQUANT": 1, "BOUNDARY": 1, "BOUNDARY_VQUANT": 1, "ROPE": 1}
    given = arguments.options(args[4:], known, where)
    names = {
        option: arguments.given_word(given, option, b"int8").decode("latin-1")
        for option in ("KQUANT", "VQUANT", "BOUNDARY_VQUANT")
    }
    boundary, rope = (
        arguments.given_integer(given, option, 0, MAX_DIM) for option in ("BOUNDARY", "ROPE")
    )
    # keys are float32 whatever is asked for, but a name nobody knows is refused
    value_format(names["KQUANT"], key_dim, rope)
    return IndexShape(
        key_dim,
        value_dim,
        value_format(names["VQUANT"], value_dim, rope),
        boundary,
        value_format(names["BOUNDARY_VQUANT"], value_dim, rope),
        rope,
    )


@on_name(
    "ATTEND.CREATE",
    -4,
    "Opens an index of keys and values; answers its slot.",
    syntax="sid k_dim v_dim [KQUANT format] [VQUANT format] [BOUNDARY boundary] "
    "[BOUNDARY_VQUANT format] [ROPE rope]",
    grows=True,
)
def attend_create(context: Context, args: list[Arg]) -> Reply:
    sid = arguments.sid(args[1])
    index = context.server.memory.index
    slot = index.create(sid, _shape(args))
    if not context.client.tenant:
        return slot
    # counted without the sessions of others
    mine = context.stored(b"")
    return sum(one.slot < slot for name, one in index.sessions.items() if name.startswith(mine))


@on_name(
    "ATTEND.STORE",
    6,
    "Appends keys and values to a layer of an index.",
    syntax="sid layer count k_blob v_blob",
    grows=True,
    long_arguments=True,
)
async def attend_store(context: Context, args: list[Arg]) -> Reply:
    sid, layer = layer_of(args)
    count = arguments.integer(args[3], "count", 1, _MAX_COUNT)
    blobs = arguments.data(args[4]), arguments.data(args[5])
    context.charge(len(blobs[0]) + len(blobs[1]))
    await store_rows(context.server, sid, layer, count, blobs)
    return OK


@on_name(
    "ATTEND.FINALIZE",
    3,
    "Says that a layer of an index is complete.",
    syntax="sid layer",
)
async def attend_finalize(context: Context, args: list[Arg]) -> Reply:
    sid, layer = layer_of(args)
    await finalize_layer(context.server, sid, layer)
    return OK


@on_name(
    "ATTEND.QUERY",
    -5,
    "The value rows whose keys are nearest; WITHDIST appends their L2 distances.",
    syntax="sid layer k query_blob [WITHDIST]",
    extensions=("WITHDIST",),
    long_arguments=True,
)
async def attend_query(context: Context, args: list[Arg]) -> Reply:
    sid, layer = layer_of(args)
    k = arguments.integer(args[3], "k", 1, MAX_K)
    given = arguments.options(args[5:], {"WITHDIST": 0}, "ATTEND.QUERY")
    rows, distances = await search(context.server, sid, layer, k, arguments.data(args[4]))
    return bulk_in_memory([rows, distances] if given else [rows])


@command(
    "ATTEND.QUERYBATCH",
    8,
    "Softmax attention of a query a head over the best keys of a batch.",
    syntax="heads tokens dim k q_blob k_blob v_blob",
    kvcache=True,
    long_arguments=True,
)
async def attend_querybatch(context: Context, args: list[Arg]) -> Reply:
    names = ("H", "N", "D", "top_k")
    limits = (1 << 31) - 1
    heads, tokens, width, top_k = (
        arguments.integer(arg, name, 1, limits) for name, arg in zip(names, args[1:5], strict=True)
    )
    blobs = [arguments.data(arg) for arg in args[5:8]]
    rows = (heads, heads * tokens, heads * tokens)
    for name, blob, count in zip("QKV", blobs, rows, strict=True):
        if len(blob) != 4 * count * width:
            raise CommandError(
                f"ATTEND.QUERYBATCH: {name} blob size must be {4 * count * width} bytes"
            )
    q = floats(blobs[0]).reshape(heads, width)
    k, v = (floats(blob).reshape(heads, tokens, width) for blob in blobs[1:])
    out = await context.store.run(lambda: attend_best(q, k, v, top_k))
    return bulk_in_memory([raw(out)])


@command("ATTEND.INFO", 1, "The indices in numbers.", kvcache=True)
def attend_info(context: Context, args: list[Arg]) -> Reply:
    index = context.server.memory.index
    sessions = sorted(index.sessions.items(), key=lambda item: item[1].slot)
    fields: dict[str, object] = {
        "enabled": 1,
        "sessions": len(sessions),
        "total_tokens": sum(session.num_tokens for _, session in sessions),
        "total_queries": index.queries,
    }
    for sid, session in sessions:
        shape, name = session.shape, f"session[{session.slot}]"
        shown = sid.decode("utf-8", "backslashreplace").replace("\r", "\\r").replace("\n", "\\n")
        fields[f"{name}.id"] = shown
        fields[f"{name}.key_dim"] = shape.key_dim
        fields[f"{name}.value_dim"] = shape.value_dim
        fields[f"{name}.kquant"] = "int8"
        fields[f"{name}.vquant"] = shape.values.name.partition(":")[0]
        fields[f"{name}.boundary"] = shape.boundary
    return arguments.lines(**fields)
