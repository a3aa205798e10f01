"""The longest stored prefix by its blocks, from a server that cannot say itself which it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import block_digests
from pion_vllm_mlx.cache.lineage.client import LineageClient, as_int, as_text, require_array
from pion_vllm_mlx.errors import CommandError

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.lineage.index import Names

_FIELDS_AT_ONCE = 1000
_MOST_SEGMENTS = 4


def is_unknown(refusal: CommandError) -> bool:
    """Whether the server does not have the command at all."""
    return refusal.sentence.startswith("unknown command")


def segments_by_blocks(client: LineageClient, names: Names, tokens: TokenIds) -> list[int]:
    """The segments of the longest blocks of a prompt that are indexed, the longest first.

    At most four. Raises StoreUnavailable, CommandError.
    """
    fields = [digest.hex() for digest in block_digests(tokens)]
    chunks = [fields[at : at + _FIELDS_AT_ONCE] for at in range(0, len(fields), _FIELDS_AT_ONCE)]
    if not chunks:
        return []
    commands = [("HMGET", names.key("blk"), *chunk) for chunk in chunks]
    replies = client.demand(names.route, commands)
    places = [as_text(one) for reply in replies for one in require_array(reply, "HMGET")]
    numbers = [as_int(place.partition(":")[0]) for place in reversed(places) if place]
    return list(dict.fromkeys(number for number in numbers if number >= 0))[:_MOST_SEGMENTS]
