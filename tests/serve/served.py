"""An engine beside mlx-lm on the same model: what a reply has to be, and what it may have cost.

The reply to compare with is computed here, by mlx-lm alone, in one go.  How many tokens went
through the engine's model is counted in its process: those that are said to be reused must
be missing there.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server
from tests.real_model import NEAR, Said, alone, same_tokens
from tests.serve.engines import Engine, Reply, running_engine

LIMIT = 6
ROWS = ("llama", "gemma3_text", "deepseek_v3", "quantized")
STATES = ("qwen3_5", "mamba", "rwkv7", "falcon_h1")
#: the flags of an engine that quantizes its KV caches, and the same for ``stream_generate``.
QUANTIZED = ("--kv-bits", "8", "--kv-group-size", "32", "--quantized-kv-start", "0")
QUANTIZING = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}
#: what other splits of a prefill may change of the logits where rows are rounded in between:
#: a piece attends to its own rows as they are, and to those of the pieces before as they were
#: rounded.  With the splits of the rows that were reused it is ``NEAR``, as for all others.
ROUNDED = 0.1
#: what they may change of a token's log probability where nothing is rounded.
LEAST = 1e-4
SEEDED = {"seed": 5}
#: a random model would end its reply somewhere, or have it taken for thoughts or a call of a tool.
#: And it says ASCII alone: of a batched reply mlx-lm 0.31's server leaves out last bytes that are
#: no whole character, which ``stream_generate`` has as U+FFFD.
NO_END = {"logit_bias": {str(token): -100.0 for token in (*range(7), *range(101, 263))}}


@dataclass
class Served:
    """An engine, and mlx-lm on the same model."""

    engine: Engine
    model: Any
    tokenizer: Any

    @property
    def quantized(self) -> bool:
        """Whether the engine quantizes its caches; it batches nothing then."""
        return self.engine.model.name == "quantized"

    def check(
        self, reply: Reply, prompt: list[int], pieces: Sequence[int] | None = None, **more: Any
    ) -> None:
        """That a reply is what mlx-lm answers without any cache.

        ``pieces``: where the prompts ended, before the last token and at it, whose rows were
        reused; where caches are quantized the reply is compared with one of the same splits.
        """
        how: dict[str, Any] = {"logits_processors": processors_of(more)}
        rest, count = prompt, int(reply.usage["completion_tokens"])
        if self.quantized:
            how |= QUANTIZING
        if self.quantized and pieces:
            how["prompt_cache"] = self._in_pieces(prompt, pieces)
            rest = prompt[pieces[-1] :]
        near = ROUNDED if self.quantized and pieces is None else NEAR
        expected = alone(self.model, self.tokenizer, rest, count, **how)
        same_tokens(reply.tokens, expected, near)
        same_logprobs(reply, expected, near if self.quantized else LEAST)

    def said_alone(self, prompt: str | list[int], limit: int, **more: Any) -> str:
        """The text that mlx-lm answers without any cache."""
        from mlx_lm import stream_generate

        how: dict[str, Any] = {"logits_processors": processors_of(more), "max_tokens": limit}
        return "".join(
            reply.text for reply in stream_generate(self.model, self.tokenizer, prompt, **how)
        )

    def complete(
        self, text: str, limit: int = LIMIT, pieces: Sequence[int] | None = None, **more: Any
    ) -> Reply:
        """A completion, proved against mlx-lm alone."""
        reply = self.engine.complete(text, limit, **more)
        return self.proved(reply, self.tokenizer.encode(text), pieces, **more)

    def chat(self, messages: list[dict[str, Any]], tools: Any = None, **more: Any) -> Reply:
        """A turn of a chat, proved against mlx-lm alone."""
        given = {} if tools is None else {"tools": tools}
        rendered = copy.deepcopy(messages)  # arguments of calls are text, and objects for it
        importlib.import_module("mlx_lm.server").process_message_content(rendered)
        prompt = self.tokenizer.apply_chat_template(
            rendered, add_generation_prompt=True, tokenize=True, **given
        )
        return self.proved(self.engine.chat(messages, LIMIT, **given, **more), list(prompt), **more)

    def proved(
        self, reply: Reply, prompt: list[int], pieces: Sequence[int] | None = None, **more: Any
    ) -> Reply:
        """The reply, which is right, and for which no more was computed than it says."""
        self.check(reply, prompt, pieces, **more)
        assert reply.prompt == len(prompt)
        assert reply.forward == reply.prompt - reply.cached + reply.usage["completion_tokens"]
        if reply.prompt > 1:  # of one token nothing can be reused: it has no plan
            assert reply.receipt["reused_tokens"] == reply.cached
        return reply

    def _in_pieces(self, prompt: list[int], pieces: Sequence[int]) -> list[Any]:
        """A quantized cache of a prompt up to the last of ``pieces``, rounded at each of them."""
        import mlx.core as mx
        from mlx_lm.generate import maybe_quantize_kv_cache
        from mlx_lm.models.cache import make_prompt_cache

        caches: list[Any] = make_prompt_cache(self.model)
        for start, end in zip([0, *pieces], pieces, strict=False):
            self.model(mx.array(prompt[start:end])[None], cache=caches)
            maybe_quantize_kv_cache(caches, **QUANTIZING)  # type: ignore[no-untyped-call]
        return caches


def same_logprobs(reply: Reply, expected: Sequence[Said], near: float) -> None:
    """That a reply's tokens are as probable as they should be, as far as they are the same.

    A row that is not the right one seldom changes a token, but always how sure the model is.
    """
    assert len(reply.logprobs) == len(reply.tokens)
    for at, said in enumerate(expected):
        assert abs(reply.logprobs[at] - said.logprob) < near, (at, reply.logprobs, expected)
        if reply.tokens[at] != said.token:
            return


def processors_of(asked: dict[str, Any]) -> Any:
    """The logits processors of a request, for ``stream_generate``."""
    from mlx_lm.sample_utils import make_logits_processors

    bias = {int(token): by for token, by in asked.get("logit_bias", {}).items()}
    return make_logits_processors(logit_bias=bias or None)


def store_of(server: RunningServer) -> tuple[str, ...]:
    """The flags that name a server."""
    return ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))


def family_folder(folder: Path, family: str, **changes: Any) -> tuple[Path, tuple[str, ...]]:
    """The new folder of a family's model, and the flags of an engine that serves it."""
    from tests.serve.tiny_folder import make_folder

    flags = ()
    if family == "quantized":
        flags = QUANTIZED
        if "--kv-bits" not in inspect.getsource(importlib.import_module("mlx_lm.server")):
            pytest.skip("this mlx-lm's server quantizes no caches")
    return make_folder(folder / family, "llama" if flags else family, **changes), flags


@contextlib.contextmanager
def serving(folder: Path, family: str, *more: str, **changes: Any) -> Iterator[Served]:
    """One engine of a family, with ``changes`` to its model, over a server of its own."""
    from mlx_lm import load

    model, flags = family_folder(folder, family, **changes)
    with (
        running_server(folder / "data") as server,
        running_engine(folder, model, *store_of(server), *more, flags=flags) as engine,
    ):
        yield Served(engine, *load(str(model))[:2])
