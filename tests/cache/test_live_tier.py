"""The in-process tier against a model of it: a plain list of what was put in."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from pion_vllm_mlx.cache.live_tier import (
    LiveTier,
    common_tokens,
    encode,
    shortened,
)
from pion_vllm_mlx.errors import UnsupportedCache

WINDOW = 8


def rows(tokens: list[int]) -> mx.array:
    """Rows that say which token they are of: [1, 1, N, 2]."""
    return mx.array([[[[float(token), float(at)] for at, token in enumerate(tokens)]]])


def plain(tokens: list[int]) -> KVCache:
    cache = KVCache()
    cache.update_and_fetch(rows(tokens), rows(tokens))
    return cache


def window(tokens: list[int]) -> RotatingKVCache:
    cache = RotatingKVCache(max_size=WINDOW)
    cache.update_and_fetch(rows(tokens), rows(tokens))
    return cache


def state(tokens: list[int]) -> ArraysCache:
    cache = ArraysCache(1)
    cache[0] = mx.array([[float(sum(tokens)), float(len(tokens))]])
    return cache


MAKERS: dict[str, Any] = {
    "plain": lambda tokens: [plain(tokens), plain(tokens)],
    "window": lambda tokens: [plain(tokens), window(tokens)],
    "hybrid": lambda tokens: [state(tokens), plain(tokens)],
    "list": lambda tokens: [CacheList(state(tokens), plain(tokens))],
}


def held(caches: list[Any], tokens: list[int]) -> bool:
    """Whether caches hold exactly ``tokens``."""
    for cache in caches:
        if isinstance(cache, CacheList):
            if not held(list(cache.caches), tokens):
                return False
        elif isinstance(cache, ArraysCache):
            if cache[0].tolist() != [[float(sum(tokens)), float(len(tokens))]]:
                return False
        else:
            keys = cache.keys[..., : cache.offset, :]
            last = rows(tokens)[..., -keys.shape[2] :, :]
            if cache.offset != len(tokens) or not mx.array_equal(keys, last):
                return False
    return True


@pytest.mark.parametrize("kind", MAKERS)
def test_a_hit_is_the_longest_that_can_be_had_and_holds_its_very_tokens(kind: str) -> None:
    random.seed(5)
    tier = LiveTier(1 << 30)
    put: list[list[int]] = []
    for _ in range(150):
        base = random.choice(put)[: random.randrange(1, 30)] if put else []
        tokens = base + [random.randrange(3) for _ in range(random.randrange(1, 20))]
        hit = tier.find(tokens)
        limit = len(tokens) - 1
        shared = [common_tokens(encode(one), encode(tokens)) for one in put]
        if kind == "plain":
            best = max((min(one, limit) for one in shared), default=0)
            assert (hit.length if hit else 0) == best
        if hit is not None:
            assert hit.length <= limit
            caches = tier.take(hit)
            assert caches is not None
            assert held(caches, tokens[: hit.length])
        assert tier.common(tokens) <= max(shared, default=0)
        assert tier.put(tokens, MAKERS[kind](tokens), "final")
        put.append(tokens)
        if len(tokens) > 1:
            again = tier.find([*tokens, 99])
            assert again is not None
            assert again.length == len(tokens)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_borrower_that_writes_changes_no_entry(kind: str) -> None:
    tokens = list(range(6))
    tier = LiveTier(1 << 30)
    tier.put(tokens, MAKERS[kind](tokens))
    for seed in range(3):
        hit = tier.find([*tokens, 7])
        assert hit is not None
        caches = tier.take(hit)
        assert caches is not None
        write(caches, 50 + seed)
        fresh = tier.take(hit)
        assert fresh is not None
        assert held(fresh, tokens)


def write(caches: list[Any], token: int) -> None:
    """Go on with another token, as a model does."""
    for cache in caches:
        if isinstance(cache, CacheList):
            write(list(cache.caches), token)
        elif isinstance(cache, ArraysCache):
            cache[0] = cache[0] + token
        else:
            cache.update_and_fetch(rows([token]), rows([token]))


def test_every_byte_is_counted_once_and_clearing_gives_all_back() -> None:
    tier = LiveTier(1 << 30)
    tokens: list[int] = []
    for turn in range(12):
        tokens = [*tokens, *(turn * 10 + at for at in range(10))]
        tier.put(tokens, MAKERS["hybrid"](tokens), "final")
        arrays = {}
        for entry in tier._entries.values():
            arrays.update({id(array): array.nbytes for array in entry.arrays})
        assert tier.nbytes == sum(arrays.values())
    # A conversation's states share the rows of its longest entry.
    longest = MAKERS["hybrid"](tokens)
    row_bytes = longest[1].keys.nbytes + longest[1].values.nbytes
    assert tier.nbytes < 2 * row_bytes
    tier.clear()
    assert tier.nbytes == len(tier) == 0


def test_anchors_go_last() -> None:
    system = list(range(100, 140))
    size = 4 * sum(one.nbytes for one in (state([1])[0], plain(system).keys, plain(system).values))
    tier = LiveTier(size)
    tier.put(system, MAKERS["hybrid"](system), "anchor")
    for seed in range(20):
        other = [seed, *range(39)]
        tier.put(other, MAKERS["hybrid"](other), "final")
    assert tier.evictions > 0
    hit = tier.find([*system, 1])
    assert hit is not None
    assert hit.length == len(system)


def test_what_cannot_be_kept_is_refused_by_name() -> None:
    tier = LiveTier(1 << 30)

    class Strange(KVCache):
        """Of a class that mlx-lm does not have."""

    with pytest.raises(UnsupportedCache, match="Strange"):
        tier.put([1], [Strange()])
    with pytest.raises(UnsupportedCache, match="holds 3 tokens, its key has 2"):
        tier.put([1, 2], [plain([1, 2, 3])])
    with pytest.raises(UnsupportedCache, match="empty"):
        tier.put([1, 2], [ArraysCache(1)])
    with pytest.raises(UnsupportedCache, match="32 bits"):
        tier.find([1, -5, 2])
    assert len(tier) == 0


def test_shortening_shares_the_arrays() -> None:
    cache = plain([1, 2, 3])
    shorter = shortened(cache, 1)
    assert shorter.keys is cache.keys
    assert (shorter.offset, cache.offset) == (2, 3)


@pytest.mark.parametrize("kind", MAKERS)
def test_whole_only_uses_no_part_of_an_entry(kind: str) -> None:
    tier = LiveTier(1 << 30, whole_only=True)
    tokens = [1, 2, 0, 1, 2, 2, 0, 1]
    assert tier.put(tokens, MAKERS[kind](tokens))
    assert tier.put(tokens[:3], MAKERS[kind](tokens[:3]))
    assert tier.find(tokens) is not None and tier.find(tokens).length == 3  # type: ignore[union-attr]
    assert tier.find([*tokens[:6], 0]) == tier.find([*tokens[:4], 0])
    hit = tier.find([*tokens, 1])
    assert hit is not None and hit.length == len(tokens)
    caches = tier.take(hit)
    assert caches is not None and held(caches, tokens)
