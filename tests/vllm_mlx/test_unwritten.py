"""What memory has no room for is found all the same while it waits to be written."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

LENGTH = 1000


@pytest.mark.parametrize("family", ["plain", "sliding window", "gated delta 3.5"])
def test_what_waits_to_be_written_is_found_where_memory_has_no_room_for_it(
    family: str, pion_server: RunningServer
) -> None:
    url = f"tcp://127.0.0.1:{pion_server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url)))
    prompts = [token_ids(LENGTH, seed=700 + seed) for seed in range(6)]
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go_on.wait(100)

    with running_engine(FAMILIES[family], cache_memory_mb=1) as engine:
        engine.ask(token_ids(100, seed=720), 1)  # the store is opened by it
        store = engine.cache.store_or_none()
        assert store is not None
        store._in_background(slow)
        assert begun.wait(30)
        try:
            for prompt in prompts:
                engine.ask(prompt, 1)
            assert engine.cache.pion_stats()["live_evictions"] > 0
            assert engine.cache.pion_stats()["unwritten_bytes"] > 0
            for prompt in prompts:
                reply = engine.ask([*prompt, *token_ids(40, seed=730)], 1)
                assert (reply.lookup.tier, reply.cached >= LENGTH - 1) == ("memory", True)
        finally:
            go_on.set()
        assert engine.cache.save_to_disk("")
        assert engine.cache.pion_stats()["unwritten_bytes"] == 0
        assert 0 < engine.cache._current_memory <= 1 << 20


def test_as_much_is_set_aside_as_may_wait_to_be_written() -> None:
    config = SimpleNamespace(compute_memory_limit=lambda: 1000, max_entries=10)
    for options, most in [(LineageOptions(queue_bytes=12345), 12345), (None, 0)]:
        tier = BackendSettings(options).live_tier(config, lambda arrays: None)
        assert (tier.budget_bytes, tier._aside.budget_bytes) == (1000, most)
