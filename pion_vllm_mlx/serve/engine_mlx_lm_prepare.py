"""A request before it reaches the generation thread, and the end of one behind it.

Rendering a chat, finding its anchor, asking the store and reading what it has may take long.
The thread of the request's HTTP connection sees to it, so that the generation thread, which
decodes for others meanwhile, finds it done.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from pion_vllm_mlx.serve.engine_mlx_lm_replies import Queue
from pion_vllm_mlx.serve.lineage_cache_plan import Plan

REFUSALS = (TemplateError, ValueError, TypeError, LookupError, AttributeError, RuntimeError)
"""What mlx-lm and chat templates end in when a request is not to their liking."""

IMAGES = "images are not stored"
"""Why a chat with images is not found again after a restart."""

_NAME = "pion_prepared"


@dataclass(frozen=True)
class Prepared:
    """What was made of a request by ``tokenizer``; ``plan`` None: it is not to be stored.

    ``tokenized`` is what mlx-lm's own ``_tokenize`` gives.
    """

    tokenizer: Any
    tokenized: Sequence[Any]
    plan: Plan | None = None
    anchor: int | None = None

    def fasten(self, request: Any) -> None:
        """Sends it along with a request."""
        setattr(request, _NAME, self)


def taken_from(request: Any, tokenizer: Any) -> Prepared | None:
    """What was sent along with a request, once; None if it was made by another tokenizer."""
    prepared = vars(request).pop(_NAME, None)
    if isinstance(prepared, Prepared) and prepared.tokenizer is tokenizer:
        return prepared
    return None


class Unstored(list[int]):
    """The tokens of a prompt that bypasses the store, and why it does."""

    def __init__(self, tokens: Sequence[int], why: str) -> None:
        super().__init__(tokens)
        self.why = why

    def receipt(self, reused: int) -> dict[str, Any]:
        """As that of a plan; memory gave ``reused`` tokens."""
        return {
            "prompt_tokens": len(self),
            "reused_tokens": reused,
            "computed_tokens": len(self) - reused,
            "tier": "memory" if reused else "none",
            "restore_ms": 0.0,
            "saved_ms": None,  # what the images take is not measured
            "resumed_tokens": 0,
            "why": self.why,
        }


def has_images(request: Any) -> bool:
    """Whether a chat has parts that are no text."""
    return any(
        isinstance(part, dict) and part.get("type") != "text"
        for message in request.messages or ()
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


class Ends:
    """Tells clients the end of their reply after its caches were kept, not before.

    mlx-lm tells it first; a client's next turn could then be looked up too early, and would
    not find what this one has computed.
    """

    def __init__(self, stepped: Callable[[], None]) -> None:
        """``stepped`` is called before clients are told anything: a step is behind us."""
        self._held: list[Queue] = []
        self._stepped = stepped

    def behind(self, queue: Queue) -> HeldBack:
        """What stands for a request's queue."""
        return HeldBack(queue, self._held, self._stepped)

    def tell(self) -> None:
        """Tells the ends that are held back."""
        self.taken()()

    def taken(self) -> Callable[[], None]:
        """What tells the ends that are held back now; nothing else does from now on."""
        queues = self._held[:]
        self._held.clear()

        def tell() -> None:
            for queue in queues:
                queue.put(None)

        return tell


@dataclass(frozen=True)
class HeldBack:
    """A queue whose last item, None, is held back."""

    queue: Queue
    held: list[Queue]
    stepped: Callable[[], None]

    def put(self, item: Any) -> None:
        """As the queue's own."""
        self.stepped()
        if item is None:
            self.held.append(self.queue)
        else:
            self.queue.put(item)


def settle_garbage() -> None:
    """Takes all that lives now out of the collector's rounds: a model, a tokenizer, modules.

    A full round over them takes tens of milliseconds, between two tokens.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
