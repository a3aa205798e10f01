"""The key is that of the functions that run, not of the ones that were installed."""

from __future__ import annotations

import functools
import importlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn
import pytest
from mlx_lm.models import base, cache

from pion_vllm_mlx.cache.identity import ModelIdentity
from pion_vllm_mlx.cache.identity_text import bytecode_digest, source_file
from pion_vllm_mlx.errors import UnsupportedCache
from pion_vllm_mlx.patch import install_pion_attention_patch, uninstall_pion_attention_patch
from tests.models import tiny_model

nn: Any = mlx.nn
llama: Any = importlib.import_module("mlx_lm.models.llama")

Patch = Callable[[pytest.MonkeyPatch], object]
ROOT = Path(__file__).parents[2]

PATCHES: dict[str, Patch] = {
    "attention": lambda m: m.setattr(
        llama.Attention, "__call__", lambda s, x, mask=None, cache=None: x
    ),
    "another class's method": lambda m: m.setattr(llama.Attention, "__call__", llama.MLP.__call__),
    "norm": lambda m: m.setattr(nn.RMSNorm, "__call__", lambda s, x: x),
    "rope": lambda m: m.setattr(nn.RoPE, "__call__", lambda s, x, offset=0: x),
    "base of all": lambda m: m.setattr(nn.Module, "__getattr__", other_getattr),
    "new method": lambda m: m.setattr(nn.Linear, "__getitem__", lambda s, name: 0, raising=False),
    "global function": lambda m: m.setattr(llama, "swiglu", lambda a, b: a),
    "compiled global": lambda m: m.setattr(llama, "swiglu", mx.compile(lambda a, b: a * b)),
    "global of the base": lambda m: m.setattr(base, "create_causal_mask", lambda *a, **k: None),
    "attention function": lambda m: m.setattr(
        llama, "scaled_dot_product_attention", lambda q, k, v, **o: q
    ),
    "its bound helper": lambda m: m.setattr(
        llama, "scaled_dot_product_attention", functools.partial(_helper, 3)
    ),
    "function of nn": lambda m: m.setattr(nn, "RMSNorm", nn.LayerNorm),
    "built in": lambda m: m.setattr(mx.fast, "rope", lambda x, *a, **k: x),
    "built in, compiled": lambda m: m.setattr(mx.fast, "rope", mx.compile(lambda x: x)),
    "built in, another one": lambda m: m.setattr(
        mx.fast, "scaled_dot_product_attention", mx.fast.rope
    ),
    "rows of the cache": lambda m: m.setattr(
        cache.KVCache, "update_and_fetch", lambda s, k, v: (k, v)
    ),
    "defaults": lambda m: m.setattr(base.create_causal_mask, "__defaults__", (1, 2, 3, 4)),
    "code in place": lambda m: m.setattr(
        llama.MLP.__call__, "__code__", (lambda self, x: x).__code__
    ),
}


def _helper(times: int, q: Any, *rest: Any, **options: Any) -> Any:
    return q * times


def fields(model: Any) -> dict[str, Any]:
    return ModelIdentity(model).fields()


def changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {key for key in before if before[key] != after[key]}


@pytest.mark.parametrize("name", PATCHES)
def test_a_replaced_function_changes_the_key_at_once_and_put_back_restores_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    with monkeypatch.context() as patched:
        PATCHES[name](patched)
        after = dict(identity.fields())
        assert changed(before, after) == {"functions"}
        assert fields(model) == after
    assert identity.fields() == before == fields(model)


