"""Attention over keys at the server is attention: against softmax in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.cache.externalized import (
    ExternalizedAttentionConfig,
    ExternalizedAttentionManager,
    Partial,
    local_attention,
    merge,
)
from pion_vllm_mlx.errors import ConfigError
from tests.conftest import RunningServer, free_port_block

H_Q, H_KV, D = 4, 2, 16
Doubles = NDArray[np.float64]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder: Path = tmp_path_factory.mktemp("attention") / "data"
    folder.mkdir(mode=0o700)
    running = RunningServer(free_port_block(), folder)
    try:
        yield running.start()
    finally:
        running.stop()


def config(server: RunningServer, name: str, **changes: object) -> ExternalizedAttentionConfig:
    settings: dict[str, object] = {
        "pion_port": server.port,
        "external_layers": (3,),
        "key_dim": H_KV * D,
        "value_dim": H_KV * D,
        "num_heads": H_Q,
        "num_kv_heads": H_KV,
        "session_id": name,
        "v_format": "fp32",
        **changes,
    }
    return ExternalizedAttentionConfig(**settings)  # type: ignore[arg-type]


Attend = Callable[..., ExternalizedAttentionManager]


@pytest.fixture
def attend(server: RunningServer) -> Iterator[Attend]:
    """Makes managers of sessions; closes them."""
    with ExitStack() as stack:

        def make(name: str, **changes: object) -> ExternalizedAttentionManager:
            manager = ExternalizedAttentionManager(config(server, name, **changes))
            stack.callback(manager.close)
            return manager

        yield make


def made(n: int, seed: int = 0) -> tuple[NDArray[np.float32], ...]:
    """A query ``[H_q, D]``, keys and values ``[n, H_kv, D]``."""
    rng = np.random.default_rng(seed)
    shapes = ((H_Q, D), (n, H_KV, D), (n, H_KV, D))
    return tuple(rng.standard_normal(shape).astype(np.float32) * 2 for shape in shapes)


def reference(
    q: NDArray[np.float32], k: NDArray[np.float32], v: NDArray[np.float32], top: int = 0
) -> tuple[Doubles, Doubles]:
    """Output and log-sum-exp in float64, over the ``top`` best keys of each head (0: all)."""
    outs, lses = [], []
    for head in range(H_Q):
        kv = head // (H_Q // H_KV)
        scores = k[:, kv].astype(np.float64) @ q[head] / np.sqrt(D)
        best = np.argsort(-scores)[: top or len(scores)]
        weights = np.exp(scores[best])
        outs.append(weights @ v[best, kv] / weights.sum())
        lses.append(np.log(weights.sum()))
    return np.stack(outs), np.stack(lses)


def check(found: Partial | None, expected: tuple[Doubles, Doubles], tolerance: float) -> None:
    assert found is not None
    np.testing.assert_allclose(found.out, expected[0], atol=tolerance)
    np.testing.assert_allclose(found.lse, expected[1], atol=tolerance)


@pytest.mark.parametrize("n", [1, 50, 128])
def test_over_as_many_keys_as_are_asked_for_it_is_exact_softmax_attention(
    attend: Attend, n: int
) -> None:
    manager = attend(f"exact{n}", store_batch_size=20)
    q, k, v = made(n)
    assert manager.store_prefill_kv(3, k.reshape(n, -1), v.reshape(n, -1))
    check(manager.query(3, q.reshape(-1)), reference(q, k, v), 2e-4)
    # the weights matter: a mean over the rows is far off
    if n > 1:
        mean = v.repeat(H_Q // H_KV, axis=1).mean(axis=0)
        assert np.abs(mean - reference(q, k, v)[0]).max() > 0.1
    assert manager.get_layer_token_count(3) == n


def test_over_more_keys_it_is_attention_over_those_of_the_largest_products(
    attend: Attend,
) -> None:
    manager = attend("best")
    q, k, v = made(400, seed=1)
    # lengths differ by 16: the nearest key by plain distance is another than the best
    k *= np.geomspace(0.25, 4, 400)[:, None, None].astype(np.float32)
    assert manager.store_prefill_kv(3, k.reshape(400, -1), v.reshape(400, -1))
    check(manager.query(3, q, k=32), reference(q, k, v, top=32), 2e-3)


def test_keys_that_come_later_take_part(attend: Attend) -> None:
    manager = attend("later")
    q, k, v = made(30, seed=2)
    for part in (slice(0, 10), slice(10, 30), slice(30, 30)):
        assert manager.store_prefill_kv(3, k[part].reshape(-1, H_KV * D), v[part])
    check(manager.query(3, q), reference(q, k, v), 2e-4)
    assert manager.get_stats()["tokens"] == {3: 30}


def test_layers_do_not_mix(attend: Attend) -> None:
    manager = attend("layers")
    q, k, v = made(8, seed=3)
    other_k, other_v = made(8, seed=4)[1:]
    manager.store_prefill_kv(3, k, v)
    manager.store_prefill_kv(4, other_k, other_v)
    check(manager.query(3, q), reference(q, k, v), 2e-4)
    check(manager.query(4, q), reference(q, other_k, other_v), 2e-4)
    assert manager.query(5, q) is None


def test_what_is_there_and_what_is_here_merge_to_attention_over_both(
    attend: Attend,
) -> None:
    manager = attend("merged")
    q, k, v = made(60, seed=5)
    manager.store_prefill_kv(3, k[:40], v[:40])
    stored = manager.query(3, q)
    assert stored is not None
    here = local_attention(q, k[40:], v[40:], 1 / np.sqrt(D))
    check(merge([stored, here]), reference(q, k, v), 2e-4)
    nothing = local_attention(q, k[:0], v[:0], 1 / np.sqrt(D))
    assert np.isneginf(nothing.lse).all() and not nothing.out.any()
    check(merge([nothing, stored]), reference(q, k[:40], v[:40]), 2e-4)
    assert np.isneginf(merge([nothing, nothing]).lse).all()
    masked = local_attention(q, k, v, 1 / np.sqrt(D), np.where(np.arange(60) < 40, 0, -np.inf))
    check(masked, reference(q, k[:40], v[:40]), 1e-5)


def test_a_key_longer_than_the_radius_is_refused_and_nothing_stored(
    attend: Attend,
) -> None:
    manager = attend("radius")
    q, k, v = made(4, seed=6)
    manager.store_prefill_kv(3, k, v)
    with pytest.raises(ConfigError, match="key_radius"):
        manager.store_prefill_kv(3, k * 100, v)
    check(manager.query(3, q), reference(q, k, v), 2e-4)
    wide = attend("wide", key_radius=1000.0)
    wide.store_prefill_kv(3, k, v)
    assert wide.store_prefill_kv(3, k * 20, v)


def test_a_layer_that_was_not_stored_whole_is_not_attended_to(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    server = RunningServer(free_port_block(), folder).start()
    try:
        manager = ExternalizedAttentionManager(config(server, "half", timeout=1.0))
        q, k, v = made(4, seed=7)
        assert manager.store_prefill_kv(3, k, v)
        server.kill()
        assert manager.query(3, q) is None
        assert manager.store_prefill_kv(3, k, v) is False
        server.start()
        assert manager.store_prefill_kv(3, k, v) is False
        assert manager.query(3, q) is None
        assert manager.get_stats()["failures"] >= 2
        manager.close()
    finally:
        server.stop()


def test_shapes_that_do_not_fit_are_refused(server: RunningServer, attend: Attend) -> None:
    with pytest.raises(ConfigError):
        config(server, "x", num_heads=3)
    with pytest.raises(ConfigError):
        config(server, "x", num_kv_heads=0)
    with pytest.raises(ConfigError, match="2 keys and 3 values"):
        manager = attend("x")
        manager.store_prefill_kv(3, np.ones((2, H_KV * D)), np.ones((3, H_KV * D)))
