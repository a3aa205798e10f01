"""What vllm-mlx's engine does a token, behind a hit and behind a prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm_mlx", reason="vllm-mlx is not installed: make test-vllm-mlx")

from pion_vllm_mlx.cache.lineage import LineageOptions  # noqa: E402
from pion_vllm_mlx.cache.vllm_mlx_backend import (  # noqa: E402
    BackendSettings,
    install_vllm_mlx_backend,
)
from tests.conftest import RunningServer  # noqa: E402
from tests.counted import as_ours  # noqa: E402
from tests.models import token_ids  # noqa: E402
from tests.vllm_mlx.engines import running_engine  # noqa: E402
from tests.vllm_mlx.families import FAMILIES  # noqa: E402

pytestmark = pytest.mark.usefixtures("uninstalled")

SOME = ["plain", "latent", "sliding window", "gated delta 3.5", "mamba and attention"]
REPLY = 300
#: class and sizes of each buffer of rows
Buffers = list[tuple[str, list[tuple[int, Any]]]]


def watched(make: Callable[[], Any], steps: list[Buffers]) -> Callable[[], Any]:
    """``make``, whose model notes the buffers of a sequence at every token of its reply."""

    def made() -> Any:
        model = make()
        kind: Any = type(model)
        original = kind.__call__

        def call(self: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            told = original(self, inputs, *args, **options)
            if inputs.shape[-1] == 1:
                steps.append(buffers(options.get("cache") or args[0]))
            return told

        model.__class__ = type("Watched", (kind,), {"__call__": as_ours(call)})
        model.__class__.__module__ = kind.__module__
        return model

    return made


def buffers(caches: Any) -> Buffers:
    found: Buffers = []
    for cache in caches:
        inner = getattr(cache, "caches", None)
        if inner is not None:
            found += buffers(inner)
        elif getattr(cache, "keys", None) is not None:
            rows = [(one.shape[2], one.dtype) for one in (cache.keys, cache.values)]
            found.append((type(cache).__name__, rows))
    return found


def changes(steps: list[Buffers]) -> int:
    """How often buffers were made anew, each time a copy of all rows."""
    return sum(one != other for one, other in zip(steps, steps[1:], strict=False))


@pytest.mark.parametrize("count", [255, 300])
@pytest.mark.parametrize("family", SOME)
def test_decoding_behind_a_hit_makes_no_more_buffers_than_behind_a_prefill(
    family: str, count: int, pion_server: RunningServer
) -> None:
    prompt = token_ids(count, seed=700)
    url = f"tcp://127.0.0.1:{pion_server.port}"
    install_vllm_mlx_backend(settings=BackendSettings(LineageOptions(url=url, deadline_seconds=30)))
    replies, told = [], []
    for number in range(2):
        steps: list[Buffers] = []
        with running_engine(watched(FAMILIES[family], steps)) as engine:
            for turn in range(1 + number):  # cold; of the store, and of memory
                steps.clear()
                reply = engine.ask(prompt, REPLY)
                assert reply.cached == (count - 1 if number else 0), turn
                replies.append(reply.tokens)
                told.append((changes(steps[-REPLY:]), steps[-1]))
            assert engine.cache.save_to_disk("")
    assert replies[1:] == replies[:1] * 2
    (cold, at_end), *hits = told
    for warm, warm_at_end in hits:
        assert warm <= cold + 1  # a full ring, or rows without any to spare, once
        assert [kind for kind, _ in warm_at_end] == [kind for kind, _ in at_end]
        assert len(steps) >= REPLY
