"""LineageStore: conversations of one model that survive their process.

One request of an engine, all calls on the thread that owns MLX:

1. ``match(tokens)``: what is stored of the prompt; loads nothing.
2. ``restore(match)``: a cache of ``match.length`` tokens, or None.
3. ``cuts(tokens, match, anchor)``: where to hand the cache over while prefilling the rest.
4. ``keep(tokens, caches, kind)`` at each cut, at the end of the prompt, after the reply.

The store never fails a request: whatever goes wrong is counted, named in ``stats``, and
behaves like an empty store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pion_vllm_mlx.cache.lineage.types import (
    Conversation,
    Cut,
    Explanation,
    KeepKind,
    LineageOptions,
    Match,
    Restored,
)

__all__ = ["LineageStore", "anchor_length"]

Tokens = Sequence[int] | Any


def anchor_length(rendered: Sequence[int], prompt: Sequence[int]) -> int:
    """Where the anchor of a prompt lies: the common prefix with ``rendered``, less 2 tokens.

    ``rendered`` are the leading system messages and tools through the chat template, without
    a generation prompt. 0 where there is none.
    """
    raise NotImplementedError


class LineageStore:
    """See the module's docstring. A store of a model that cannot be stored bypasses."""

    def __init__(
        self, model: Any, options: LineageOptions | None = None, *, draft_model: Any = None
    ) -> None:
        """Reads the weights for the key (about a second for 2 GB); connects to nothing yet.

        A draft model's caches are further slots behind those of the model, as mlx-lm has them.
        Raises ConfigError for a setting that does not exist. A cache class that cannot be
        stored is named in ``bypass``, logged once, and every call is then empty.
        """
        raise NotImplementedError

    @property
    def bypass(self) -> str | None:
        """Why this store keeps nothing, None when it does."""
        raise NotImplementedError

    @property
    def wants_cuts(self) -> bool:
        """Whether the model's caches have restore points only where they were kept."""
        raise NotImplementedError

    def match(self, tokens: Tokens) -> Match:
        """The longest stored prefix of ``tokens``. Loads nothing; never raises.

        ``length`` is at most ``len(tokens) - 1``, and 0 for less than ``min_gain``.
        Token ids outside of 0 … 2**32-1 (images) make an empty match that says so.
        """
        raise NotImplementedError

    def restore(self, match: Match) -> Restored | None:
        """Caches of ``match.length`` tokens, evaluated; None where they are not to be had.

        May hold fewer tokens than the match said, if an extension of it was interrupted: use
        ``length``. The caches are the caller's own: generating changes nothing that is stored.
        """
        raise NotImplementedError

    def cuts(self, tokens: Tokens, match: Match, anchor: int | None = None) -> list[Cut]:
        """Where to hand over the cache while prefilling from ``match.length`` on, in order.

        Positions lie between ``match.length`` and ``len(tokens)``. None for a model whose
        rows can be cut anywhere.
        """
        raise NotImplementedError

    def keep(self, tokens: Tokens, caches: Sequence[Any], kind: KeepKind = "final") -> bool:
        """Has ``caches``, which hold exactly ``tokens``, stored; returns at once.

        Copies what is new on this thread's stream and hands it to a background thread. False,
        and counted, where it was not taken: nothing new, the queue is full, a cache that does
        not fit. Never raises for a reason of the store.
        """
        raise NotImplementedError

    def save_journal(
        self, key: str, tokens: Tokens, generated: Sequence[int], caches: Sequence[Any]
    ) -> None:
        """Notes what was generated so far; ``caches`` hold prompt + generated[:-1].

        Rows first, then the ids. For every 16th token; nothing without ``resume``.
        """
        raise NotImplementedError

    def load_journal(self, key: str) -> list[int] | None:
        """The token ids that a killed process had generated for a request, or None."""
        raise NotImplementedError

    def drop_journal(self, key: str) -> None:
        """Forgets a journal; to be called before the end of a reply is sent."""
        raise NotImplementedError

    def explain(self, tokens: Tokens) -> Explanation:
        """Why ``tokens`` are not a longer hit: nearest prefix, first difference, key field."""
        raise NotImplementedError

    def conversations(self) -> list[Conversation]:
        """The leaves of this model's lineages, the latest used first.

        Raises StoreUnavailable, as ``pin``, ``drop`` and ``branch`` do.
        """
        raise NotImplementedError

    def tokens_of(self, conversation: str) -> list[int]:
        """All token ids of a conversation, from its root on. Raises KeyError."""
        raise NotImplementedError

    def pin(self, conversation: str, pinned: bool = True) -> None:
        """Keeps a conversation, and all it stands on, from being evicted. Raises KeyError."""
        raise NotImplementedError

    def drop(self, conversation: str) -> int:
        """Deletes a conversation and what only it stands on; how many segments. KeyError."""
        raise NotImplementedError

    def branch(self, conversation: str, length: int) -> str:
        """A conversation of its own for the first ``length`` tokens; its id. KeyError."""
        raise NotImplementedError

    def flush(self, timeout: float = 10.0) -> bool:
        """Waits until all that was kept so far is written; False when time is over."""
        raise NotImplementedError

    def stats(self) -> dict[str, Any]:
        """Counters, bytes, reasons, as plain values. Any thread; asks nobody."""
        raise NotImplementedError

    def close(self, timeout: float = 10.0) -> None:
        """Writes what waits, stops the background thread, closes the connections."""
        raise NotImplementedError
