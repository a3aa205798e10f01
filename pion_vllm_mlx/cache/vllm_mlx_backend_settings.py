"""How the backend of vllm-mlx uses the store, and what may go wrong without ending a request."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier
from pion_vllm_mlx.config import ClientSwitches
from pion_vllm_mlx.errors import PionError

log = logging.getLogger(__name__)

#: what a fault of ours or of MLX can end in: on the generation thread it would end every request
UNEXPECTED = (
    PionError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)

T = TypeVar("T")


@dataclass(frozen=True)
class BackendSettings:
    """What every cache object of an installed backend shares.

    ``options`` None: no store, prefixes live in this process only.  ``keep_replies``: what was
    generated is kept as well, so that the next turn starts behind it.  Without ``keep_live``
    nothing is kept in this process, either.
    """

    options: LineageOptions | None = field(default_factory=LineageOptions)
    keep_replies: bool = True
    keep_live: bool = True

    @property
    def keeps_nothing(self) -> bool:
        """Whether nothing is ever reused."""
        return self.options is None and not self.keep_live

    def live_tier(self, config: Any, discard: Callable[[list[Any]], None]) -> UnwrittenTier:
        """What is kept in this process, within the budget of vllm-mlx's MemoryCacheConfig."""
        options = self.options
        parts = options is None or (
            options.checkpoints and ClientSwitches.from_environment().lineage
        )
        return UnwrittenTier(
            int(config.compute_memory_limit()) if self.keep_live else 0,
            int(config.max_entries),
            discard=discard,
            whole_only=not parts,
            aside_bytes=options.queue_bytes if options is not None else 0,
        )


def guarded(call: Callable[[], T], otherwise: T) -> T:
    """What ``call`` gives; ``otherwise``, and logged, where it fails by a fault of that kind."""
    try:
        return call()
    except UNEXPECTED:
        log.exception("a prefix could not be kept")
        return otherwise
