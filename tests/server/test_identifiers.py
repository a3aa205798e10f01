"""Ids name what they name, once, and do not count what is there."""

from __future__ import annotations

import time

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


def test_points_of_one_owner_are_counted_without_those_of_others() -> None:
    ids = RollbackIds({b"a", b"b"})
    first = ids.next(b"a:s")
    assert first > 0
    for sid in (b"b:s", b"s", b"b:other", b"c:s"):
        ids.next(sid)
    assert ids.next(b"a:s") == first + 1
    assert ids.next(b"a:other") == first + 2
    assert ids.next(b"c:s") == ids.next(b"s") - 1  # c is no tenant: both are the admin's
