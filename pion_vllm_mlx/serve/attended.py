"""What the generator tells a cache whose prefixes are attended at the store, of each request."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pion_vllm_mlx.cache.leading_system import leading_system
from pion_vllm_mlx.serve.engine_mlx_lm_replies import Queue

server: Any = importlib.import_module("mlx_lm.server")


class Attending(Protocol):
    """Told of the request that is served now; on the generation thread."""

    refusal: str

    @property
    def active(self) -> bool:
        """Whether prefixes of the model that is served are attended at the store."""

    def begins(self, tokens: Sequence[int], anchor: int) -> None:
        """Its prompt, and where the system part of that ends; 0 where it has none."""

    def answers(self, context: Any) -> None:
        """mlx-lm's context of it, before its caches are fetched."""


_NAME = "pion_begins_with_system"


def mark(request: Any, args: Any) -> None:
    """Notes in the settings of a request whether it has a system part; mlx-lm hands them along."""
    chat = request.request_type == "chat"
    setattr(args, _NAME, chat and bool(request.tools or leading_system(request.messages)))


def has_system_part(args: Any) -> bool:
    """What was noted; where nothing was, it may have one."""
    return bool(vars(args).get(_NAME, True))


@dataclass(frozen=True)
class Told:
    """The queue of a request, whose context is told on its way to the client."""

    queue: Queue
    attending: Attending

    def put(self, item: Any) -> None:
        """As the queue's own."""
        if isinstance(item, server.GenerationContext):
            self.attending.answers(item)
        self.queue.put(item)
