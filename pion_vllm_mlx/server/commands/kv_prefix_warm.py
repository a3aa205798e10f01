"""KV.PREFIX.WARM: the layers of a namespace, from its stored rows into the attention cache."""

from __future__ import annotations

from functools import partial

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.attention import warming
from pion_vllm_mlx.server.attention.resident import Resident, check_dim
from pion_vllm_mlx.server.attention.slots import Key
from pion_vllm_mlx.server.attention.warming import LayerPair
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.commands.attend_prefix import MAX_LAYER, dim_of, heads_of
from pion_vllm_mlx.server.commands.kv_prefix_chain import Asked, split_chain, warm_chain
from pion_vllm_mlx.server.commands.kv_prefix_whole import ATTEMPTS, NOT_FOUND, WHERE, Whole
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.index import Session
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.wire.resp import Arg, Simple


@command(
    "KV.PREFIX.WARM",
    -4,
    "Makes the stored rows of a namespace resident for attention; how many layers.",
    syntax="ns heads dim [attend_sid [LAYER layer] [TOKENS n] [RECORD sha256] "
    "[CHAIN count [(ancestor rows record)...]]]",
    extensions=("LAYER", "TOKENS", "RECORD", "CHAIN"),
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
    grows=True,
)
async def kv_prefix_warm(context: Context, args: list[Arg]) -> Reply:
    words, chain = split_chain(args[5:])
    given = arguments.options(words, {"LAYER": 1, "TOKENS": 1, "RECORD": 1}, WHERE)
    only = arguments.given_integer(given, "LAYER", 0, MAX_LAYER) if "LAYER" in given else None
    namespace = arguments.sid(args[1])
    heads, dim = heads_of(args[2], "H"), dim_of(args[3])
    check_dim(dim)
    target = _target(context, namespace, args[4:5])
    if chain is not None:
        asked = Asked(namespace, target, heads, dim, only)
        return await warm_chain(context, asked, given, chain)
    sides = context.sides(namespace)
    if len(sides) < 2 or not await verified(context.store, sides):
        raise CommandError(NOT_FOUND)
    whole = await Whole.of(context, namespace, given)
    fitting, others = _fitting(sides, heads, dim, only)
    _check_budget(context, target, fitting, dim)
    for pair in fitting:
        resident = await _read(context, sides, pair, heads, dim)
        whole.check(context, pair.layer, resident)
        context.server.attention.put(Key(target, pair.layer), resident, namespace)
    return Simple(f"{len(fitting)} skipped_dim={others}" if others else str(len(fitting)))


def _fitting(
    sides: list[Session], heads: int, dim: int, only: int | None
) -> tuple[list[LayerPair], int]:
    """The layers of that shape, and how many are of another one; ``only``: of one layer.

    Raises CommandError where there is none because their rows are as wide, of other heads.
    """
    fitting, others, named = [], 0, ""
    for layer, keys in sorted(sides[0].layers.items()):
        values = sides[1].layers.get(layer)
        if values is None or only not in (None, layer):
            continue
        pair = LayerPair.of(layer, keys, values)
        if not pair.fits(heads, dim):
            others += 1
            if pair.has_width(heads * dim):
                named = f"layer {layer} has rows of {keys.spec.heads} heads, not {heads}"
        elif pair.absent < pair.tokens:
            fitting.append(pair)
    if named and not fitting:
        raise CommandError(f"{WHERE}: {named}")
    return fitting, others


def _target(context: Context, namespace: bytes, args: list[Arg]) -> bytes:
    """The attention session, as it is stored: the namespace unless another one is named."""
    if not args:
        return namespace
    name = arguments.sid(args[0])
    arguments.check_prefix([name], context.server.config.ns_prefix)
    return context.stored(name)


def _check_budget(context: Context, target: bytes, pairs: list[LayerPair], dim: int) -> None:
    """Raise OutOfMemory for a layer that does not fit even alone; else the last ones stay."""
    attention = context.server.attention
    for pair in pairs:
        attention.slots.check_fits(target, pair.kept_bytes(attention.settings.dtype, dim))


async def _read(
    context: Context, sides: list[Session], pair: LayerPair, heads: int, dim: int
) -> Resident:
    """K/V of a layer as its rows are at one moment. Raises CommandError."""
    attention = context.server.attention
    dtype = attention.settings.dtype
    keys, values = sides
    for _ in range(ATTEMPTS):
        failed: OSError | None = None
        resident: Resident | None = None
        try:
            resident = await context.store.run(partial(warming.read, pair, heads, dim, dtype))
            resident = await attention.placed(resident)
        except OSError as error:
            failed = error
        if any(context.live(side.sid) is not side for side in sides):
            raise CommandError(NOT_FOUND)
        now_keys, now_values = keys.layers.get(pair.layer), values.layers.get(pair.layer)
        if now_keys is None or now_values is None:
            break
        current = pair.is_current(now_keys, now_values)
        if resident is not None and current:
            return resident
        if failed is not None and current:
            raise CommandError(f"{WHERE}: the stored rows cannot be read now: {failed.strerror}")
        pair = LayerPair.of(pair.layer, now_keys, now_values)
    raise CommandError(f"{WHERE}: the rows of layer {pair.layer} change, try again")
