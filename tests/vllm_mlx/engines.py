"""Real vllm-mlx engines over tiny models, and the tokens that went through the model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.counted import as_ours
from tests.models import VOCABULARY

REPLY_TOKENS = 6
#: what other splits of a prefill may change of logits.
NEAR = 1e-4


def word_tokenizer() -> Any:
    """A real fast tokenizer of ``VOCABULARY`` words w0, w1, …; no end-of-text token."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    plain = Tokenizer(WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain)


@dataclass(frozen=True)
class Reply:
    """One answered request: its tokens, and what the engine says was cached.

    ``logits`` are those of its first token, where it was alone.
    """

    tokens: list[int]
    cached: int
    lookup: Any = None
    logits: Any = field(default=None, repr=False)


def same_reply(found: Reply, expected: Reply) -> None:
    """The same tokens, and of the first not only the most probable one.

    A row that is not the right one seldom changes a token, but always the logits.
    """
    assert found.tokens == expected.tokens, found.lookup
    furthest = float(np.abs(found.logits - expected.logits).max())
    assert furthest < NEAR, (furthest, found.lookup)


@dataclass
class Engine:
    """A running EngineCore with its model on a thread of its own, as vllm-mlx runs it."""

    core: Any
    loop: asyncio.AbstractEventLoop
    worker: ThreadPoolExecutor
    forward_tokens: list[int] = field(default_factory=list)
    #: of each forward call, if it was of one token.
    outputs: list[Any] = field(default_factory=list)

    @property
    def cache(self) -> Any:
        """The prefix cache that the scheduler holds."""
        return self.core.scheduler.memory_aware_cache

    def ask(self, prompt: Sequence[int], count: int = REPLY_TOKENS) -> Reply:
        """One greedy reply of ``count`` tokens."""
        return self.loop.run_until_complete(self._ask(list(prompt), count))

    def ask_all(self, prompts: Sequence[Sequence[int]], count: int = REPLY_TOKENS) -> list[Reply]:
        """Replies to prompts that arrive at once."""

        async def together() -> list[Reply]:
            return await asyncio.gather(*(self._ask(list(prompt), count) for prompt in prompts))

        return self.loop.run_until_complete(together())

    def computed(self, prompt: Sequence[int], count: int = REPLY_TOKENS) -> tuple[Reply, int]:
        """A reply, and how many tokens of the prompt went through the model for it."""
        before = len(self.forward_tokens)
        reply = self.ask(prompt, count)
        logits = self._logits(before, len(prompt) - reply.cached)
        # Every reply token goes through the model too, before the next is known.
        return replace(reply, logits=logits), sum(self.forward_tokens[before:]) - count

    def computed_all(
        self, prompts: Sequence[Sequence[int]], count: int = REPLY_TOKENS
    ) -> tuple[list[Reply], int]:
        """Replies to prompts that arrive at once, and how many tokens of these were computed.

        Where rests of several lengths are prefilled together their padding is counted, too.
        """
        before = len(self.forward_tokens)
        replies = self.ask_all(prompts, count)
        return replies, sum(self.forward_tokens[before:]) - count * len(prompts)

    def ask_and_leave(self, prompt: Sequence[int], after_tokens: int) -> None:
        """Ask, and abort once so many tokens of the prompt went through the model."""

        async def leave() -> None:
            before = sum(self.forward_tokens)
            request_id = await self.core.add_request(list(prompt), greedy(REPLY_TOKENS))
            while sum(self.forward_tokens) - before < after_tokens:
                await asyncio.sleep(0)
            await self.core.abort_request(request_id)
            while self.core.scheduler.running or self.core.scheduler._pending_abort_ids:
                await asyncio.sleep(0.01)

        self.loop.run_until_complete(leave())

    def _logits(self, before: int, computed: int) -> Any:
        """Those behind the last token of a prompt, of which so many were computed."""
        seen = np.cumsum(self.forward_tokens[before:]).tolist()
        if computed not in seen:
            return None
        output = self.outputs[before + seen.index(computed)]
        return self.worker.submit(lambda: np.array(output[0, -1].tolist())).result()

    async def _ask(self, prompt: list[int], count: int) -> Reply:
        request_id = await self.core.add_request(prompt, greedy(count))
        request = self.core.scheduler.requests[request_id]
        final = None
        async for output in self.core.stream_outputs(request_id):
            final = output
        assert final is not None and final.finish_reason == "length"
        return Reply(
            list(final.output_token_ids),
            request.cached_tokens,
            vars(request).get("pion_lookup"),
        )


def greedy(count: int) -> Any:
    """Sampling settings of a reply that is the same every time."""
    from vllm_mlx.request import SamplingParams

    return SamplingParams(max_tokens=count, temperature=0.0, top_p=1.0)


@contextmanager
def running_engine(make_model: Any, tokenizer: Any = None, **settings: Any) -> Iterator[Engine]:
    """An engine over ``make_model()``; ``settings`` go to vllm-mlx's SchedulerConfig."""
    from mlx.core import clear_streams
    from vllm_mlx.engine_core import EngineConfig, EngineCore
    from vllm_mlx.mlx_streams import (
        bind_generation_streams,
        restore_generation_streams,
        snapshot_generation_streams,
    )
    from vllm_mlx.scheduler import SchedulerConfig

    streams = snapshot_generation_streams()
    loop = asyncio.new_event_loop()
    forward: list[int] = []
    outputs: list[Any] = []
    with ThreadPoolExecutor(1, thread_name_prefix="model") as worker:

        def load() -> Any:
            bind_generation_streams()
            return counting(make_model(), forward, outputs)

        model = worker.submit(load).result()
        settings = {"cache_memory_mb": 256, **settings}
        config = EngineConfig(scheduler_config=SchedulerConfig(**settings), step_interval=0.01)
        words = word_tokenizer() if tokenizer is None else tokenizer
        core = EngineCore(model, words, config, generation_worker=worker)
        loop.run_until_complete(core.start())
        try:
            yield Engine(core, loop, worker, forward, outputs)
        finally:
            loop.run_until_complete(core.stop())
            worker.submit(core.close).result()
            worker.submit(clear_streams).result()
            loop.close()
            restore_generation_streams(streams)


def counting(model: Any, forward: list[int], outputs: list[Any]) -> Any:
    """The model, noting for every call how many tokens (batch times length) it was given.

    And what came out where that was one.
    """
    kind: Any = type(model)
    original = kind.__call__

    def call(self: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        forward.append(int(inputs.size))
        found = original(self, inputs, *args, **options)
        outputs.append(found if inputs.size == 1 else None)
        return found

    class Counting(kind):  # type: ignore[misc]
        __call__ = as_ours(call)

    Counting.__module__ = kind.__module__
    model.__class__ = Counting
    return model
