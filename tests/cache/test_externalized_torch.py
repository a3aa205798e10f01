"""Externalized attention as a torch module is torch's own attention over all keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.cache.externalized import (
    ExternalizedAttentionConfig,
    ExternalizedAttentionManager,
)
from pion_vllm_mlx.errors import StoreUnavailable
from tests.conftest import RunningServer

torch: Any = pytest.importorskip(
    "torch",
    reason="torch is not installed: make test-torch",
    exc_type=ImportError,
)
external: Any = pytest.importorskip("pion_vllm_mlx.cache.externalized_torch")

H_Q, H_KV, D = 4, 2, 16
STORED, LOCAL = 40, 20


class Attention(torch.nn.Module):  # type: ignore[misc]
    """Attention over the local cache alone: what a decode step without this package does."""

    def forward(self, query: Any, cache: Any = None, mask: Any = None) -> Any:
        keys, values = cache
        return attention(query, keys, values, mask)


class Layer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, name: str) -> None:
        super().__init__()
        self.mlp = torch.nn.Linear(2, 2)
        if name:
            setattr(self, name, Attention())


class Model(torch.nn.Module):  # type: ignore[misc]
    """Four layers in a list that has either of the usual names."""

    def __init__(self, layers: str = "layers", attention_name: str = "self_attn") -> None:
        super().__init__()
        setattr(self, layers, torch.nn.ModuleList([Layer(attention_name) for _ in range(4)]))


def attention(query: Any, keys: Any, values: Any, mask: Any = None) -> Any:
    """torch's attention of ``query [..., H_q * D]`` over ``keys [n, H_kv * D]``, in float64."""
    q = query.double().reshape(-1, H_Q, 1, D)
    k, v = (
        part.double().reshape(-1, H_KV, D).transpose(0, 1).repeat_interleave(H_Q // H_KV, dim=0)
        for part in (keys, values)
    )
    bias = None if mask is None else mask.double().reshape(1, 1, -1)
    outs = [
        torch.nn.functional.scaled_dot_product_attention(one, k, v, attn_mask=bias) for one in q
    ]
    return torch.stack(outs).reshape(query.shape)


class Patch(Protocol):
    def __call__(self, model: Any, name: str, **changes: object) -> ExternalizedAttentionManager:
        """Patch layer 3 of a model."""


@pytest.fixture
def patch(store: RunningServer) -> Iterator[Patch]:
    """Patches models; closes their managers."""
    with ExitStack() as stack:

        def make(model: Any, name: str, **changes: Any) -> ExternalizedAttentionManager:
            settings = {
                "pion_port": store.port,
                "external_layers": (3,),
                "key_dim": H_KV * D,
                "value_dim": H_KV * D,
                "num_heads": H_Q,
                "num_kv_heads": H_KV,
                "session_id": name,
                "v_format": "fp32",
                **changes,
            }
            config = ExternalizedAttentionConfig(**settings)
            manager: ExternalizedAttentionManager = external.patch_model_for_externalized_attention(
                model, config
            )
            stack.callback(manager.close)
            return manager

        yield make


def made(*lead: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """A query ``[*lead, H_q * D]``, keys and values ``[STORED + LOCAL, H_kv * D]``."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (*lead, H_Q * D), (STORED + LOCAL, H_KV * D), (STORED + LOCAL, H_KV * D)
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, k, v


def stored(layer: Any, keys: Any, values: Any) -> tuple[Any, Any]:
    """Store the first rows; the rest is the local cache."""
    assert layer.store_kv(keys[:STORED], values[:STORED])
    return keys[STORED:], values[STORED:]


def close_to(found: Any, expected: Any, tolerance: float = 2e-4) -> None:
    left: NDArray[np.float64] = found.double().numpy()
    np.testing.assert_allclose(left, expected.double().numpy(), atol=tolerance)


@pytest.mark.parametrize(("layers", "name"), [("layers", "self_attn"), ("h", "attn")])
def test_a_layer_attends_to_what_is_stored_and_to_what_is_here(
    patch: Patch, layers: str, name: str
) -> None:
    model = Model(layers, name)
    manager = patch(model, f"both-{name}")
    layer = getattr(getattr(model, layers)[3], name)
    assert layer.is_external and model._pion_attention_manager is manager
    q, k, v = made(1)
    local = stored(layer, k, v)
    close_to(layer(q, key_value_cache=local), attention(q, k, v))
    # nothing local: the stored part alone
    close_to(layer(q), attention(q, k[:STORED], v[:STORED]))


def test_before_anything_is_stored_and_in_other_layers_the_model_is_untouched(
    patch: Patch,
) -> None:
    model = Model()
    names = set(dict(model.named_parameters()))
    patch(model, "untouched")
    assert set(dict(model.named_parameters())) == names
    q, k, v = made(1)
    for number in (2, 3):
        assert torch.equal(model.layers[number].self_attn(q, (k, v)), attention(q, k, v))
    assert isinstance(model.layers[2].self_attn, Attention)
    assert model.layers[3].self_attn.original_module is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_any_batch_of_queries_comes_back_in_its_own_shape_and_dtype(
    patch: Patch, dtype: Any
) -> None:
    model = Model()
    patch(model, f"batch-{dtype}")
    q, k, v = (part.to(dtype) for part in made(2, 3))
    layer = model.layers[3].self_attn
    local = stored(layer, k, v)
    out = layer(q, key_value_cache=local)
    assert out.shape == (2, 3, H_Q * D) and out.dtype == dtype
    close_to(out, attention(q, k, v), {torch.float32: 2e-4, torch.float16: 4e-3}.get(dtype, 3e-2))


def test_a_mask_hides_local_keys_only(patch: Patch) -> None:
    model = Model()
    patch(model, "mask")
    q, k, v = made(1, seed=3)
    layer = model.layers[3].self_attn
    local = stored(layer, k, v)
    hidden = torch.arange(LOCAL) >= LOCAL // 2
    mask = torch.where(hidden, -torch.inf, 0.0)
    whole = torch.cat([torch.zeros(STORED), mask])
    close_to(layer(q, local, mask), attention(q, k, v, whole))
    seen = STORED + LOCAL // 2
    close_to(layer(q, local, mask), attention(q, k[:seen], v[:seen]))


def test_a_query_that_needs_a_gradient_is_answered_without_one(patch: Patch) -> None:
    model = Model()
    patch(model, "gradient")
    q, k, v = made(1)
    layer = model.layers[3].self_attn
    local = stored(layer, k, v)
    out = layer(q.requires_grad_(), key_value_cache=local)
    assert not out.requires_grad
    close_to(out, attention(q.detach(), k, v))


@pytest.mark.parametrize("fallback", [True, False])
def test_a_dead_server_costs_the_stored_part_or_is_an_error_never_a_wrong_answer(
    patch: Patch, pion_server: RunningServer, fallback: bool
) -> None:
    model = Model()
    changes = {"pion_port": pion_server.port, "timeout": 1.0, "fallback_to_local": fallback}
    patch(model, "dead", **changes)
    q, k, v = made(1)
    layer = model.layers[3].self_attn
    stored(layer, k, v)
    pion_server.kill()
    if fallback:
        # the original module gets what the caller has, here all of it
        assert torch.equal(layer(q, (k, v)), attention(q, k, v))
    else:
        with pytest.raises(StoreUnavailable, match="layer 3"):
            layer(q, (k, v))


def test_a_model_without_attention_where_it_is_looked_for_is_refused(patch: Patch) -> None:
    with pytest.raises(ValueError, match="layer 3 has no module"):
        patch(Model(attention_name=""), "none")
    with pytest.raises(ValueError, match="no list of layers"):
        patch(Model(layers="blocks"), "none")
