"""The slot table: who is WARM, COLD or MISSING, and every counter exact."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from pion_vllm_mlx.errors import ColdMiss, OutOfMemory
from pion_vllm_mlx.server.attention.shared_blocks import BlockPool, Share
from pion_vllm_mlx.server.attention.slots import Key, Slot, SlotTable
from pion_vllm_mlx.server.memory.attend_index import NotStored


@dataclass
class Rows:
    """K/V that only have a size."""

    rows: int = 10
    derived: int = 0
    heads: int = 1
    tokens: int = 1
    dim: int = 32
    share: Share | None = None

    @property
    def nbytes(self) -> int:
        return self.rows + self.derived

    def shrink(self, most_bytes: int) -> None:
        if self.nbytes > most_bytes:
            self.derived = 0


def of_a_pool(pool: BlockPool, *blocks: int) -> Slot[Rows]:
    """A slot that has nothing but blocks of a pool."""
    share = Share(pool, np.array(blocks, np.int32))
    return Slot(Rows(share.nbytes, share=share))


def key(number: int, owner: str = "s") -> Key:
    return Key(f"{owner}:{number}".encode(), 0)


def slot(nbytes: int = 10, source: bytes = b"") -> Slot[Rows]:
    return Slot(Rows(nbytes), (source,) if source else ())


def states(table: SlotTable[Rows], *numbers: int) -> list[str]:
    return [table.state(key(number)) for number in numbers]


def test_the_least_recently_used_slot_becomes_cold() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=3)
    for number in range(3):
        table.put(key(number), slot())
    table.touch(key(0), table.find(key(0)))
    assert table.state(key(1)) == "HIT"  # asking is no access
    table.put(key(3), slot())
    assert states(table, 0, 1, 2, 3, 4) == ["HIT", "COLD", "HIT", "HIT", "MISS"]
    assert table.counters.demotions == 1
    with pytest.raises(ColdMiss):
        table.find(key(1))
    with pytest.raises(NotStored):
        table.find(key(4))


def test_only_warming_a_cold_key_counts_as_rehydrated() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=1)
    table.put(key(0), slot(), rehydrates=True)  # was missing
    table.put(key(1), slot())
    table.put(key(0), slot())  # a store: 0 was cold
    assert table.counters.rehydrates == 0
    table.put(key(1), slot(), rehydrates=True)
    table.put(key(1), slot(), rehydrates=True)  # is warm
    assert table.counters.rehydrates == 1
    assert states(table, 0, 1) == ["COLD", "HIT"] and len(table.cold) == 1


def test_the_oldest_cold_entry_is_missing_when_the_registry_is_full() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=1, max_cold=2)
    for number in range(4):
        table.put(key(number), slot())
    assert states(table, 0, 1, 2, 3) == ["MISS", "COLD", "COLD", "HIT"]
    table.put(key(1), slot())
    assert states(table, 0, 1, 2, 3) == ["MISS", "HIT", "COLD", "COLD"]
    assert table.counters.demotions == 4


def test_the_budget_demotes_until_it_fits_and_never_what_has_just_come() -> None:
    table: SlotTable[Rows] = SlotTable(budget=30)
    for number in range(3):
        table.put(key(number), slot())
    table.put(key(3), slot(15))
    assert states(table, 0, 1, 2, 3) == ["COLD", "COLD", "HIT", "HIT"]
    table.put(key(4), slot(30))
    assert states(table, 2, 3, 4) == ["COLD", "COLD", "HIT"] and table.nbytes == 30
    with pytest.raises(OutOfMemory):
        table.put(key(4), slot(31))
    assert states(table, 4) == ["HIT"] and table.nbytes == 30


def test_what_a_query_derives_counts_against_the_budget() -> None:
    table: SlotTable[Rows] = SlotTable(budget=25)
    table.put(key(0), slot())
    table.put(key(1), slot())
    table.find(key(1)).held.derived = 10
    table.fit(key(1))
    assert states(table, 0, 1) == ["COLD", "HIT"] and table.nbytes == 20
    table.find(key(1)).held.derived = 89
    table.fit(key(1))
    assert states(table, 1) == ["HIT"] and table.nbytes == 10


def test_what_a_query_derives_and_cannot_fit_pushes_out_nobody() -> None:
    table: SlotTable[Rows] = SlotTable(budget=25)
    table.put(key(0), slot())
    table.put(key(1), slot())
    table.find(key(1)).held.derived = 16
    table.fit(key(1))
    assert states(table, 0, 1) == ["HIT", "HIT"] and table.nbytes == 20


def test_what_a_query_derives_stays_within_its_owners_quota() -> None:
    table: SlotTable[Rows] = SlotTable()
    table.owner = lambda sid: sid[:1]
    table.quota = lambda owner: 25 if owner == b"a" else 0
    for number in range(2):
        table.put(key(number, "a"), slot())
        table.put(key(number, "b"), slot(100))
    table.find(key(1, "a")).held.derived = 16
    table.fit(key(1, "a"))
    assert table.nbytes == 220 and len(table.warm) == 4
    table.find(key(1, "a")).held.derived = 15
    table.fit(key(1, "a"))
    assert table.nbytes == 225 and table.state(key(0, "a")) == "COLD"


def test_an_answer_from_a_replaced_slot_is_no_access_to_the_new_one() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=2)
    table.put(key(0), slot())
    old = table.find(key(0))
    table.put(key(0), slot())
    table.put(key(1), slot())
    table.touch(key(0), old)
    table.put(key(2), slot())
    assert states(table, 0, 1, 2) == ["COLD", "HIT", "HIT"]


def test_the_owner_with_the_most_gives_first() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=4, max_cold=2)
    table.owner = lambda sid: sid[:1]
    table.put(key(0, "quiet"), slot())
    for number in range(8):
        table.put(key(number, "busy"), slot())
    assert table.state(key(0, "quiet")) == "HIT"
    assert [k.sid for k in table.warm if k.sid.startswith(b"busy")] == [
        b"busy:5",
        b"busy:6",
        b"busy:7",
    ]
    table.put(key(1, "quiet"), slot())
    assert [table.state(key(n, "quiet")) for n in (0, 1)] == ["HIT", "HIT"]


def test_the_owner_with_the_most_bytes_gives_first() -> None:
    table: SlotTable[Rows] = SlotTable(budget=100)
    table.owner = lambda sid: sid[:1]
    table.put(key(0, "big"), slot(80))
    for number in range(3):
        table.put(key(number, "small"), slot(10))
    assert table.state(key(0, "big")) == "COLD" and len(table.warm) == 3


def test_past_its_quota_an_owner_gives_its_own_and_no_other_does() -> None:
    table: SlotTable[Rows] = SlotTable()
    table.owner = lambda sid: sid[:1]
    table.quota = lambda owner: 30 if owner == b"a" else 0
    for number in range(5):
        table.put(key(number, "b"), slot(100))
    for number in range(5):
        table.put(key(number, "a"), slot())
    assert [table.state(key(n, "a")) for n in range(5)] == ["COLD"] * 2 + ["HIT"] * 3
    assert [table.state(key(n, "b")) for n in range(5)] == ["HIT"] * 5
    table.put(key(3, "a"), slot(30))
    assert [table.state(key(n, "a")) for n in range(5)] == ["COLD"] * 3 + ["HIT", "COLD"]
    with pytest.raises(OutOfMemory, match="the quota of 30 bytes does not allow this store"):
        table.put(key(3, "a"), slot(31))
    assert table.state(key(3, "a")) == "HIT" and table.nbytes == 530


def test_what_is_spared_comes_from_the_owner_with_the_most_bytes() -> None:
    table: SlotTable[Rows] = SlotTable()
    table.owner = lambda sid: sid[:1]
    table.put(key(0, "small"), slot(10))
    for number in range(4):
        table.put(key(number, "big"), slot(30))
    table.spare(31)
    assert [table.state(key(n, "big")) for n in range(4)] == ["COLD"] * 2 + ["HIT"] * 2
    assert table.state(key(0, "small")) == "HIT"
    table.spare(1000)
    assert not table.warm


def test_a_dropped_namespace_takes_its_sessions_and_what_was_made_of_it() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=4)
    names = [b"ns", b"ns_attn", b"other", b"ns2", b"ns", b"mine"]
    table.put(Key(b"ns_attn:4711", 0), slot())
    table.put(Key(b"ns2_attn:4711", 0), slot())
    for layer, name in enumerate(names):
        source = b"ns" if name == b"mine" else b""
        table.put(Key(name, layer), slot(source=source))
    assert [table.state(Key(n, i)) for i, n in enumerate(names)] == ["COLD"] * 2 + ["HIT"] * 4
    table.forget([b"ns"])
    found = [table.state(Key(n, i)) for i, n in enumerate(names)]
    assert found == ["MISS", "MISS", "HIT", "HIT", "MISS", "MISS"]
    by_content = [table.state(Key(name, 0)) for name in (b"ns_attn:4711", b"ns2_attn:4711")]
    assert by_content == ["MISS", "COLD"]


def test_a_shape_is_told_of_what_is_warm_and_of_what_was() -> None:
    table: SlotTable[Rows] = SlotTable(max_warm=1)
    table.put(key(0), slot())
    shape = table.shape(key(0))
    table.put(key(1), slot())
    assert table.state(key(0)) == "COLD" and table.shape(key(0)) == shape != (0, 0, 0)
    assert table.shape(key(2)) == (0, 0, 0)


def test_shared_blocks_count_once_and_come_free_with_the_last_of_their_slots() -> None:
    table: SlotTable[Rows] = SlotTable(budget=1000)
    loose: list[BlockPool] = []
    table.on_loose = loose.append
    pool = BlockPool(6, 100)
    table.put(key(0), of_a_pool(pool, 0, 1, 2))
    table.put(key(1), of_a_pool(pool, 0, 1, 3))
    table.put(key(2), of_a_pool(pool, 0, 4, 5))
    table.put(key(3), slot(50))
    assert table.nbytes == 650 and not pool.is_loose and not loose
    table.put(key(4), slot(400))  # 1,050: the first one has 100 that nobody else has
    assert states(table, 0, 1, 2, 3, 4) == ["COLD", "HIT", "HIT", "HIT", "HIT"]
    assert table.nbytes == 950 and loose == [pool] and pool.is_loose
    # laid out again
    tight = BlockPool(5, 100)
    table.exchange(table.find(key(1)), of_a_pool(tight, 0, 1, 2).held)
    table.exchange(table.find(key(2)), of_a_pool(tight, 0, 3, 4).held)
    assert table.nbytes == 950 and not tight.is_loose and not pool.slots
    table.put(key(2), slot(1))
    assert table.nbytes == 751 and loose == [pool, tight]
    table.forget([key(1).sid])
    assert table.nbytes == 451 and not tight.slots


def test_memory_that_is_wanted_is_that_of_whole_pools() -> None:
    table: SlotTable[Rows] = SlotTable()
    pool = BlockPool(4, 100)
    table.put(key(0), of_a_pool(pool, 0, 1, 2))
    table.put(key(1), of_a_pool(pool, 0, 1, 3))
    table.put(key(2), slot(30))
    table.put(key(3), slot(30))
    table.spare(1)  # the first one alone would leave all of its pool in memory
    assert states(table, 0, 1, 2, 3) == ["COLD", "COLD", "HIT", "HIT"]


def test_of_an_owner_shared_blocks_weigh_once() -> None:
    table: SlotTable[Rows] = SlotTable(budget=1000)
    table.owner = lambda sid: sid.partition(b":")[0]
    table.quota = lambda owner: 0 if owner == b"big" else 500
    pool = BlockPool(5, 100)
    table.put(key(0), of_a_pool(pool, 0, 1, 2, 3))
    table.put(key(1), of_a_pool(pool, 0, 1, 2, 4))
    assert table.nbytes == 500
    table.put(key(0, "big"), slot(450))
    assert states(table, 0, 1) == ["HIT", "HIT"]
    table.put(key(1, "big"), slot(60))  # 1,010: the owner with 510 gives, not the one with 500
    assert states(table, 0, 1) == ["HIT", "HIT"] and table.state(key(0, "big")) == "COLD"
    table.put(key(2), slot(100))  # past the quota
    assert states(table, 0, 1, 2) == ["COLD", "HIT", "HIT"] and table.nbytes == 560