def test_two_patches_of_one_name_that_differ_in_what_they_hold_differ(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = tiny_model("llama"), []
    original = llama.MLP.__call__

    def scaled(held: Any) -> Callable[..., Any]:
        return lambda self, x: original(self, x) * held

    values = (2, 3, 2.0, [2], mx.array(2), mx.array(3), mx.fast.rope, mx.fast.rms_norm)
    for held in (*values, lambda x: x, lambda x: -x):
        monkeypatch.setattr(llama.MLP, "__call__", scaled(held))
        seen.append(fields(model)["functions"])
        assert fields(model)["functions"] == seen[-1]
    assert len(set(seen)) == len(seen)


def test_a_patch_that_holds_what_no_other_process_can_compare_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    for held in (threading.Lock(), [].append, object()):
        code = compile("lambda held: lambda self, x: held", "<shell>", "eval")
        with monkeypatch.context() as patched:
            patched.setattr(llama.MLP, "__call__", eval(code)(held))
            for _ in range(2):
                with pytest.raises(UnsupportedCache, match=r"cannot be compared: MLP.*held"):
                    identity.fields()
        assert identity.fields() == before


def test_what_a_patch_holds_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings, scale = tiny_model("llama"), {"by": 2}, mx.array([2.0])
    monkeypatch.setattr(llama.MLP, "__call__", lambda s, x: x * settings["by"] * scale)
    identity = ModelIdentity(model)
    seen = [identity.fields()["functions"]]
    settings["by"] = 3
    seen.append(identity.fields()["functions"])
    scale[0] = 4.0
    seen.append(identity.fields()["functions"])
    assert len(set(seen)) == 3 and fields(model)["functions"] == seen[-1]


def test_another_class_of_one_layer_is_noticed_by_the_same_object() -> None:
    class Doubled(llama.Attention):  # type: ignore[misc]
        def __call__(self, x: Any, mask: Any = None, cache: Any = None) -> Any:
            return super().__call__(x * 2, mask, cache)

    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    model.model.layers[0].self_attn.__class__ = Doubled
    assert "functions" in changed(before, identity.fields())


def test_our_own_attention_patch_does_not_change_the_key() -> None:
    model = tiny_model("llama")
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    install_pion_attention_patch()
    try:
        assert llama.scaled_dot_product_attention.__module__.startswith("pion_vllm_mlx")
        assert identity.fields() == before == fields(model)
    finally:
        uninstall_pion_attention_patch()
    assert identity.fields() == before


def test_a_patch_below_our_attention_patch_changes_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model("llama")
    before = fields(model)
    own = base.scaled_dot_product_attention

    def scaled_dot_product_attention(  # noqa: PLR0913
        queries: Any, keys: Any, values: Any, cache: Any, scale: Any, mask: Any, sinks: Any = None
    ) -> Any:
        return own(queries, keys, values, cache, scale, mask, sinks) * 2

    # in every model that some test imported: one that holds another is refused
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and vars(module).get(own.__name__) is own:
            monkeypatch.setattr(module, own.__name__, scaled_dot_product_attention)
    patched = fields(model)
    install_pion_attention_patch()
    try:
        assert changed(before, patched) == {"functions"} and fields(model) == patched
    finally:
        uninstall_pion_attention_patch()


_SHELL = """
import json
from mlx_lm.models import llama
from pion_vllm_mlx.cache.identity import ModelIdentity
from tests.models import tiny_model
SCALE = {scale}
def helper(x):
    return x * SCALE
class Mine(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        return super().__call__(helper(x) {change}, mask, cache)
model = tiny_model("llama")
for layer in model.model.layers:
    layer.self_attn.__class__ = Mine
print(json.dumps(ModelIdentity(model).fields()))
"""


def typed_in(scale: int, change: str, seed: int) -> Any:
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-"], input=_SHELL.format(scale=scale, change=change),
        cwd=ROOT, capture_output=True, check=True, timeout=120, text=True,
        env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    return json.loads(out.stdout)


def test_a_class_typed_into_a_shell_counts_by_what_it_does() -> None:
    one = typed_in(1, "* 1", 1)
    assert typed_in(1, "* 1", 2) == one
    assert changed(one, typed_in(1, "* 2", 1)) == {"functions"}
    assert changed(one, typed_in(2, "* 1", 1)) == {"functions"}


def test_code_is_told_by_its_text_only_where_the_text_says_it(tmp_path: Path) -> None:
    def function(text: str, name: str) -> FunctionType:
        space: dict[str, Any] = {}
        exec(compile(text, name, "exec", dont_inherit=True), space)
        found: FunctionType = space["f"]
        return found

    path = tmp_path / "f.py"
    path.write_text("def f(x): return x\n")
    code = function(path.read_text(), str(path)).__code__
    assert source_file(code) is not None
    assert source_file(function("def f(x): return -x\n", str(path)).__code__) is None
    assert source_file(function(path.read_text(), "<stdin>").__code__) is None
    lower = function("\n\n" + path.read_text(), "<stdin>").__code__
    assert bytecode_digest(lower) == bytecode_digest(code)
    for other in ("def f(x): return -x\n", "def f(y): return y\n", "def f(x, /): return x\n"):
        assert bytecode_digest(function(other, "<stdin>").__code__) != bytecode_digest(code)


def test_a_method_of_an_own_models_file_may_be_replaced_and_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_net.py").write_text(
        "import mlx.nn as nn\nFACTOR = 2\ncalls = 0\n"
        "def turn(x):\n    global calls\n    calls += 1\n    return x * FACTOR\n"
        "class Net(nn.Module):\n    def __call__(self, x):\n        return turn(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    own: Any = importlib.import_module("own_net")
    model = tiny_model("llama")
    model.net = own.Net()
    identity = ModelIdentity(model)
    before = dict(identity.fields())
    model.net(1)
    assert identity.fields() == before  # a counter is no setting
    own.FACTOR = 3
    assert changed(before, identity.fields()) == {"functions"}
    own.FACTOR, own.turn = 2, lambda x: x
    assert changed(before, identity.fields()) == {"functions"}
    del sys.modules["own_net"]


def other_getattr(module: Any, name: str) -> Any:
    """As nn.Module's, said in another way."""
    if name in module:
        return dict.__getitem__(module, name)
    raise AttributeError(name)
