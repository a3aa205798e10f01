"""Chunked attention, whose caches drop the chunks before the last one."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import Engine, prompt, same_reply
from tests.models import VOCABULARY

CHUNK = 256
"""mlx-lm 0.31 drops rows by the size of the buffer, which grows in steps of 256."""

CONFIG: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": CHUNK,
    "head_dim": 32,
    "hidden_size": 64,
    "interleave_moe_layer_step": 8,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "max_position_embeddings": 4096,
    "model_type": "llama4_text",
    "num_attention_heads": 4,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_qk_norm": True,
    "vocab_size": VOCABULARY,
}


def model() -> Any:
    """A tiny Llama 4: three layers with chunked attention, one with all of it."""
    module = importlib.import_module("mlx_lm.models.llama4")
    mx.random.seed(11)
    made = module.Model(
        module.ModelArgs.from_dict({"model_type": "llama4", "text_config": CONFIG})
    )
    made.update(tree_map(lambda a: 0.3 * mx.random.normal(a.shape), made.parameters()))
    made.eval()
    mx.eval(made.parameters())
    return made


@pytest.mark.parametrize("count", [40, 255, 256, 257, 300, 511, 513, 700])
def test_a_prompt_is_found_again_by_another_process(count: int, opened: Opener) -> None:
    llama4 = model()
    key = {"key_parts": {"t": f"chunks {count}"}}
    ids = prompt(count, 31)
    first = opened(llama4, **key)
    plain = Engine(llama4, None).turn(ids, reply=3)
    same_reply(Engine(llama4, first).turn(ids, reply=3), plain)
    assert first.flush(30), first.stats()
    assert not first.stats().get("lost"), first.stats()
    second = opened(llama4, **key)
    again = Engine(llama4, second).turn(ids, reply=3)
    assert again.reused == count - 1, again.match.why
    same_reply(again, plain)
    longer = [*ids, *again.reply, *prompt(90, 32)]
    more = Engine(llama4, second).turn(longer, reply=3)
    assert more.reused >= count - 1
    same_reply(more, Engine(llama4, None).turn(longer, reply=3))


def test_what_leaves_a_conversation_early_gets_its_own_rows(opened: Opener) -> None:
    """The rows before the last chunk of the first conversation were never stored."""
    llama4 = model()
    first = opened(llama4)
    ids = prompt(900, 33)
    Engine(llama4, first).turn(ids, reply=1)
    assert first.flush(30)
    left = [*ids[:400], *prompt(60, 34)]
    for _ in range(2):
        store = opened(llama4)
        turn = Engine(llama4, store).turn(left, reply=2)
        same_reply(turn, Engine(llama4, None).turn(left, reply=2))
        assert store.flush(30), store.stats()
    assert turn.reused == len(left) - 1, turn.match.why
    again = Engine(llama4, opened(llama4)).turn(ids, reply=1)
    assert again.reused == len(ids) - 1, again.match.why
