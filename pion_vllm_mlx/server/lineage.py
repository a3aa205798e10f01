"""Finding the longest stored prefix of a prompt in a lineage index.

A lineage is a tree of segments, each the tokens of one run of positions on top of its
parent. The index is kept in plain keys, of which this module only reads:

=====================  ==========================================================
key                    content
=====================  ==========================================================
``pps:<mid>:blk``      hash: chained block hash (24 hex) → ``<segment>:<end>``
``pps:<mid>:seg:<n>``  hash: ``parent`` (−1: none), ``base``, ``len``, ``toks``
=====================  ==========================================================

The rows of segment ``n`` are those of namespace ``pps<mid>s<n>``. With --ns-prefix, both
names begin with that prefix.

A block is 64 tokens; its hash covers the hash of the block before it. Hashes only
address: every token from the root on is compared before anything is a match.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 64
TOKEN_BYTES = 4
DIGEST_BYTES = 12
#: how many distinct segments a lookup tries before it is a miss.
MAX_TRIES = 4
#: a chain of more parents than this is taken for a broken one.
MAX_DEPTH = 4096
_MAX_DIGITS = 20

Fields = Mapping[bytes, bytes]
_INDEX, _ROWS = b"pps:", b"pps"


def rows_of(index: bytes, ns_prefix: bytes) -> bytes | None:
    """What the namespaces of an index begin with, before ``s<n>``; None for a name of no index."""
    for head in (b"", ns_prefix):
        if index.startswith(head + _INDEX) and len(index) > len(head + _INDEX):
            return head + _ROWS + index[len(head + _INDEX) :]
    return None


def lineage_of(namespace: bytes, ns_prefix: bytes) -> bytes | None:
    """What all namespaces of this one's lineage begin with; None outside of any lineage."""
    if not namespace.startswith((_ROWS, ns_prefix + _ROWS)):
        return None
    whole = namespace.rstrip(b"0123456789")
    return whole[:-1] if whole != namespace and whole.endswith(b"s") else None


@dataclass(frozen=True)
class Segment:
    """Tokens ``[base, base + len)`` of a lineage, u32 little endian, on top of ``parent``."""

    number: int
    parent: int
    base: int
    tokens: bytes

    @property
    def end(self) -> int:
        return self.base + len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True)
class Match:
    """``length`` tokens of the prompt are stored; the last of them in segment ``leaf``."""

    length: int
    leaf: int
    base: int


@dataclass(frozen=True)
class Index:
    """One lineage index, ``pps:<mid>``.

    ``hash_of`` reads the fields of a key, none when it is not there; ``holds`` says whether
    the rows of segment ``n`` up to its local row ``rows`` can be served.
    """

    name: bytes
    hash_of: Callable[[bytes], Fields]
    holds: Callable[[int, int], bool]

    def longest(self, prompt: bytes) -> Match | None:
        """The longest match of a prompt (u32 token ids, little endian)."""
        blocks = self.hash_of(self.name + b":blk")
        for number in islice(self._candidates(blocks, prompt), MAX_TRIES):
            match = self._match(number, prompt)
            if match is not None:
                return match
        return None

    def _candidates(self, blocks: Fields, prompt: bytes) -> Iterator[int]:
        """Segments that hold a block of the prompt, each once, the latest block first."""
        seen: set[int] = set()
        if not blocks:
            return
        for digest in reversed(list(block_hashes(prompt))):
            segment, colon, _ = blocks.get(digest, b"").partition(b":")
            number = number_of(segment)
            if colon and number is not None and number not in seen:
                seen.add(number)
                yield number

    def _segment(self, number: int) -> Segment | None:
        """A segment whose fields make sense."""
        fields = self.hash_of(b"%s:seg:%d" % (self.name, number))
        tokens = fields.get(b"toks", b"")
        parent = fields.get(b"parent", b"")
        base, length = number_of(fields.get(b"base")), number_of(fields.get(b"len"))
        above = -1 if parent == b"-1" else number_of(parent)
        if above is None or base is None or length is None or len(tokens) < length * TOKEN_BYTES:
            return None
        if (above < 0) != (base == 0):
            return None
        return Segment(number, above, base, tokens[: length * TOKEN_BYTES])

    def _chain(self, number: int) -> list[Segment] | None:
        """The segments from ``number`` up to its root; None where a link is broken."""
        chain: list[Segment] = []
        while number >= 0:
            segment = self._segment(number)
            if segment is None or len(chain) >= MAX_DEPTH:
                return None
            if chain and not segment.base < chain[-1].base <= segment.end:
                return None
            chain.append(segment)
            number = segment.parent
        return chain

    def _match(self, number: int, prompt: bytes) -> Match | None:
        """How far the chain that ends in a segment agrees with the prompt."""
        chain = self._chain(number)
        if chain is None:
            return None
        leaf = chain[0]
        for child, parent in zip(chain, chain[1:], strict=False):
            rows = child.base - parent.base
            begin = parent.base * TOKEN_BYTES
            inherited = parent.tokens[: rows * TOKEN_BYTES]
            if prompt[begin : begin + len(inherited)] != inherited:
                return None
            if not self.holds(parent.number, rows):
                return None
        rows = common_tokens(leaf.tokens, prompt[leaf.base * TOKEN_BYTES :])
        if not rows or not self.holds(number, rows):
            return None
        return Match(leaf.base + rows, number, leaf.base)


def block_hashes(prompt: bytes) -> Iterator[bytes]:
    """The chained hash of every whole block of a prompt, as 24 hex digits."""
    digest, step = b"", BLOCK_TOKENS * TOKEN_BYTES
    for at in range(0, len(prompt) - step + 1, step):
        block = prompt[at : at + step]
        digest = hashlib.blake2b(digest + block, digest_size=DIGEST_BYTES).digest()
        yield digest.hex().encode()


def common_tokens(left: bytes, right: bytes) -> int:
    """How many tokens two runs have in common from their start."""
    count = min(len(left), len(right)) // TOKEN_BYTES
    a: NDArray[np.uint32] = np.frombuffer(left, "<u4", count)
    b: NDArray[np.uint32] = np.frombuffer(right, "<u4", count)
    different = np.flatnonzero(a != b)
    return int(different[0]) if len(different) else count


def number_of(text: bytes | None) -> int | None:
    """Decimal digits as a number; None for anything else."""
    if not text or len(text) > _MAX_DIGITS or not text.isdigit() or not text.isascii():
        return None
    return int(text)
