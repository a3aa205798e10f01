"""What one HTTP request asked of vllm-mlx's engine, what of it was reused, and why not more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pion_vllm_mlx.cache.lineage.tokens import NO_TOKENS
from pion_vllm_mlx.cache.vllm_mlx_backend_cache import PionPrefixCache
from pion_vllm_mlx.cache.vllm_mlx_backend_lookup import Lookup
from pion_vllm_mlx.cache.vllm_mlx_backend_prefill import lookup_of


class Told(Protocol):
    """What is told of one request of the engine."""

    @property
    def known(self) -> bool:
        """Whether it is known what of it was reused."""

    @property
    def begun(self) -> bool:
        """Whether the length of its prompt is known."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""

    @property
    def cached(self) -> int:
        """Tokens of it that were not computed."""

    @property
    def lookup(self) -> Lookup:
        """What was found for it."""

    @property
    def rate(self) -> float:
        """Tokens of prompts that are computed in a second; 0 where that is not known."""


@dataclass
class Asked:
    """One request of the engine, and the cache that served it."""

    request: Any
    cache: PionPrefixCache
    known = begun = True

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.num_prompt_tokens)

    @property
    def cached(self) -> int:
        """Tokens of it that were not computed; 0 too where a restored cache was refused."""
        return int(self.request.cached_tokens)

    @property
    def lookup(self) -> Lookup:
        """What the fetch for it found."""
        return lookup_of(self.request)

    @property
    def rate(self) -> float:
        """Of the engine that has the cache."""
        return self.cache.prefill_tokens_per_second


@dataclass
class Unstored:
    """A request of an image model that bypasses the store, and why it does.

    Of those about images vllm-mlx keeps nothing, either. What it reuses of others it tells
    nobody: these are not ``known``.
    """

    request: Any
    why: str
    known: bool = True
    cached = 0
    rate = 0.0

    @property
    def begun(self) -> bool:
        """What images become in tokens is known once they were computed."""
        return bool(self.request.num_output_tokens)

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, those of its images among them."""
        return int(self.request.num_prompt_tokens)

    @property
    def lookup(self) -> Lookup:
        """Nothing was asked for."""
        return Lookup(NO_TOKENS, why=self.why)


@dataclass(frozen=True)
class Tally:
    """Tokens asked and reused over the engine's requests of one HTTP request."""

    prompt: int
    cached: int
    lookups: tuple[Lookup, ...] = ()
    tokens_per_second: float = 0.0
    tiers: tuple[str, ...] = field(default=())
    begun: bool = True
    known: bool = True

    @classmethod
    def of(cls, asked: Sequence[Told]) -> Tally:
        """Add up."""
        lookups = tuple(one.lookup for one in asked)
        return cls(
            sum(one.prompt for one in asked),
            sum(one.cached for one in asked),
            lookups,
            max(one.rate for one in asked),
            tuple(sorted({found.tier for found in lookups if found.reused_tokens})),
            all(one.begun for one in asked),
            all(one.known for one in asked),
        )

    def prompt_usage(self) -> dict[str, int]:
        """What usage says of the prompt, as far as that is known."""
        return {"prompt_tokens": self.prompt, "cached_tokens": self.cached}

    def receipt(self) -> dict[str, Any]:
        """What was reused, from where, and the time that spared on this machine.

        Null where that is not known.
        """
        receipt = self._receipt()
        if not self.known:
            receipt |= dict.fromkeys(("reused_tokens", "computed_tokens", "tier", "saved_ms"))
        return receipt

    def _receipt(self) -> dict[str, Any]:
        restore_ms = sum(found.restore_ms for found in self.lookups)
        rate = self.tokens_per_second
        saved = round(self.cached / rate * 1000 - restore_ms, 3) + 0.0 if rate else None  # no -0.0
        return {
            "prompt_tokens": self.prompt,
            "reused_tokens": self.cached,
            "computed_tokens": self.prompt - self.cached,
            "tier": "+".join(self.tiers) if self.cached else "none",
            "restore_ms": round(restore_ms, 3),
            "saved_ms": saved,
            "why": next((found.why for found in self.lookups if found.why), ""),
        }


def complete_usage(usage: Any, tally: Tally) -> bool:
    """Complete one ``usage`` object in the terms of its API; whether it was one.

    One of which nothing is known stays as it is.
    """
    if not isinstance(usage, dict):
        return False
    if not tally.known:
        return "prompt_tokens" in usage or "output_tokens" in usage
    if "prompt_tokens" in usage:
        details = usage.get("prompt_tokens_details") or {}
        usage["prompt_tokens_details"] = {**details, "cached_tokens": tally.cached}
    elif "input_tokens_details" in usage:
        details = usage["input_tokens_details"] or {}
        usage["input_tokens_details"] = {**details, "cached_tokens": tally.cached}
    elif "output_tokens" in usage:
        usage["input_tokens"] = tally.prompt - tally.cached
        usage["cache_read_input_tokens"] = tally.cached
    else:
        return False
    return True
