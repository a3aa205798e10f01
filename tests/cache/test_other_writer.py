"""Two writers under one namespace: who loses is told so once, in words that help."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import pytest

from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.cache.store_client import StoreClient
from tests.conftest import RunningServer
from tests.models import tiny_model, token_ids
from tests.server.wire import Wire


def test_a_store_that_another_writer_dropped_is_one_warning_a_namespace(
    pion_server: RunningServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PION_PROMPT_CACHE_NO_INPROC", "1")
    whole = StoreClient.store_rows

    def dropped_first(client: StoreClient, namespace: str, blobs: Iterable[Any]) -> int:
        with Wire.tcp(pion_server.port) as other:
            other.ask("KV.PREFIX.DROP", namespace)
        return whole(client, namespace, blobs)

    monkeypatch.setattr(StoreClient, "store_rows", dropped_first)
    caplog.set_level(logging.INFO, "pion_vllm_mlx")
    with PionPromptCache(tiny_model("llama"), port=pion_server.port) as pion:
        for name in ("one", "one", "one", "two"):
            pion.get_or_prefill(token_ids(70), name)
        assert pion.stats()["store_failures"] == 4
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "not stored" in r.getMessage()]
    assert [level for level, _ in told] == ["WARNING", "INFO", "INFO", "WARNING"]
    assert "another process stores under the namespace 'one'" in told[0][1]
    assert "give each text its own" in told[0][1]
