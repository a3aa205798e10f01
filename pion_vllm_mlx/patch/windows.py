"""What each of M new tokens sees of a prefix elsewhere and of the suffix at hand.

N prefix tokens, S suffix tokens of which the last M are the queries. A token sees itself and
at most ``window`` - 1 tokens before it. A ring of ``ring`` rows had, at its first query, that
many rows, and one more for each that follows: mlx-lm trims before it appends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache
from numpy.typing import NDArray

from pion_vllm_mlx.cache.attend_request import whole_number
from pion_vllm_mlx.errors import PionMlxCompatError


class Causal(str):
    """The mask ``"causal"``, with the window of a layer whose prefix is elsewhere."""

    window: int | None

    def __new__(cls, window: int | None = None) -> Causal:
        made = super().__new__(cls, "causal")
        made.window = window
        return made


@dataclass(frozen=True)
class Seen:
    """What M queries see: of the prefix its last ``prefix[m]`` tokens, of the suffix ``mask``."""

    prefix: NDArray[np.int64]
    mask: NDArray[np.bool_] | None
    num_tokens: int

    @property
    def everything(self) -> bool:
        """Whether each sees the whole prefix, and the suffix causally."""
        return self.mask is None and bool((self.prefix == self.num_tokens).all())

    def run(self) -> int:
        """How many queries, from the first on, see the whole prefix."""
        return int((self.prefix == self.num_tokens).sum())


@dataclass(frozen=True)
class Limits:
    """The window that a mask names, and the rows of a layer's ring; None for none."""

    window: int | None = None
    ring: int | None = None


def seen(limits: Limits, num_tokens: int, num_suffix: int, num_queries: int) -> Seen:
    """What the queries see within ``limits``."""
    if limits.window is None and limits.ring is None:
        return Seen(np.full(num_queries, num_tokens), None, num_tokens)
    most = np.full(num_queries, num_tokens + num_suffix)
    if limits.window is not None:
        most = np.minimum(most, limits.window)
    if limits.ring is not None:
        most = np.minimum(most, limits.ring + np.arange(num_queries))
    at = np.arange(num_suffix - num_queries, num_suffix)
    prefix = np.clip(most - (at + 1), 0, num_tokens)
    if (most > at).all():
        return Seen(prefix, None, num_tokens)
    tokens = np.arange(num_suffix)
    mask = (tokens <= at[:, None]) & (tokens > (at - most)[:, None])
    return Seen(prefix, mask, num_tokens)


def checked_window(asked: int | None) -> int | None:
    """The rows of a window; None for the whole prefix, which 0 means, too.

    Raises TypeError for what is no whole number, ValueError for a negative one.
    """
    window = 0 if asked is None else whole_number(asked, "fa_window")
    if window < 0:
        raise ValueError(f"fa_window is 1 or more, or 0 for the whole prefix, not {window}")
    return window or None


def windowed(own: Any, window: int | None) -> Any:
    """A cache of mlx-lm's own that keeps the last ``window`` rows of ``own``, in a ring.

    ``own`` itself without a window, or where it has one that is no longer. Raises
    PionMlxCompatError for a cache that no such ring can be made of.
    """
    if window is None:
        return own
    kind = type(own)
    if kind is RotatingKVCache and not own.keep:
        if own.max_size <= window:
            return own
        rows = [own._temporal_order(side) for side in (own.keys, own.values)]
    elif kind is KVCache:
        rows = [side[..., : own.offset, :] for side in (own.keys, own.values)]
    else:
        raise PionMlxCompatError(f"fa_window={window} over a {kind.__name__}")
    make: Any = RotatingKVCache
    ring = make(max_size=window)
    ring.keys, ring.values = (side[..., -window:, :] for side in rows)
    ring.offset, ring._idx = own.offset, ring.keys.shape[2]
    return ring
