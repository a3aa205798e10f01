"""``durable``: a COMMIT behind each store, and what is said where the server refuses it."""

from __future__ import annotations

import logging
from contextlib import closing

import pytest

from tests.cache.lineage.driving import Engine, open_store, prompt
from tests.conftest import RunningServer
from tests.models import tiny_model


def test_a_server_that_commits_nothing_is_named_once_and_counted(
    own: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    own.restart("--no-wal")
    model = tiny_model("llama")
    with (
        closing(open_store(model, own, durable=True)) as store,
        caplog.at_level(logging.INFO, "pion_vllm_mlx"),
    ):
        for seed in range(3):
            Engine(model, store).turn(prompt(100, seed), reply=1)
            assert store.flush()
        stats = store.stats()
        assert stats["not_durable"] == stats["written"] == 3
        assert "--no-wal" in stats["reasons"]["not_durable"]
    told = [record.getMessage() for record in caplog.records if "durable" in record.getMessage()]
    assert len(told) == 1 and "KV.PREFIX.COMMIT" in told[0], told


def test_where_the_server_commits_nothing_is_said(own: RunningServer) -> None:
    model = tiny_model("llama")
    with closing(open_store(model, own, durable=True)) as store:
        Engine(model, store).turn(prompt(100, 1), reply=1)
        assert store.flush() and "not_durable" not in store.stats()
