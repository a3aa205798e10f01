"""Hashes of blocks of 64 tokens, each over the one before it: addresses, never proofs."""

from __future__ import annotations

import hashlib

import numpy as np

from pion_vllm_mlx.cache.common_prefix import common_bytes
from pion_vllm_mlx.cache.completion import TokenIds

BLOCK_TOKENS = 64
DIGEST_BYTES = 12
FIRST_TOKENS = 16
"""A root is also found by its first tokens: prompts shorter than a block have no hash."""
TOKEN_BYTES = 4
_FIRST_COMPARED = 64
"""Tokens that are compared first: prompts part early, or late."""


def block_digests(tokens: TokenIds) -> list[bytes]:
    """The chained digest of every whole block of a prompt."""
    raw = np.ascontiguousarray(tokens, "<u4").tobytes()
    step = BLOCK_TOKENS * 4
    digest, found = b"", []
    for at in range(0, len(raw) - step + 1, step):
        digest = hashlib.blake2b(digest + raw[at : at + step], digest_size=DIGEST_BYTES).digest()
        found.append(digest)
    return found


def root_field(tokens: TokenIds, count: int = FIRST_TOKENS) -> str | None:
    """The address of the root that begins with the first ``count`` tokens; None for fewer."""
    if tokens.size < count:
        return None
    raw = np.ascontiguousarray(tokens[:count], "<u4").tobytes()
    return hashlib.blake2b(raw, digest_size=DIGEST_BYTES).hexdigest()


def own_blocks(tokens: TokenIds, base: int, end: int) -> list[tuple[str, int]]:
    """``(digest, end)`` of the blocks that end in ``(base, end]``: a segment's own ones."""
    ends = range(BLOCK_TOKENS, end + 1, BLOCK_TOKENS)
    digests = block_digests(tokens[:end])
    return [(digest.hex(), at) for digest, at in zip(digests, ends, strict=True) if at > base]


def common_tokens(left: TokenIds, right: TokenIds) -> int:
    """How many tokens two runs have in common from their start."""
    count = min(left.size, right.size)
    if left[:_FIRST_COMPARED].tobytes() != right[:_FIRST_COMPARED].tobytes():
        count = min(count, _FIRST_COMPARED)
    return common_bytes(left[:count].tobytes(), right[:count].tobytes()) // TOKEN_BYTES
