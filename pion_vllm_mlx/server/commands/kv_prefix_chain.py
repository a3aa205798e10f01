"""KV.PREFIX.WARM with CHAIN: a prefix whose rows lie in several namespaces, one behind the other.

What prefixes that were warmed so have in common is resident once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.attention import chains
from pion_vllm_mlx.server.attention.chains import LayerChain, Link
from pion_vllm_mlx.server.attention.resident import Resident
from pion_vllm_mlx.server.attention.slots import Key
from pion_vllm_mlx.server.command import Reply
from pion_vllm_mlx.server.commands.kv_prefix_whole import ATTEMPTS, NOT_FOUND, WHERE, Whole
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.wire.resp import Arg, Simple

#: more are refused: to look at one layer of so many takes milliseconds.
_MOST_ANCESTORS = 256
_WORD, _WORDS_EACH, _NO_RECORD = b"CHAIN", 3, b"-"


@dataclass(frozen=True)
class Asked:
    """What is to become resident: the last namespace of the chain, as which session.

    ``only``: that layer alone.
    """

    namespace: bytes
    target: bytes
    heads: int
    dim: int
    only: int | None


def split_chain(args: Sequence[Arg]) -> tuple[list[Arg], list[Arg] | None]:
    """The options before CHAIN, and the words behind it; None without it."""
    for at in range(0, len(args), 2):  # each of the others has one value
        word = args[at]
        if isinstance(word, bytes) and word.upper() == _WORD:
            return list(args[:at]), list(args[at + 1 :])
    return list(args), None


async def warm_chain(
    context: Context, asked: Asked, given: Mapping[str, list[Arg]], words: Sequence[Arg]
) -> Reply:
    """Make the layers of a chain resident; how many. Raises CommandError."""
    ancestors = _ancestors(context, words)
    total = arguments.given_integer(given, "TOKENS", 1, arguments.MAX_TOKENS)
    before = sum(rows for _, rows, _ in ancestors)
    if total <= before:
        raise CommandError(f"{WHERE}: CHAIN needs TOKENS, more than the {before} of the ancestors")
    links, proofs = [], []
    for namespace, rows, record in ancestors:
        links.append(await _link(context, namespace, rows))
        alone: dict[str, list[Arg]] = {} if record == _NO_RECORD else {"RECORD": [record]}
        proofs.append(await Whole.of(context, namespace, alone))
    links.append(await _link(context, asked.namespace, total - before))
    proofs.append(await Whole.of(context, asked.namespace, given))
    fitting, others = await _fitting(links, asked)
    attention = context.server.attention
    for chain in fitting:
        nbytes = chain.kept_bytes(attention.settings.dtype, asked.dim)
        attention.slots.check_fits(asked.target, nbytes)
    for chain in fitting:
        await _warm_layer(context, asked, chain, proofs)
    return Simple(f"{len(fitting)} skipped_dim={others}" if others else str(len(fitting)))


def _ancestors(context: Context, words: Sequence[Arg]) -> list[tuple[bytes, int, bytes]]:
    """Namespace as it is stored, rows, and record of each. Raises CommandError."""
    if not words:
        raise CommandError(f"{WHERE}: CHAIN lacks its value")
    count = arguments.integer(words[0], f"{WHERE}: CHAIN", 0, _MOST_ANCESTORS)
    rest = list(words[1:])
    if len(rest) != count * _WORDS_EACH:
        raise CommandError(f"{WHERE}: CHAIN {count} is followed by {count} of: ns rows record")
    found = []
    for at in range(0, len(rest), _WORDS_EACH):
        name, record = arguments.sid(rest[at]), arguments.word(rest[at + 2])
        arguments.check_prefix([name], context.server.config.ns_prefix)
        rows = arguments.integer(rest[at + 1], "rows", 1, arguments.MAX_TOKENS)
        found.append((context.stored(name), rows, record))
    return found


async def _link(context: Context, namespace: bytes, rows: int) -> Link:
    """A namespace whose rows verify. Raises CommandError."""
    sides = context.sides(namespace)
    if len(sides) < 2 or not await verified(context.store, sides):
        shown = context.shown(namespace).decode("utf-8", "backslashreplace")
        raise CommandError(f"{NOT_FOUND}: {shown}")
    return Link(namespace, (sides[0], sides[1]), rows)


async def _fitting(links: Sequence[Link], asked: Asked) -> tuple[list[LayerChain], int]:
    """The layers of that shape, and how many are of another one. Raises CommandError."""
    fitting, others = [], 0
    keys, values = links[-1].sides
    layers = sorted(keys.layers.keys() & values.layers.keys())
    for layer in layers if asked.only is None else [n for n in layers if n == asked.only]:
        chain = LayerChain.of(layer, links)
        if not chain.fits(asked.heads, asked.dim):
            others += 1
        elif chain.parts:
            fitting.append(chain)
        await asyncio.sleep(0)  # others have their turn; what is read is looked at again
    return fitting, others


async def _warm_layer(
    context: Context, asked: Asked, chain: LayerChain, proofs: Sequence[Whole]
) -> None:
    """Make a layer resident as its rows are at one moment. Raises CommandError."""
    attention = context.server.attention
    layer, links = chain.layer, chain.links

    def check(resident: Resident) -> None:
        """What was read is still there, and all that was asked for."""
        if any(context.live(side.sid) is not side for link in links for side in link.sides):
            raise CommandError(NOT_FOUND)
        for proof in proofs:
            proof.check(context, layer, resident)

    resident = await _read(context, asked, chain)
    sources = [link.namespace for link in links]
    await attention.put_shared(Key(asked.target, layer), resident, sources, check)


async def _read(context: Context, asked: Asked, chain: LayerChain) -> Resident:
    dtype = context.server.attention.settings.dtype
    for _ in range(ATTEMPTS):
        failed: OSError | None = None
        resident: Resident | None = None
        reading = partial(chains.read, chain, asked.heads, asked.dim, dtype)
        try:
            resident = await context.store.run(reading)
        except OSError as error:
            failed = error
        if chain.is_current():
            if resident is not None:
                return resident
            assert failed is not None
            raise CommandError(f"{WHERE}: the stored rows cannot be read now: {failed.strerror}")
        chain = LayerChain.of(chain.layer, chain.links)
        if not chain.fits(asked.heads, asked.dim) or not chain.parts:
            break
    raise CommandError(f"{WHERE}: the rows of layer {chain.layer} change, try again")
