"""Ids name what they name, once, and do not count what is there."""

from __future__ import annotations

import time

import pytest

from pion_vllm_mlx.server.identifiers import ClientIds, RollbackIds


def test_ids_of_connections_grow_and_no_two_workers_give_out_the_same() -> None:
    workers = [ClientIds(worker, 3) for worker in range(3)]
    given = [[ids.next() for _ in range(1000)] for ids in workers]
    for mine in given:
        assert mine == sorted(set(mine))
    assert len({one for mine in given for one in mine}) == 3000


def test_the_id_of_a_connection_is_the_time_it_came() -> None:
    ids = ClientIds()
    ids.next()
    time.sleep(0.001)
    before = time.time_ns() // 1000
    assert before <= ids.next() <= time.time_ns() // 1000


def test_points_grow_and_say_nothing_of_how_many_there_are() -> None:
    ids = RollbackIds({b"a", b"b"})
    mine = []
    for _ in range(100):
        before = time.time_ns() // 1000
        mine.append(ids.next(b"a:s"))
        assert before <= mine[-1] <= time.time_ns() // 1000 + len(mine)
        for sid in (b"b:s", b"s", b"a:other", b"c:s"):
            ids.next(sid)
        time.sleep(0.0001)
    assert mine == sorted(set(mine))
    first, second = ids.next(b"a:new"), ids.next(b"a:s")
    assert mine[-1] < first < second


def test_points_of_others_do_not_show_when_the_clock_is_set_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = RollbackIds({b"a", b"b"})
    first = ids.next(b"a:s")
    for _ in range(5):
        ids.next(b"b:s")
    monkeypatch.setattr("pion_vllm_mlx.server.identifiers._microseconds", lambda: 1)
    assert ids.next(b"a:s") == first + 1
