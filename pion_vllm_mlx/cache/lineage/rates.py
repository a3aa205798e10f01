"""How fast a model reads prompts on this machine, kept where its conversations are.

Without it nothing could be said of the time that a reuse saves after a restart, until a prompt
of many new tokens comes by. One field a machine: others may use the store, too.
"""

from __future__ import annotations

import hashlib
import math
import platform

import mlx.core as mx

from pion_vllm_mlx.cache.lineage.client import LineageClient, as_text
from pion_vllm_mlx.cache.lineage.index import Names


class Rates:
    """The prefill rates of one model. Raises StoreUnavailable, CommandError."""

    def __init__(self, client: LineageClient, names: Names) -> None:
        self._client = client
        self._names = names

    def load(self) -> float:
        """Tokens a second as they were measured on this machine; 0.0 where nobody did."""
        (found,) = self._client.demand(
            self._names.route, [("HGET", self._names.key("rates"), this_machine())]
        )
        try:
            rate = float(as_text(found))
        except ValueError:
            return 0.0
        return rate if rate > 0 and math.isfinite(rate) else 0.0

    def save(self, tokens_per_second: float) -> None:
        """Notes what was measured."""
        field = (this_machine(), f"{tokens_per_second:.3f}")
        self._client.demand(self._names.route, [("HSET", self._names.key("rates"), *field)])


def this_machine() -> str:
    """A name for this machine and what it computes on, which tells neither."""
    device = (str(mx.default_device()), str(mx.device_info().get("device_name")))
    parts = (platform.node(), platform.machine(), *device)
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()
