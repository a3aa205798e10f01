"""What each of M new tokens sees of a prefix elsewhere and of the suffix at hand.

N prefix tokens, S suffix tokens of which the last M are the queries. A token sees itself and
at most ``window`` - 1 tokens before it. A ring of ``ring`` rows had, at its first query, that
many rows, and one more for each that follows: mlx-lm trims before it appends.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
