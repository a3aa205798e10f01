"""The in-process tier gives nothing up before it is written, while there is room beside it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache

from pion_vllm_mlx.cache import live_unwritten
from pion_vllm_mlx.cache.live_tier import MAX_CHECKPOINTS
from pion_vllm_mlx.cache.live_unwritten import UnwrittenTier

ROOM = 10**9
Over = Callable[[], None]


def plain(length: int) -> list[Any]:
    cache = KVCache()
    rows = mx.zeros((1, 1, length, 8))
    cache.update_and_fetch(rows, rows)
    return [cache]


def hybrid(length: int) -> list[Any]:
    state = ArraysCache(1)
    state[0] = mx.full((1, 64), float(length))
    return [state, *plain(length)]


def ids(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def nothing(arrays: object) -> None:
    """All of it is computed already."""


def keep(tier: UnwrittenTier, tokens: list[int], make: Callable[[int], list[Any]]) -> Over:
    """Has something kept and held; what comes back says that it is written."""
    caches = make(len(tokens))
    tier.put(tokens, caches, schedule=nothing)
    return tier.hold(tokens, caches, "final", nothing)


def found(tier: UnwrittenTier, tokens: list[int]) -> int:
    hit = tier.find([*tokens, 99])
    return hit.length if hit is not None else 0


def test_states_beyond_the_most_of_a_conversation_are_found_while_they_wait() -> None:
    tier = UnwrittenTier(ROOM, aside_bytes=ROOM)
    lengths = [10 + 2 * turn for turn in range(3 * MAX_CHECKPOINTS)]
    overs = [keep(tier, ids(length), hybrid) for length in lengths]
    assert len(tier) == MAX_CHECKPOINTS
    for length in lengths:
        assert found(tier, ids(length)) == length
        assert tier.lost(ids(length)) == 0
        caches = tier.take(tier.find([*ids(length), 99]))  # type: ignore[arg-type]
        assert caches is not None
        assert (caches[0].cache[0][0, 0].item(), caches[1].offset) == (length, length)
    for over in overs:
        over()
    assert not tier.told()["unwritten_bytes"] and len(tier) == MAX_CHECKPOINTS
    assert found(tier, ids(lengths[-1])) == lengths[-1]
    assert found(tier, ids(lengths[0])) == 0


def test_states_for_which_there_is_no_room_beside_are_said_to_be_lost() -> None:
    tier = UnwrittenTier(ROOM, aside_bytes=1)
    overs = [keep(tier, ids(10 + turn), hybrid) for turn in range(MAX_CHECKPOINTS + 1)]
    assert found(tier, ids(10)) == 0 and tier.lost(ids(10)) == 10
    for over in overs:
        over()
    assert tier.lost(ids(10)) == 0


def size(*lengths: int) -> int:
    return sum(cache.nbytes for length in lengths for cache in plain(length))


@pytest.mark.parametrize("released", ["first", "before memory has no room"])
def test_who_waits_is_found_in_the_longer_one_that_is_not_to_be_written(released: str) -> None:
    tier = UnwrittenTier(size(200), aside_bytes=ROOM)
    shorter, longer = ids(20), ids(30)
    over, refused = keep(tier, shorter, plain), keep(tier, longer, plain)
    if released == "first":
        tier.put(ids(200, 1000), plain(200))
        refused()
    else:
        refused()
        tier.put(ids(200, 1000), plain(200))
    assert found(tier, shorter) == 20
    over()
    over()
    assert not tier.told()["unwritten_bytes"] and found(tier, shorter) == 0


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("lent", [True, False])
def test_what_memory_refuses_is_computed_where_nobody_else_has_it_computed(
    lent: bool, given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_unwritten, "can_be_lent", lambda: lent)
    tier = UnwrittenTier(1, aside_bytes=ROOM)
    scheduled: list[mx.array] = []
    caches = plain(20)
    assert not tier.put(ids(20), caches, schedule=scheduled.extend)
    over = tier.hold(ids(20), caches, "final", scheduled.extend, given=given)
    assert len(scheduled) == (0 if lent and given else 2)
    over()


@pytest.mark.parametrize("make", [plain, hybrid])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_waits_is_found_whoever_is_written_first(
    seed: int, make: Callable[[int], list[Any]]
) -> None:
    chance = random.Random(seed)
    tier = UnwrittenTier(size(64) * 4, aside_bytes=ROOM)
    waiting: dict[tuple[int, ...], list[Over]] = {}
    for _ in range(150):
        if waiting and chance.random() < 0.4:
            tokens = chance.choice(list(waiting))
            waiting[tokens].pop()()
            if not waiting[tokens]:
                del waiting[tokens]
        else:
            tokens = tuple(ids(chance.randint(5, 60), 1000 * chance.randint(0, 3)))
            waiting.setdefault(tokens, []).append(keep(tier, list(tokens), make))
        for tokens in waiting:
            assert found(tier, list(tokens)) == len(tokens)
            assert not tier.lost(list(tokens)) or make is plain
    for overs in waiting.values():
        for over in overs:
            over()
    assert not tier.told()["unwritten_bytes"] and not len(tier._aside)
