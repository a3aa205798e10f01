"""What changes the K/V of a prefix changes its identity; where it was loaded from does not."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from pion_vllm_mlx.cache import identity_code, identity_weights
from pion_vllm_mlx.cache.identity import ModelIdentity, identity_digest
from pion_vllm_mlx.cache.identity_names import first_difference, make_namespace
from pion_vllm_mlx.errors import ConfigError, UnsupportedCache
from tests.models import NAMES, tiny_model

_OTHER_PROCESS = """
import json, sys
import mlx.core as mx
from pion_vllm_mlx.cache.identity import ModelIdentity
from tests.models import tiny_model
model = tiny_model("llama")
model.update(__import__("mlx.utils").utils.tree_map(mx.zeros_like, model.parameters()))
model.load_weights(sys.argv[1])
print(json.dumps(ModelIdentity(model).fields()))
"""


def fields(model: Any, **parts: Any) -> dict[str, Any]:
    return ModelIdentity(model, **parts).fields()


def changed_fields(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in before if before[key] != after[key]}


def test_namespace_is_the_documented_hash() -> None:
    parts = ("m", "tok", "500000", "fp16", "none", "hello")
    assert make_namespace(*parts) == "8dda74cb4e1297dea431dd6a83619d22"


@pytest.mark.parametrize("name", NAMES)
def test_two_objects_of_the_same_weights_are_equal(name: str) -> None:
    one, two = fields(tiny_model(name)), fields(tiny_model(name))
    assert one == two and identity_digest(one) == identity_digest(two)
    assert json.loads(json.dumps(one)) == one


def test_another_process_that_loads_the_weights_elsewhere_agrees(tmp_path: Path) -> None:
    model = tiny_model("llama")
    path = tmp_path / "elsewhere" / "w.safetensors"
    path.parent.mkdir()
    mx.save_safetensors(str(path), dict(tree_flatten(model.parameters())))
    root = Path(__file__).parents[2]

    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _OTHER_PROCESS, str(path)],
        cwd=root, capture_output=True, check=True, timeout=60,
    )  # fmt: skip
    assert json.loads(out.stdout) == fields(model)


def _one_weight(w: mx.array) -> mx.array:
    w[3, 5] = w[3, 5] + 0.25
    return w


def _two_signs(w: mx.array) -> mx.array:
    w[1, 2], w[7, 9] = -w[1, 2], -w[7, 9]
    return w


def _swapped_rows(w: mx.array) -> mx.array:
    order = np.arange(w.shape[0])
    order[[2, 11]] = order[[11, 2]]
    return w[mx.array(order)]


@pytest.mark.parametrize("change", [_one_weight, _two_signs, _swapped_rows])
def test_a_changed_weight_changes_the_key(change: Any) -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = change(mx.array(layer.weight))
    assert changed_fields(before, identity.fields()) == {"weights"}
    assert changed_fields(before, fields(model)) == {"weights"}


def test_swapped_arrays_change_the_key() -> None:
    model = tiny_model("llama")
    before = fields(model)
    first, second = (layer.self_attn.v_proj for layer in model.model.layers)
    first.weight, second.weight = second.weight, first.weight
    assert changed_fields(before, fields(model)) == {"weights"}


def test_dtype_adapter_and_rope_change_the_key() -> None:
    base = tiny_model("llama")
    before = fields(base)
    assert "dtypes" in changed_fields(before, fields(tiny_model("llama", mx.bfloat16)))
    quantized = tiny_model("llama")
    nn.quantize(quantized, group_size=32, bits=8)
    eight = fields(quantized)
    quantized = tiny_model("llama")
    nn.quantize(quantized, group_size=32, bits=4)
    assert {"weights", "structure"} <= changed_fields(before, eight)
    assert {"weights", "structure"} <= changed_fields(eight, fields(quantized))
    scaled = tiny_model("llama")
    scaled.model.layers[0].self_attn.rope.base = 20000.0
    assert changed_fields(before, fields(scaled)) == {"structure"}
    other = tiny_model("llama", rope_theta=20000.0)
    assert {"args", "structure"} <= changed_fields(before, fields(other))
    assert first_difference(before, fields(other)) == "args.rope_theta"


def test_hidden_rope_frequencies_belong_to_the_key() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64}  # fmt: skip
    model = tiny_model("llama", rope_scaling=scaling)
    before = fields(model)
    rope = model.model.layers[0].self_attn.rope
    rope._freqs = rope._freqs * 2
    assert changed_fields(before, fields(model)) == {"weights"}


def test_changes_are_noticed_by_the_same_object() -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    assert identity.fields() == before
    model.model.layers[0].self_attn.rope.base = 5.0
    assert changed_fields(before, identity.fields()) == {"structure"}
    model.model.layers[0].self_attn.rope.base = 10000.0
    assert identity.fields() == before
    model.train()
    assert identity.fields() == before


def _added(weight: mx.array) -> None:
    weight += 1


def _assigned(weight: mx.array) -> None:
    weight[3, 5] = weight[3, 5] + 0.25


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("change", [_added, _assigned])
def test_a_weight_that_is_assigned_into_changes_the_key(change: Any, dtype: mx.Dtype) -> None:
    model = tiny_model("llama", dtype)
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    assert identity.fields() == before
    change(model.model.layers[1].self_attn.k_proj.weight)
    after = dict(identity.fields())
    assert changed_fields(before, after) == {"weights"}
    assert identity.fields() == after == fields(model)


def test_changed_arguments_are_noticed_by_the_same_object() -> None:
    model = tiny_model("gemma3_text")  # makes its cache by its arguments
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    model.args.sliding_window = 8
    assert {"args", "cache"} <= changed_fields(before, identity.fields())


class _Own:
    def __init__(self, base: float) -> None:
        self.base = base


class _Scaling(enum.Enum):
    NONE = 1
    YARN = 2


def _scaled_by(factor: float) -> Any:
    return lambda x: x * factor


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({1, 2}, {1, 3}),
        (np.ones(3), np.zeros(3)),
        (np.float32(1), np.float32(2)),
        (functools.partial(mx.power, 1), functools.partial(mx.power, 2)),
        (_Scaling.NONE, _Scaling.YARN),
        (_Own(1.0), _Own(2.0)),
        (_Own(1.0).__init__, _Own(2.0).__init__),  # type: ignore[misc]  # bound to its object
        (_scaled_by(1.0), _scaled_by(2.0)),
        (lambda x: x + 1, lambda x: x + 2),
        (mx.float16, mx.bfloat16),
        ({"layers": {1}}, {"layers": {2}}),
        (range(3), range(4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_any_setting_of_a_module_belongs_to_the_key(one: Any, two: Any) -> None:
    model = tiny_model("llama")
    attention = model.model.layers[0].self_attn
    identity, seen = ModelIdentity(model), []
    for setting in (one, two, one):
        attention.setting = setting
        seen.append(dict(identity.fields()))
    functions = {"functions"} if callable(one) else set()
    assert {"structure"} <= changed_fields(seen[0], seen[1]) <= {"structure"} | functions
    assert seen[0] == seen[2] == fields(model)


def test_the_callers_parts_do_not_replace_the_models_own() -> None:
    for part in ("weights", "code", "functions", "mlx", "format"):
        with pytest.raises(ConfigError, match=part):
            ModelIdentity(tiny_model("llama"), extra={part: "mine"})


def test_the_callers_parts_and_the_storage_format_belong_to_the_key() -> None:
    model = tiny_model("llama")
    before = fields(model)
    assert changed_fields(before, fields(model, vquant="int8")) == {"format"}
    named = fields(model, extra={"tokenizer": "t1"})
    assert first_difference(before, named) == "tokenizer"
    assert first_difference(named, fields(model, extra={"tokenizer": "t2"})) == "tokenizer"


def test_a_cache_class_that_is_not_known_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Strange:
        pass

    model = tiny_model("llama")
    monkeypatch.setattr(type(model), "make_cache", lambda self: [Strange()], raising=False)
    with pytest.raises(UnsupportedCache, match="Strange in slot 0"):
        fields(model)


def test_code_of_the_model_and_of_what_it_imports_is_read() -> None:
    source = identity_code._source("mlx_lm.models.qwen3_5", frozenset({"mlx_lm"}))
    assert source is not None
    assert {"mlx_lm.models.base", "mlx_lm.models.gated_delta"} <= source.imports


def test_other_model_code_changes_the_key(tmp_path: Path) -> None:
    path = tmp_path / "own_model.py"

    def digest(text: str, name: str) -> str:
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            return identity_code.code_digest([module.Model])
        finally:
            del sys.modules[name]

    one = digest("class Model:\n    x = 1\n", "own_a")
    assert digest("class Model:\n    x = 1\n", "own_b") == one
    assert digest("class Model:\n    x = 22\n", "own_a") != one
    imported = digest(
        "class Model:\n    x = 1\nif 0:\n    from mlx_lm.models import rwkv7\n", "own_a"
    )
    assert imported not in (one, digest("class Model:\n    x = 1\n#   another\n", "own_a"))


def test_what_the_models_own_package_imports_changes_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_models"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "net.py").write_text("from .rope import turn\nclass Net:\n    call = turn\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = set()
    for text in ("def turn(x): return x\n", "def turn(x): return -x\n"):
        (package / "rope.py").write_text(text)
        seen.add(identity_code.code_digest([importlib.import_module("own_models.net").Net]))
    assert len(seen) == 2


@pytest.mark.parametrize(
    "array",
    [
        mx.random.normal((70, 700)),
        mx.random.normal((3, 50)).astype(mx.bfloat16)[:, 1:],
        mx.arange(5).astype(mx.uint8),
        mx.arange(40000).astype(mx.int64),
        mx.array([True, False]),
        mx.array(2.5),
        mx.zeros((0, 3)),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_numpy_and_mlx_compute_the_same_sums(array: mx.array) -> None:
    left = list(identity_weights._numpy_sums(array))
    right = list(identity_weights._mlx_sums(array))
    assert b"".join(s.tobytes() for s in left) == b"".join(s.tobytes() for s in right)


def test_shape_and_dtype_belong_to_an_arrays_digest() -> None:
    zeros = [mx.zeros((2, 6)), mx.zeros((3, 4)), mx.zeros((2, 6), mx.int32), mx.zeros((2, 7))]
    assert len({identity_weights.array_digest(a) for a in zeros}) == len(zeros)
