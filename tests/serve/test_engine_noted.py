"""A reply that is not batched is stored while it grows, and nothing of that is waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm import load, stream_generate  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.sample_utils import make_sampler  # noqa: E402

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.serve.engine_mlx_lm_noted import Noted  # noqa: E402
from pion_vllm_mlx.serve.engine_mlx_lm_single import SingleRequests  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.serve.tiny_folder import VOCABULARY, make_folder  # noqa: E402

FAMILIES = ["llama", "gemma3_text", "qwen3_5", "mamba", "deepseek_v3", "quantized"]
STATEFUL = ["qwen3_5", "mamba"]
PROMPT, REPLY, BEGUN = 90, 150, 148
QUANTIZING = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


class Served:
    """mlx-lm's own generation over a cache, as its server calls it for a seed."""

    def __init__(self, folder: Path, family: str, server: RunningServer, test: str) -> None:
        self.quantizing: dict[str, Any] = QUANTIZING if family == "quantized" else {}
        self.model, self.tokenizer = load(str(folder))
        bits = {name: value for name, value in self.quantizing.items() if name != "x"}
        options = LineageOptions(
            url=f"tcp://127.0.0.1:{server.port}", key_parts={"t": f"{test} {family}"}, **bits
        )
        self.cache = LineageCache(options, CacheLimits(64))
        self.cache.attach(self.model, None)
        assert self.cache.store is not None
        self.store = self.cache.store
        self.single = SingleRequests(stream_generate, self.cache)

    def tokens(self, prompt: list[int], journal: str, count: int = REPLY) -> Iterator[int]:
        """The tokens of a reply, one after the other."""
        plan = Plan(prompt, single=True, journal=journal)
        self.cache.look_up(plan, lambda: None)
        self.cache.plan(plan, None)
        caches, rest = self.cache.fetch_nearest_cache("m", PlannedPrompt(plan))
        yield from self._told(self.single, caches, list(rest), count)

    def alone(self, prompt: list[int], count: int = REPLY) -> list[int]:
        """Those of mlx-lm without us."""
        return list(self._told(stream_generate, None, prompt, count))

    def _told(self, generate: Any, caches: Any, rest: list[int], count: int) -> Iterator[int]:
        sample = self.cache.spread.carrying(partial(make_sampler, 0.0))
        for response in generate(
            model=self.model,
            tokenizer=self.tokenizer,
            prompt=rest,
            max_tokens=count,
            sampler=sample(),
            logits_processors=[lambda tokens, logits: _endless(logits)],
            prompt_cache=caches or make_prompt_cache(self.model),
            **self.quantizing,
        ):
            self.cache.spread.stepped()
            yield int(response.token)


def _endless(logits: mx.array) -> mx.array:
    logits[..., :7] = -mx.inf
    return logits


def folder_of(tmp_path: Path, family: str) -> Path:
    return make_folder(tmp_path / family, "llama" if family == "quantized" else family)


def prompt_of(seed: int) -> list[int]:
    return [7 + token % (VOCABULARY - 8) for token in token_ids(PROMPT, seed)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_growing_reply_is_that_of_mlx_lm_alone_and_can_be_continued(
    family: str, server: RunningServer, tmp_path: Path
) -> None:
    folder, prompt = folder_of(tmp_path, family), prompt_of(3)
    first = Served(folder, family, server, "growing")
    expected = first.alone(prompt)
    reply = first.tokens(prompt, "one")
    assert [next(reply) for _ in range(BEGUN)] == expected[:BEGUN]
    assert first.store.flush(30)
    assert first.cache.blocking.as_dict()["grow"]["calls"] >= 2
    # as if its process had been killed: nobody forgets the journal
    second = Served(folder, family, server, "growing")
    plan = Plan(prompt, single=True, journal="one")
    second.cache.look_up(plan, lambda: None)
    every = 64 if family in STATEFUL else 16
    noted = (BEGUN - 1) // every * every + 2  # of tokens that are known one step later
    assert noted <= BEGUN and plan.resume == expected[:noted]
    assert list(second.tokens(prompt, "two")) == expected
    reply.close()
    for one in (first, second):
        one.cache.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_storing_a_growing_reply_evaluates_nothing_on_the_thread_that_generates(
    family: str, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is new is computed with a step; who looks at it first is the thread that writes."""
    folder, prompt = folder_of(tmp_path, family), prompt_of(4)
    served = Served(folder, family, server, "evaluating")
    inside: list[bool] = []
    evaluated: list[str] = []
    thread = threading.get_ident()

    def noticing(name: str) -> Any:
        call = getattr(mx, name)

        def noticed(*args: Any) -> Any:
            if inside and threading.get_ident() == thread:
                evaluated.append(name)
            return call(*args)

        return noticed

    def within(name: str) -> Any:
        call = vars(Noted)[name]

        def called(*args: Any) -> Any:
            inside.append(True)
            try:
                return call(*args)
            finally:
                inside.pop()

        return called

    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, noticing(name))
    for name in ("_new", "_keep"):
        monkeypatch.setattr(Noted, name, within(name))
    expected = served.alone(prompt)
    assert list(served.tokens(prompt, "one")) == expected
    assert evaluated == []
    assert served.cache.blocking.as_dict()["grew"]["calls"] >= 2
    assert served.store.flush(30)
    assert served.store.match([*prompt, *expected]).length >= PROMPT + REPLY - 65
    served.cache.close()
