"""KV.PREFIX.LONGEST: the longest stored prefix of a prompt, in one round trip.

A lineage lives on one worker, keys and rows: the one on which its first segment was
registered. Asked anywhere else, the command says which that is.
"""

from __future__ import annotations

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.lineage import TOKEN_BYTES, Index, rows_of
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.resp import Arg


def _holds(context: Context, namespace: bytes, rows: int) -> bool:
    """Whether a lookup would hit, and every layer that has rows has so many."""
    sides = context.sides(namespace)
    if len(sides) < 2:
        return False
    counts = [layer.count for session in sides for layer in session.layers.values()]
    return min(counts, default=rows) >= rows


@command(
    "KV.PREFIX.LONGEST",
    3,
    "The longest stored prefix of a prompt in a lineage index: length, namespace, position.",
    syntax="index token_blob",
    kvcache=True,
    keys=(1, 1),
    extension=True,
)
def kv_prefix_longest(context: Context, args: list[Arg]) -> Reply:
    where = "KV.PREFIX.LONGEST"
    name, prompt = arguments.sid(args[1]), arguments.word(args[2])
    lineage = rows_of(name, context.server.config.ns_prefix)
    if lineage is None:
        raise CommandError(f"{where}: an index is called pps:<id>")
    if len(prompt) % TOKEN_BYTES:
        raise CommandError(f"{where}: token blob size {len(prompt)} is no multiple of 4")
    owner = context.server.directory.lineage_home(lineage)
    if owner is not None:
        raise CommandError(f"{where} session lives on worker {owner}")

    def namespace(segment: int) -> bytes:
        return b"%ss%d" % (lineage, segment)

    index = Index(
        name,
        context.keys.hash,
        lambda segment, rows: _holds(context, namespace(segment), rows),
    )
    match = index.longest(prompt)
    if match is None:
        return [0, None, 0]
    return [match.length, namespace(match.leaf), match.length - match.base]
