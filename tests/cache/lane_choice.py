"""Prompt caches that use one lane and no other."""

from __future__ import annotations

from typing import Any

import pytest

from pion_vllm_mlx.cache import evaluation, inproc
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from tests.conftest import RunningServer

IN_PLACE = "mapped, in place"

_SWITCHES = {
    "mapped": [],
    # as under CUDA: threads read into the buffers of the caches
    IN_PLACE: [],
    "stored": ["PION_PROMPT_CACHE_NO_EXPORT"],
    "range": ["PION_PROMPT_CACHE_NO_EXPORT", "PION_PROMPT_CACHE_NO_BATCH"],
    "in-process": [],
}


class Lanes:
    """Builds prompt caches that use one lane."""

    def __init__(self, store: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.port = store.port
        self._monkeypatch = monkeypatch

    def __call__(self, model: Any, lane: str = "mapped", **options: Any) -> PionPromptCache:
        if lane != "in-process":
            inproc.PROCESS.forget()
        for name in ("NO_EXPORT", "NO_BATCH"):
            self._monkeypatch.delenv(f"PION_PROMPT_CACHE_{name}", raising=False)
        for name in _SWITCHES[lane]:
            self._monkeypatch.setenv(name, "1")
        self._monkeypatch.setattr(evaluation, "on_cuda", lambda: lane == IN_PLACE)
        return PionPromptCache(model, port=self.port, **options)
