"""Writing a prefix to the store: rows, states, and the completion record last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from crc32c import crc32c

from pion_vllm_mlx.cache.boundary import schema
from pion_vllm_mlx.cache.completion import (
    COMPLETION_LAYER,
    CompletionRecord,
    Run,
    StateSum,
    TokenIds,
)
from pion_vllm_mlx.cache.lanes_codec import encode_rows, layout_of
from pion_vllm_mlx.cache.layers import StoredCache
from pion_vllm_mlx.cache.leaf import LeafRows, LeafSpec
from pion_vllm_mlx.cache.slots_state import encode_state
from pion_vllm_mlx.cache.store_client import Registration, StoreClient
from pion_vllm_mlx.errors import CommandError, PionError
from pion_vllm_mlx.formats import get_format

RUN_BYTES = 256 << 20
"""A longer run is cut: one bulk string has to stay under the server's limit."""


class OtherWriter(PionError):
    """Another process dropped what was being stored, to store under the same namespace."""

    def __init__(self, namespace: str) -> None:
        super().__init__(
            f"another process stores under the namespace {namespace!r} at the same time; a "
            "namespace holds one prefix: give each text its own"
        )


@dataclass(frozen=True)
class Prefix:
    """What is stored: the cache taken apart, its key, and the time the prefill took.

    ``leaves`` are those of the cache, in the formats in which they are stored.
    """

    namespace: str
    ids: TokenIds
    identity: dict[str, Any]
    stored: StoredCache
    leaves: list[LeafSpec]
    prefill_ms: float


def write_prefix(client: StoreClient, prefix: Prefix, *, drop_first: bool) -> int:
    """Stores a prefix; returns the bytes sent.

    Nothing of it is a hit before the last write. Raises OtherWriter, and what the client
    raises; what was written so far is then dropped, if the server still answers.
    """
    leaves = prefix.leaves
    if drop_first:
        client.drop(prefix.namespace)
    if leaves and leaves[0].token_major:
        client.create(prefix.namespace, {"k": schema(leaves, "k"), "v": schema(leaves, "v")})
    else:
        client.register(prefix.namespace, Registration.of(leaves, prefix.prefill_ms))
    try:
        return _write(client, prefix, leaves)
    except PionError as error:
        _drop_quietly(client, prefix.namespace)
        if isinstance(error, CommandError) and "session not found" in error.sentence:
            raise OtherWriter(prefix.namespace) from error
        raise


def _write(client: StoreClient, prefix: Prefix, leaves: list[LeafSpec]) -> int:
    namespace, stored = prefix.namespace, prefix.stored
    runs: list[Run] = []
    total = client.store_rows(namespace, _encoded(stored.rows, leaves, runs))
    states, blobs = [], []
    for slot, arrays in stored.states.items():
        blob = encode_state("ArraysCache", arrays)
        states.append(StateSum(slot, crc32c(blob), len(blob)))
        blobs.append((slot, blob, states[-1].crc))
    total += client.store_states(namespace, blobs)
    record = CompletionRecord(
        identity=prefix.identity,
        ids=prefix.ids,
        slots=stored.slots,
        leaves=[leaf.as_json() for leaf in leaves],
        runs=runs,
        states=states,
        prefill_ms=prefix.prefill_ms,
    ).encode()
    return total + client.store_states(namespace, [(COMPLETION_LAYER, record, crc32c(record))])


def _encoded(
    rows: list[LeafRows], leaves: list[LeafSpec], runs: list[Run]
) -> Iterator[tuple[Run, Any]]:
    """The runs and their bytes, encoded as they are sent; ``runs`` collects them."""
    for part in rows:
        leaf = leaves[part.layer]
        for piece in _pieces(part, leaf):
            blob = encode_rows(piece, leaf)
            layout = layout_of(leaf, piece.side)
            form = (leaf.format_of(piece.side), layout)
            run = Run(piece.layer, piece.side, piece.start, piece.count, *form, crc32c(blob))
            runs.append(run)
            yield run, blob


def _pieces(rows: LeafRows, leaf: LeafSpec) -> Iterator[LeafRows]:
    row_bytes = get_format(leaf.format_of(rows.side)).row_bytes(leaf.width(rows.side))
    step = max(1, RUN_BYTES // row_bytes)
    if rows.count <= step:
        yield rows
        return
    for first in range(0, rows.count, step):
        yield rows.part(first, step)


def _drop_quietly(client: StoreClient, namespace: str) -> None:
    try:
        client.drop(namespace)
    except PionError:
        return  # without a completion record it is invisible, and the next store drops it
