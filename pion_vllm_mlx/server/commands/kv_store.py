"""KV.STORE, KV.FETCH, KV.INFO: blobs found by the cosine of an embedding; memory only."""

from __future__ import annotations

import re

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.memory.semantic_cache import (
    CAPACITY,
    DEFAULT_THRESHOLD,
    DIMENSIONS,
    embedding,
)
from pion_vllm_mlx.server.outbound import bulk_in_memory
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg, Simple

OK = Simple("OK")
MAX_TTL_SECONDS = 10 * 366 * 86_400
_FRACTION = re.compile(rb"-?[0-9]{1,18}(\.[0-9]{1,18})?")


def _threshold(arg: Arg) -> float:
    """A cosine as a plain decimal number of −1 to 1."""
    text = arguments.word(arg)
    value = float(text) if _FRACTION.fullmatch(text) else 2.0
    if not -1 <= value <= 1:
        raise CommandError("KV.FETCH: THRESHOLD must be a number of -1 to 1")
    return value


@command(
    "KV.STORE",
    -4,
    "Keeps a blob under an embedding.",
    syntax="id embedding blob [TTL ttl] [MODEL model]",
    grows=True,
    long_arguments=True,
)
def kv_store(context: Context, args: list[Arg]) -> Reply:
    cache_id = arguments.sid(args[1])
    vector = embedding(arguments.data(args[2]))
    blob = arguments.data(args[3])
    given = arguments.options(args[4:], {"TTL": 1, "MODEL": 1}, "KV.STORE")
    ttl = arguments.given_integer(given, "TTL", 0, MAX_TTL_SECONDS)
    model = arguments.given_word(given, "MODEL")
    context.server.memory.semantic.store(cache_id, vector, blob, ttl, model)
    return OK


@command(
    "KV.FETCH",
    -2,
    "The blob whose embedding is nearest, if it is near enough.",
    syntax="embedding [THRESHOLD cosine] [MODEL model]",
)
async def kv_fetch(context: Context, args: list[Arg]) -> Reply:
    vector = embedding(arguments.word(args[1]))
    given = arguments.options(args[2:], {"THRESHOLD": 1, "MODEL": 1}, "KV.FETCH")
    threshold, model = DEFAULT_THRESHOLD, None
    if "THRESHOLD" in given:
        threshold = _threshold(given["THRESHOLD"][0])
    if "MODEL" in given:
        model = arguments.word(given["MODEL"][0])
    blob = context.server.memory.semantic.fetch(vector, threshold, model)
    return None if blob is None else bulk_in_memory([blob])


@command("KV.INFO", 1, "The blobs found by embedding, in numbers.")
def kv_info(context: Context, args: list[Arg]) -> Reply:
    cache = context.server.memory.semantic
    cache.expire()
    return arguments.lines(
        enabled=1,
        entries=len(cache.entries),
        capacity=CAPACITY,
        dimensions=DIMENSIONS,
        total_blob_bytes=cache.stored_bytes,
        hits=cache.hits,
        misses=cache.misses,
        hit_rate=f"{cache.hit_rate:.4f}",
        evictions=cache.evictions,
        expired=cache.expired,
    )
