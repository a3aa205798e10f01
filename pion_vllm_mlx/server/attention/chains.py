"""K/V of a layer from the rows of several namespaces, each of which continues the one before.

A segment of a lineage holds the rows of its own tokens; the ones before are its ancestors'. Of
each namespace of a chain the first ``rows`` count: the next one may begin anywhere within it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pion_vllm_mlx.kernels import api, paging
from pion_vllm_mlx.kernels.prefix import Prefix
from pion_vllm_mlx.server.attention import warming
from pion_vllm_mlx.server.attention.resident import Resident
from pion_vllm_mlx.server.attention.warming import LayerPair
from pion_vllm_mlx.server.store.index import LayerRows, Session


@dataclass(frozen=True)
class Link:
    """A namespace of a chain: its sessions, and how many of its rows count."""

    namespace: bytes
    sides: tuple[Session, Session]
    rows: int

    def pair(self, layer: int) -> LayerPair | None:
        """What it has of a layer at this moment, up to those rows; None for nothing."""
        keys, values = (side.layers.get(layer) for side in self.sides)
        if keys is None or values is None:
            return None
        return LayerPair(layer, _up_to(keys, self.rows), _up_to(values, self.rows))


def _up_to(rows: LayerRows, end: int) -> LayerRows:
    return LayerRows(rows.spec, min(rows.count, end), list(rows.covering(0, end)))


@dataclass(frozen=True)
class LayerChain:
    """One layer of a chain, as it was at one moment. ``pairs`` None: no row of that layer."""

    layer: int
    links: Sequence[Link]
    pairs: tuple[LayerPair | None, ...]

    @classmethod
    def of(cls, layer: int, links: Sequence[Link]) -> LayerChain:
        """A view that later stores do not change."""
        return cls(layer, links, tuple(link.pair(layer) for link in links))

    def is_current(self) -> bool:
        """Whether the layer still shows the same rows."""
        return LayerChain.of(self.layer, self.links).pairs == self.pairs

    @property
    def tokens(self) -> int:
        """Up to where its last namespace has rows, all before it counted whole."""
        before, last = sum(link.rows for link in self.links[:-1]), self.pairs[-1]
        return before + (0 if last is None else last.tokens)

    @property
    def there(self) -> list[LayerPair]:
        return [pair for pair in self.pairs if pair is not None]

    def fits(self, heads: int, dim: int) -> bool:
        """Whether rows of all of them are H x D values, for all that is known."""
        return all(pair.fits(heads, dim) for pair in self.there)

    @property
    def parts(self) -> list[LayerPair]:
        """Those whose rows reach up to the end without a gap, the first maybe not all of it."""
        found: list[LayerPair] = []
        for link, pair in zip(reversed(self.links), reversed(self.pairs), strict=True):
            if found and (pair is None or pair.tokens < link.rows):
                break
            if pair is None or pair.absent >= pair.tokens:
                break
            found.append(pair)
            if pair.absent:
                break
        return found[::-1]

    def kept_in(self, dtype: str, dim: int) -> str:
        """The type to read all of it in: as float32 where its rows are not of one kind."""
        kinds = {warming.kept_as(pair, dtype, dim) for pair in self.parts}
        return dtype if len(kinds) < 2 else "fp32"

    def kept_bytes(self, dtype: str, dim: int) -> int:
        """What ``read`` will take, about."""
        kept = self.kept_in(dtype, dim)
        return sum(pair.kept_bytes(kept, dim) for pair in self.parts)


def read(chain: LayerChain, heads: int, dim: int, dtype: str) -> Resident:
    """K/V of a layer as they stay, in one piece. Reads the disk; raises OSError."""
    kept = chain.kept_in(dtype, dim)
    found = [warming.read(pair, heads, dim, kept).prefix for pair in chain.parts]
    prefix = found[0] if len(found) == 1 else _joined(found)
    absent = chain.tokens - prefix.num_tokens
    # behind a gap, blocks do not stand at the places of others'
    return Resident(prefix, absent, b"" if absent else paging.first_block(prefix))


def _joined(parts: Sequence[Prefix]) -> Prefix:
    """Rows of one kind behind each other."""
    keys, values = (_behind([getattr(one, side) for one in parts]) for side in ("keys", "values"))
    return Prefix(keys, values, sum(one.num_tokens for one in parts))


def _behind(sides: Sequence[Any]) -> Any:
    if not isinstance(sides[0], api.Affine):
        return np.concatenate(sides, axis=1)
    arrays = zip(*((one.codes, one.scales, one.biases) for one in sides), strict=True)
    codes, scales, biases = (np.concatenate(array, axis=1) for array in arrays)
    return api.Affine(codes, scales, biases, sides[0].bits, sides[0].group)
