"""KV.PREFIX.BLOCKS, MEMBERSHIP, and the BLOCKS clause of REGISTER: which blocks a prefix holds."""

from __future__ import annotations

from collections.abc import Sequence

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.blocks import HASH_BYTES, BlockTable
from pion_vllm_mlx.server.store.index import KEY_SUFFIX
from pion_vllm_mlx.server.store.records import Blocks, Create, Record
from pion_vllm_mlx.wire.resp import Arg, Simple

UNKNOWN = Simple("UNKNOWN")
_MAX_U32 = (1 << 32) - 1


def parse_blocks(values: Sequence[Arg]) -> BlockTable:
    """The table of a BLOCKS clause: block size, number of hashes, their bytes."""
    where = "KV.PREFIX.REGISTER BLOCKS:"
    block_size = arguments.integer(values[0], f"{where} block_size", 1, _MAX_U32)
    count = arguments.integer(values[1], f"{where} hash_count", 0, _MAX_U32)
    return BlockTable(block_size, _hashes(values[2], count, where))


def _hashes(arg: Arg, count: int, where: str) -> bytes:
    blob = arguments.word(arg)
    if len(blob) != HASH_BYTES * count:
        raise CommandError(f"{where} blob size {len(blob)} instead of {HASH_BYTES * count}")
    return blob


def blocks_effect(
    context: Context, namespace: bytes, table: BlockTable, creates: Sequence[Record]
) -> list[Record]:
    """The record that gives a namespace its table; none where it has the same one already."""
    sid = namespace + KEY_SUFFIX
    session = context.live(sid)
    made_anew = any(isinstance(record, Create) and record.sid == sid for record in creates)
    if session is not None and session.blocks == table and not made_anew:
        return []
    return [Blocks(sid, table.block_size, table.blob)]


def _table(context: Context, arg: Arg) -> BlockTable | None:
    session = context.live(arguments.sid(arg) + KEY_SUFFIX)
    return None if session is None else session.blocks


@command(
    "KV.PREFIX.BLOCKS",
    2,
    "The block hashes that a namespace was registered with, in token order.",
    syntax="ns",
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
)
def kv_prefix_blocks(context: Context, args: list[Arg]) -> Reply:
    table = _table(context, args[1])
    return UNKNOWN if table is None else table.encode()


@command(
    "KV.PREFIX.MEMBERSHIP",
    4,
    "Which of the given block hashes a namespace holds, as a bitmap.",
    syntax="ns count hashes",
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    tenant=True,
)
def kv_prefix_membership(context: Context, args: list[Arg]) -> Reply:
    where = "KV.PREFIX.MEMBERSHIP"
    table = _table(context, args[1])
    count = arguments.integer(args[2], f"{where}: hash_count", 0, _MAX_U32)
    probes = _hashes(args[3], count, f"{where}:")
    return UNKNOWN if table is None else table.membership(probes)
