"""The patch in place for one test, a server for a module's, and caches that use one lane."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

import pion_vllm_mlx
from pion_vllm_mlx.cache import inproc
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from tests.conftest import RunningServer, running_server
from tests.models import token_ids

LANES = ("in-process", "binary", "resp")
SUFFIX = token_ids(12, seed=5)

Logits = list[mx.array]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A running server that a module's tests share, each under namespaces of its own."""
    with running_server(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture
def patched() -> Iterator[None]:
    """The patch, for one test; what this process keeps of prefixes goes afterwards."""
    pion_vllm_mlx.install_pion_attention_patch()
    try:
        yield
    finally:
        pion_vllm_mlx.uninstall_pion_attention_patch()
        inproc.PROCESS.forget()


class Opener:
    """Prompt caches that attend over one lane; closed at the end."""

    def __init__(self, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = port
        self._monkeypatch = monkeypatch
        self._opened: list[PionPromptCache] = []

    def __call__(self, model: Any, lane: str = "binary", **options: Any) -> PionPromptCache:
        for name, off in (("NO_INPROC", lane != "in-process"), ("NO_BINARY", lane == "resp")):
            self._monkeypatch.setenv(f"PION_PROMPT_CACHE_{name}", "1" if off else "")
        self._opened.append(PionPromptCache(model, port=self.port, **options))
        return self._opened[-1]

    def close(self) -> None:
        for opened in self._opened:
            opened.close()


@pytest.fixture
def opened(store: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    opener = Opener(store.port, monkeypatch)
    yield opener
    opener.close()


def forwards(model: Any, cache: list[Any], steps: int) -> Logits:
    """The logits of a suffix in one go, and of single tokens after it."""
    logits = [model(mx.array([SUFFIX]), cache=cache)]
    for token in token_ids(steps, seed=9):
        logits.append(model(mx.array([[token]]), cache=cache))
    mx.eval(logits)
    return logits


def alone(model: Any, ids: list[int], steps: int) -> Logits:
    """The same from a cache of mlx-lm's own that holds the prefix."""
    cache = make_prompt_cache(model)
    model(mx.array([ids]), cache=cache)
    return forwards(model, cache, steps)


def furthest(found: Logits, wanted: Logits) -> float:
    """The largest difference, relative to the largest logit where that is above 1."""
    scale = max(1.0, max(float(mx.abs(one).max()) for one in wanted))
    return max(float(mx.abs(a - b).max()) for a, b in zip(found, wanted, strict=True)) / scale
