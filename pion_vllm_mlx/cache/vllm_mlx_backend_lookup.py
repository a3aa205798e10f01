"""What became of one prompt that vllm-mlx's scheduler asked for, and of all of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage import Match, Restored
from pion_vllm_mlx.cache.lineage.missed import Missed, why_not_more


@dataclass
class Lookup:
    """What a fetch found: for cuts, the log line and the receipt.

    ``tier``: ``memory``, the store's lane, or ``none``.  ``why`` says why it was not more.
    ``near`` is what memory had like the prompt: how many tokens agree, and its tokens.
    ``asked``: the store was asked, or not wanted since memory had ``held`` tokens; ``restored``
    is what was read of it, until it is used. ``min_gain``: the store is not wanted for fewer
    tokens.
    """

    ids: TokenIds
    reused_tokens: int = 0
    tier: str = "none"
    why: str = ""
    near: tuple[int, Any] = field(default=(0, ()), repr=False)
    restore_ms: float = 0.0
    match: Match | None = None
    asked: bool = False
    held: int = 0
    min_gain: int = 0
    restored: Restored | None = field(default=None, repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.ids.size)

    @property
    def common(self) -> int:
        """As many tokens agree with something that is kept, usable or not."""
        return max(self.near[0], self.match.common if self.match is not None else 0)

    def missed(self) -> Missed:
        """What is to be remembered of a prompt that was not wholly reused."""
        nearest = self.match.nearest if self.match is not None else None
        return Missed(self.ids, self.reused_tokens, self.why, self.near, nearest)

    def say_why(self) -> None:
        """Says why it was not more, where that is not said yet and something is missing."""
        if self.why or self.prompt_tokens - self.reused_tokens < 2:
            return
        reused, match = self.reused_tokens, self.match
        left = self.prompt_tokens - 1 - reused
        if match is None and not self.common and 0 < left < self.min_gain:
            self.why = f"{left} tokens could be reused, and --pion-min-gain is {self.min_gain}"
            return
        stored = (match.common, match.why) if match is not None else (0, "")
        unasked = left if match is None and left < self.min_gain else 0
        self.why = why_not_more(reused, self.common, *stored, unasked)


class LookedUp:
    """Prompts that were looked up before the scheduler asks for them. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[bytes, list[Lookup]] = {}

    def add(self, lookup: Lookup) -> None:
        """Has ``take`` give it, once."""
        with self._lock:
            self._waiting.setdefault(lookup.ids.tobytes(), []).append(lookup)

    def take(self, ids: TokenIds) -> Lookup | None:
        """One of these very tokens; nobody else gets it."""
        with self._lock:
            if not self._waiting:
                return None
            key = ids.tobytes()
            found = self._waiting.pop(key, [])
            lookup = found.pop(0) if found else None
            if found:
                self._waiting[key] = found
            return lookup

    def forget(self, lookup: Lookup) -> None:
        """Gives it up, unless it was taken."""
        with self._lock:
            key = lookup.ids.tobytes()
            others = [one for one in self._waiting.pop(key, []) if one is not lookup]
            if others:
                self._waiting[key] = others

    def __len__(self) -> int:
        return len(self._waiting)


@dataclass(frozen=True)
class Miss:
    """The last prompt that was not wholly reused, and the engine it was asked of."""

    core: Any
    missed: Missed
    at: float = field(default_factory=time.monotonic)


@dataclass
class Counters:
    """Numbers of one cache object; written by one thread, read by any.

    Of all requests: ``tokens_prompt`` tokens of prompts, of which ``tokens_reused`` were not
    computed, and ``hits`` by where they were found. ``kept_live`` and ``refused_live`` are
    prefixes, ``replies_kept`` of those the ends of replies: a next turn reuses what was
    generated, too. The store has counters of its own.
    """

    requests: int = 0
    tokens_prompt: int = 0
    tokens_reused: int = 0
    hits: Counter[str] = field(default_factory=Counter)
    kept_live: int = 0
    replies_kept: int = 0
    refused_live: int = 0

    def count(self, lookup: Lookup, prompt_tokens: int) -> None:
        """One request."""
        self.requests += 1
        self.tokens_prompt += prompt_tokens
        self.tokens_reused += lookup.reused_tokens
        self.hits[lookup.tier if lookup.reused_tokens else "none"] += 1

    def as_dict(self) -> dict[str, Any]:
        """Those that every engine has; what this one alone has is under ``vllm_mlx``."""
        own = ("kept_live", "replies_kept", "refused_live")
        return {
            "requests": self.requests,
            "tokens_prompt": self.tokens_prompt,
            "tokens_reused": self.tokens_reused,
            **{f"hits_{tier}": count for tier, count in sorted(self.hits.items())},
            "vllm_mlx": {name: vars(self)[name] for name in own},
        }
