"""What a request finds at the start, beside others, and what is said of what it did not find."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache import store_client_endpoint  # noqa: E402
from pion_vllm_mlx.cache.data_folder import read_status  # noqa: E402
from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402
from tests.serve.front import until  # noqa: E402

DEADLINE_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def opened(
    server: RunningServer, model: Any, test: str, limits: CacheLimits | None = None, **more: Any
) -> LineageCache:
    """A cache over the server's store, for ``model``."""
    url = f"tcp://127.0.0.1:{server.port}"
    options = LineageOptions(url=url, key_parts={"test": test}, **more)
    cache = LineageCache(options, limits or CacheLimits())
    cache.attach(model, None)
    return cache


def filled(model: Any, tokens: list[int]) -> list[Any]:
    """Caches that hold ``tokens``."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def nothing() -> None:
    """What a connection does while the store is asked."""


def looked_up(cache: LineageCache, tokens: list[int]) -> Plan:
    plan = Plan(tokens)
    cache.look_up(plan, nothing)
    return plan


def keep(cache: LineageCache, model: Any, tokens: list[int]) -> None:
    cache.insert_cache("m", tokens, filled(model, tokens))


# -- the start ---------------------------------------------------------------------


def slow_start(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Has the embedded server come up late, as on a machine that loads a model."""
    attach, delays = store_client_endpoint.attach, [seconds]

    def late(*args: Any, **options: Any) -> Any:
        if delays:
            time.sleep(delays.pop())
        return attach(*args, **options)

    monkeypatch.setattr(store_client_endpoint, "attach", late)


def embedded(folder: Path, **more: Any) -> LineageOptions:
    return LineageOptions(url=f"embedded://{folder}", deadline_seconds=DEADLINE_SECONDS, **more)


def stored(folder: Path, model: Any, tokens: list[int]) -> None:
    """Has the embedded server of a folder store what ``tokens`` are."""
    cache = LineageCache(embedded(folder), CacheLimits())
    cache.attach(model, None)
    keep(cache, model, tokens)
    cache.close()


def test_a_store_that_has_to_be_started_has_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 1)
    stored(tmp_path / "data", model, prompt)
    slow_start(monkeypatch, DEADLINE_SECONDS + 0.2)
    store = LineageStore(model, embedded(tmp_path / "data"))
    assert store.match([*prompt, 1]).length == 100
    assert "unavailable" not in store.stats()
    store.close()


def test_the_store_is_started_while_the_weights_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    cache = LineageCache(embedded(folder), CacheLimits())
    until(lambda: read_status(folder.resolve()) is not None, "the embedded server")
    cache.close()


def test_the_first_look_up_waits_for_a_store_that_is_on_its_way_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 2)
    stored(tmp_path / "data", model, prompt)
    slow_start(monkeypatch, DEADLINE_SECONDS + 0.2)
    again = LineageCache(embedded(tmp_path / "data"), CacheLimits())
    again.attach(model, None)
    plan = looked_up(again, [*prompt, 1])
    assert plan.restored is not None and plan.restored.length == 100, plan.why
    again.close()


def test_a_store_that_is_not_there_is_not_waited_for() -> None:
    store = LineageStore(tiny_model("llama"), LineageOptions(url="tcp://127.0.0.1:1"))
    began = time.monotonic()
    assert not store.connect(600.0)
    assert time.monotonic() - began < 300
    store.close()
