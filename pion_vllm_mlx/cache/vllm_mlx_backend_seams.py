"""What of vllm-mlx is replaced, and the check that it is what we know.

A seam is an attribute of a module or class that is replaced while the backend is installed.
Before anything is replaced every seam is looked at: a missing name, or a function whose
parameters differ from those of the version known here, is refused by name, saying what
differs.  ``Replacements.undo`` puts the very objects back.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pion_vllm_mlx.errors import PionMlxCompatError

KNOWN_VERSION = "0.6.0"


@dataclass(frozen=True)
class Seam:
    """``module:owner.name`` and the parameters it must have; None: any object."""

    module: str
    path: str
    parameters: tuple[str, ...] | None = None

    @property
    def label(self) -> str:
        """The name in errors."""
        return f"{self.module}.{self.path}"

    def owner(self) -> Any:
        """The module or class that holds the attribute.  Raises AttributeError."""
        owner: Any = importlib.import_module(self.module)
        for name in self.path.split(".")[:-1]:
            owner = getattr(owner, name)
        return owner

    @property
    def name(self) -> str:
        """The attribute's own name."""
        return self.path.rpartition(".")[2]

    def difference(self) -> str | None:
        """What differs from the seam known here, or None."""
        try:
            found = getattr(self.owner(), self.name)
        except (ImportError, AttributeError) as error:
            return f"is missing ({error})"
        if self.parameters is None:
            return None
        parameters = tuple(inspect.signature(found).parameters)
        if parameters != self.parameters:
            known, new = ", ".join(self.parameters), ", ".join(parameters)
            return f"takes ({new}), not ({known})"
        return None


PREFIX_CACHE = Seam("vllm_mlx.scheduler", "MemoryAwarePrefixCache", ("model", "config"))
MLLM_PREFIX_CACHE = Seam(
    "vllm_mlx.mllm_batch_generator", "MemoryAwarePrefixCache", ("model", "config")
)
CREATE_GENERATOR = Seam(
    "vllm_mlx.scheduler", "Scheduler._create_batch_generator", ("self", "sampling_params")
)
SCHEDULE_WAITING = Seam("vllm_mlx.scheduler", "Scheduler._schedule_waiting", ("self",))
ADD_TO_SCHEDULER = Seam("vllm_mlx.scheduler", "Scheduler.add_request", ("self", "request"))
STORE_PROMPT = Seam(
    "vllm_mlx.scheduler",
    "Scheduler._store_prompt_only_cache",
    ("self", "request", "response"),
)
STEP = Seam("vllm_mlx.scheduler", "Scheduler.step", ("self", "max_retries"))
START_ENGINE = Seam("vllm_mlx.engine_core", "EngineCore.start", ("self",))
ADD_TO_ENGINE = Seam(
    "vllm_mlx.engine_core",
    "EngineCore.add_request",
    (
        "self",
        "prompt",
        "sampling_params",
        "request_id",
        "images",
        "videos",
        "prefix_boundary",
    ),
)
ADD_TO_MLLM = Seam(
    "vllm_mlx.mllm_scheduler",
    "MLLMScheduler.add_request_async",
    (
        "self",
        "prompt",
        "images",
        "videos",
        "audio",
        "max_tokens",
        "temperature",
        "top_p",
        "kwargs",
    ),
)
CHAT_TEMPLATE = Seam(
    "vllm_mlx.engine.batched",
    "BatchedEngine._apply_chat_template",
    (
        "self",
        "messages",
        "tools",
        "num_images",
        "num_audios",
        "chat_template_kwargs",
        "enable_thinking",
    ),
)
#: read or called as they are; they must be what they were
CONSULTED = (
    Seam("mlx_lm.generate", "BatchGenerator.next", ("self",)),
    Seam("mlx_lm.generate", "BatchGenerator.extract_cache", ("self", "uids")),
    Seam("mlx_lm.generate", "BatchGenerator._make_batch", ("self", "n")),
    Seam("mlx_lm.generate", "GenerationBatch.empty", ("model", "fallback_sampler")),
    Seam(
        "mlx_lm.generate",
        "PromptProcessingBatch.Response",
        ("uid", "progress", "end_of_segment", "end_of_prompt"),
    ),
    Seam(
        "mlx_lm.generate",
        "GenerationBatch.Response",
        (
            "uid",
            "token",
            "logprobs",
            "finish_reason",
            "current_state",
            "match_sequence",
            "prompt_cache",
            "all_tokens",
        ),
    ),
    Seam("vllm_mlx.server", "app"),
    Seam(
        "vllm_mlx.constrained.thinking_processor",
        "ThinkingAwareLogitsProcessor._sync_to_tokens",
        ("self", "tokens"),
    ),
)
REPLACED = (
    PREFIX_CACHE,
    CREATE_GENERATOR,
    SCHEDULE_WAITING,
    ADD_TO_SCHEDULER,
    STORE_PROMPT,
    STEP,
    START_ENGINE,
    ADD_TO_ENGINE,
    CHAT_TEMPLATE,
)


def has_mllm() -> bool:
    """Whether vllm-mlx can serve image models here, which needs mlx_vlm."""
    return importlib.util.find_spec("mlx_vlm") is not None


def check(seams: Sequence[Seam]) -> None:
    """Raises PionMlxCompatError naming every seam that differs, and how."""
    if importlib.util.find_spec("vllm_mlx") is None:
        raise PionMlxCompatError(
            f"vllm-mlx is not installed: pip install --no-deps 'vllm-mlx=={KNOWN_VERSION}'"
        )
    differences = [(seam.label, seam.difference()) for seam in seams]
    named = [f"{label} {difference}" for label, difference in differences if difference]
    if named:
        raise PionMlxCompatError(
            f"this vllm-mlx is not the one known here ({KNOWN_VERSION}), "
            f"nothing was replaced: {'; '.join(named)}"
        )


@dataclass
class Replacements:
    """Attributes replaced so far, undone in reverse order."""

    _done: list[tuple[Any, str, Any, Any]] = field(default_factory=list)

    def replace(self, seam: Seam, value: Any) -> None:
        """Put ``value`` in the place of the seam's object."""
        owner = seam.owner()
        # The raw attribute: getattr would unwrap a staticmethod.
        self._done.append((owner, seam.name, vars(owner)[seam.name], value))
        setattr(owner, seam.name, value)

    def undo(self) -> None:
        """Put the very objects back.

        Raises PionMlxCompatError where somebody else has replaced ours meanwhile; the others
        are put back all the same.
        """
        foreign = []
        while self._done:
            owner, name, original, ours = self._done.pop()
            if vars(owner)[name] is not ours:
                foreign.append(f"{owner.__name__}.{name}")
                continue
            setattr(owner, name, original)
        if foreign:
            raise PionMlxCompatError(f"replaced by somebody else meanwhile: {', '.join(foreign)}")
