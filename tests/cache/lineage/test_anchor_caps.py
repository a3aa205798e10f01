"""Anchors within their caps stay, fairly; what writers that died left behind goes."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import pytest

from pion_vllm_mlx.cache.lineage.budget import ANCHOR_SHARE, Budget, Member
from pion_vllm_mlx.cache.lineage.index import Names
from pion_vllm_mlx.cache.lineage.policy import MOST_ANCHOR_BYTES, MOST_ANCHORS
from pion_vllm_mlx.cache.lineage.publish import ORPHAN_SECONDS, Publisher
from pion_vllm_mlx.cache.store_client import Registration
from tests.cache.lineage.conftest import Opener
from tests.cache.lineage.driving import Engine, open_store, prompt
from tests.conftest import RunningServer
from tests.models import tiny_model

ROW_BYTES = 2 * 2 * 2 * 32 * 4  # layers, sides, heads, width, float32
SYSTEM = 100


def members(*anchors: tuple[str, int]) -> list[Member]:
    """Anchors of these models and sizes, the least recently used first."""
    return [
        Member(mid, number, size, float(number), anchor=True)
        for number, (mid, size) in enumerate(anchors)
    ]


def protected(budget_bytes: int, held: list[Member]) -> list[int]:
    budget: Any = Budget(None, Names("x"), budget_bytes)  # type: ignore[arg-type]  # asks nobody
    return sorted(member.number for member in budget._protected(held))


def test_sixteen_anchors_are_protected_the_latest_used() -> None:
    assert protected(0, members(*[("a", 1)] * 20)) == list(range(4, 20))
    assert MOST_ANCHORS == 16


def test_anchors_are_protected_up_to_sixteen_gigabytes_and_a_third_of_the_budget() -> None:
    gigabytes = 10**9
    assert MOST_ANCHOR_BYTES == 16 * gigabytes and ANCHOR_SHARE == 3
    assert protected(0, members(*[("a", 5 * gigabytes)] * 5)) == [2, 3, 4]
    assert protected(30 * gigabytes, members(*[("a", 5 * gigabytes)] * 5)) == [3, 4]
    assert protected(300, members(("a", 60), ("a", 101), ("a", 40))) == [0, 2]


def test_of_each_model_and_user_the_latest_anchor_comes_first() -> None:
    held = members(("quiet", 1), ("other", 1), *[("busy", 1)] * 20)
    assert protected(0, held) == [0, 1, *range(8, 22)]


def asked(engine: Engine, seed: int) -> None:
    """A request with a system prompt of its own."""
    ids = [*prompt(SYSTEM, 1000 + seed), *prompt(40, 2000 + seed)]
    engine.turn(ids, reply=1, anchor=SYSTEM)
    assert engine.store is not None and engine.store.flush(60)


def test_a_busy_api_key_does_not_throw_out_the_system_prompt_of_another(
    own: RunningServer,
) -> None:
    """Whatever of its conversations: these go by their last use, whoever's they are."""
    model = tiny_model("llama")
    budget = 60 * SYSTEM * ROW_BYTES  # a third of it is more than all anchors
    quiet = open_store(model, own, budget_bytes=budget, key_parts={"tenant": "quiet"})
    busy = open_store(model, own, budget_bytes=budget, key_parts={"tenant": "busy"})
    with closing(quiet), closing(busy):
        asked(Engine(model, quiet), 0)
        for seed in range(1, MOST_ANCHORS + 3):
            asked(Engine(model, busy), seed)
        for seed in range(12):
            Engine(model, busy).turn(prompt(500, 3000 + seed), reply=1)
            assert busy.flush(60)
        assert busy.stats()["evicted"] >= 4
        ids = [*prompt(SYSTEM, 1000), *prompt(40, 2000)]
        assert quiet.match(ids).common == SYSTEM, "its conversation went, its system prompt not"
        first = [*prompt(SYSTEM, 1001), *prompt(40, 2001)]
        assert busy.match(first).common == 0, "beyond sixteen they are like everything else"


@pytest.mark.parametrize("age", [ORPHAN_SECONDS + 60, 60])
def test_what_a_writer_left_that_died_goes_after_an_hour(age: float, opened: Opener) -> None:
    model = tiny_model("llama")
    writer = opened(model, key_parts={"age": str(age)})
    Engine(model, writer).turn(prompt(100, 5), reply=1)
    assert writer.flush()
    names, client = writer._key.names, writer._front
    number = Publisher(client, names).reserve()
    namespace = names.namespace(number)
    client.register(namespace, Registration.of([]))
    client.demand("x", [("ZADD", names.key("loose"), f"{time.time() - age:.3f}", namespace)])

    def there() -> bool:
        (reply,) = client.demand(namespace, [("KV.PREFIX.OWNER", namespace)])
        return int(reply) >= 0

    assert there()
    second = opened(model, key_parts={"age": str(age)})
    Engine(model, second).turn(prompt(100, 6), reply=1)
    assert second.flush()
    assert there() == (age < ORPHAN_SECONDS)
    assert Engine(model, second).turn(prompt(100, 5), reply=1).reused == 99
