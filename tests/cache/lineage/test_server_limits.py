"""Limits of the store's server below our own budget: conversations leave leaf first."""

from __future__ import annotations

import copy
import json
from contextlib import closing
from typing import Any

import pytest

from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.lineage import LineageStore
from tests.cache.lineage.driving import Engine, fresh_cache, open_store, prompt, same_reply
from tests.conftest import RunningServer
from tests.models import tiny_model

SYSTEM, OWN, TALKS = 900, 600, 12
LIMIT = ("--disk-budget", str(6 << 20))
"""Conversations are of 8 MB together."""


class Talks:
    """Conversations on one system prompt, which memory has from the first on."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.system = prompt(SYSTEM, 1)
        self.base = fresh_cache(model)
        Engine(model, None).forward(self.system, self.base)

    def ids(self, seed: int) -> list[int]:
        return [*self.system, *prompt(OWN, 100 + seed)]

    def keep(self, store: LineageStore, seed: int, anchor: int | None) -> None:
        """Has one stored; of the system prompt nothing is read from the store."""
        ids, caches = self.ids(seed), copy.deepcopy(self.base)
        Engine(self.model, None).forward(ids[SYSTEM:], caches)
        store.cuts(ids, store.match(ids), anchor)
        store.keep(ids, caches)
        assert store.flush(60)

    def reused(self, store: LineageStore, seed: int) -> int:
        turn = Engine(self.model, store).turn(self.ids(seed), reply=1, anchor=SYSTEM)
        wanted = Engine(self.model, None).turn(self.ids(seed), reply=1)
        same_reply(turn, wanted, 1e-3)
        return turn.reused


@pytest.mark.parametrize("anchor", [SYSTEM, None])
def test_a_server_short_of_room_evicts_leaves_and_what_they_share_last(
    anchor: int | None, own: RunningServer
) -> None:
    own.restart(*LIMIT)
    model = tiny_model("llama")
    talks = Talks(model)
    with closing(open_store(model, own)) as store:
        for seed in range(TALKS):
            talks.keep(store, seed, anchor)
        assert store.stats().get("failed", 0) == 0, store.stats()
    own.restart(*LIMIT)
    with closing(open_store(model, own)) as store:
        assert talks.reused(store, TALKS - 1) == SYSTEM + OWN - 1
        # without an anchor the first one is what the others stand on
        oldest = 0 if anchor else 1
        assert store.match(talks.ids(oldest)).common < SYSTEM + 20, "the oldest had to go"
        assert talks.reused(store, oldest) >= SYSTEM
        assert store.flush(60)
        assert store.stats().get("damaged", 0) == store.stats().get("restore_failures", 0) == 0


def test_what_the_server_evicted_is_a_miss_that_says_so_and_no_damage(own: RunningServer) -> None:
    own.restart(*LIMIT)
    model = tiny_model("llama")
    talks = Talks(model)
    with closing(open_store(model, own)) as store:
        for seed in range(TALKS):
            talks.keep(store, seed, SYSTEM)
        oldest = talks.ids(0)
        match = store.match(oldest)
        assert match.length == match.common < len(oldest) == match.withheld
        assert "server evicted it" in match.why and f"from token {match.common} on" in match.why
        assert "server evicted it" in store.explain(oldest).sentence
        talks.keep(store, 0, SYSTEM)
        stats = store.stats()
        assert stats["evicted_by_server"] >= 1 and "damaged" not in stats, stats
        assert talks.reused(store, 0) == len(oldest) - 1


def test_a_root_that_went_takes_nothing_else_for_damaged_with_it(own: RunningServer) -> None:
    """Whoever made the server give it up."""
    model = tiny_model("llama")
    talks = Talks(model)
    with closing(open_store(model, own)) as store:
        for seed in range(3):
            talks.keep(store, seed, SYSTEM)
        names = store._key.names
        with RespConnection(Address(port=own.port)) as by_hand:
            assert by_hand.command("KV.PREFIX.DROP", names.namespace(1)) == 1
            why = json.loads(by_hand.command("KV.PREFIX.EXPLAIN", names.namespace(1)))["reason"]
        match = store.match(talks.ids(2))
        assert match.length == 0 and why in match.why
        assert talks.reused(store, 2) == 0
        assert store.flush(60)
        stats = store.stats()
        assert "damaged" not in stats and stats["gone"] >= 1, stats
        left = {one.id for one in store.conversations()}
        assert len(left) <= 2, "what stood on it is gone from the index, too"
        assert talks.reused(store, 2) == SYSTEM + OWN - 1


def test_an_anchor_leaves_the_server_after_all_that_is_no_anchor(own: RunningServer) -> None:
    own.restart(*LIMIT)
    model = tiny_model("llama")
    talks = Talks(model)
    with closing(open_store(model, own)) as store:
        talks.keep(store, 0, SYSTEM)
        for seed in range(TALKS):
            Engine(model, store).turn(prompt(700, 500 + seed), reply=1)
            assert store.flush(60)
        assert store.match(talks.ids(1)).length == SYSTEM
        assert store.match([*prompt(700, 500), 1]).length == 0


def test_what_memory_serves_counts_as_used_from_time_to_time(own: RunningServer) -> None:
    """Else it would be the first to go; and not with every request."""
    model = tiny_model("llama")
    with closing(open_store(model, own)) as store:
        system, ids = prompt(100, 1), [*prompt(100, 1), *prompt(50, 2)]
        Engine(model, store).turn(ids, reply=1, anchor=100)
        assert store.flush()
        names = store._key.names
        members = [names.member(number) for number in (1, 2)]

        def used() -> list[float]:
            scores = [("ZSCORE", "pps:lru", member) for member in members]
            return [float(one) for one in store._front.demand("x", scores)]

        def served_by_memory() -> None:
            store._front.demand("x", [("ZADD", "pps:lru", 5, members[0], 5, members[1])])
            store.recheck(ids)
            assert store.flush()

        served_by_memory()
        assert min(used()) > 1e9 and len(set(used())) == 1, "the whole chain, with one time"
        served_by_memory()
        assert used() == [5, 5]
        assert store.match(system).common == 100
