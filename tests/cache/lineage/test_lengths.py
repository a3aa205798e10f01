"""What is restored at any length continues bit for bit like what was never stored."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from tests.cache.continuing import continued
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import KINDS, Engine, fresh_cache, kind_options, prompt, same_reply
from tests.models import WINDOW, tiny_model

LENGTHS = sorted({*range(1, 20), *range(28, 36), *range(60, 70), *range(124, 134), 199, 200})
EDGES = sorted(
    {15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, WINDOW + 1, 2 * WINDOW, 191, 192}
)
ROWS_ANYWHERE = ("plain", "quantized", "latent", "window")


def kept(engine: Engine, ids: list[int]) -> list[Any]:
    """A cache of ``ids``, prefilled in one go and kept."""
    cache = fresh_cache(engine.model, engine.kv_bits)
    engine.forward(ids, cache)
    assert engine.store is not None
    assert engine.store.keep(ids, cache) is (len(ids) >= 16)
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_of_any_length_comes_back_bit_equal(kind: str, opened: Opener) -> None:
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    for length in LENGTHS:
        kept(engine, prompt(length, length))
    assert store.flush(60)
    for length in LENGTHS:
        ids = prompt(length, length)
        match = store.match([*ids, 5, 6, 7])
        restored = store.restore(match)
        if length < 16:
            assert match.length == 0 and restored is None, "shorter than the least gain"
            continue
        assert match.common >= length and match.length == length, match.why
        assert restored is not None and restored.length == length
        cache = fresh_cache(model, kv_bits)
        mx.eval(model(mx.array(ids)[None], cache=cache))
        assert [type(c) for c in restored.caches] == [type(c) for c in cache]
        assert continued(model, restored.caches) == continued(model, cache), length
    assert store.stats().get("restore_failures", 0) == 0


@pytest.mark.parametrize("kind", ROWS_ANYWHERE)
def test_one_stored_prompt_serves_each_of_its_prefixes(kind: str, opened: Opener) -> None:
    """Its rows are those of the longer prompt, bit for bit; what follows agrees in its tokens."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, **kind_options(kv_bits))
    engine = Engine(model, store, kv_bits)
    ids = prompt(200, 1000)
    whole = kept(engine, ids)
    assert store.flush(30)
    for length in (*range(1, 200), 200):
        asked = [*ids[:length], (ids[length % 200] + 1) % 128]
        match = store.match(asked)
        restored = store.restore(match)
        if length < 16:
            assert restored is None
            continue
        assert (match.common, match.length) == (length, length), match.why
        assert restored is not None and restored.length == length
        if kind == "window":
            continue
        for ours, theirs in zip(restored.caches, whole, strict=True):
            assert ours.offset == length
            for a, b in zip(arrays(ours), arrays(theirs), strict=True):
                assert mx.array_equal(a[..., :length, :], b[..., :length, :]), length
    for length in EDGES:
        check_next_tokens(engine, ids[:length], other=(ids[length] + 1) % 128)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exact_repeat_leaves_the_last_token_and_gives_its_logits(
    kind: str, opened: Opener
) -> None:
    """Not an empty suffix, and no token twice."""
    name, kv_bits = KINDS[kind]
    model = tiny_model(name)
    store = opened(model, **kind_options(kv_bits))
    plain = Engine(model, None, kv_bits)
    for length in EDGES:
        ids = prompt(length, 3000 + length)
        engine = Engine(model, store, kv_bits)
        first = engine.turn(ids)
        assert store.flush(30)
        again = engine.turn(ids)
        wanted = plain.turn(ids)
        expected = 0 if length < 17 else length - 1
        assert (first.reused, first.computed) == (0, length)
        assert (again.reused, again.computed) == (expected, length - expected)
        assert first.logits == wanted.logits, "the first of its kind is not changed by the store"
        assert again.logits == wanted.logits, length


def arrays(cache: Any) -> list[mx.array]:
    keys, values = cache.keys, cache.values
    return [*keys, *values] if isinstance(keys, tuple | list) else [keys, values]


def check_next_tokens(engine: Engine, ids: list[int], other: int) -> None:
    """The greedy reply is the one of a run without a cache, or a tie decides."""
    turn = engine.turn([*ids, other, 4])
    plain = Engine(engine.model, None, engine.kv_bits).turn([*ids, other, 4])
    assert engine.store is not None and engine.store.flush(30)
    assert turn.computed == len(ids) + 2 - turn.reused
    expected = 0 if len(ids) < 16 else len(ids)
    assert turn.reused == expected
    same_reply(turn, plain)
