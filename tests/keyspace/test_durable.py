"""Keys that were acknowledged are there after any end of the process, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pion_vllm_mlx.errors import CommandError, DamagedData, NewerFormat
from pion_vllm_mlx.server.keyspace import changes as log_format
from pion_vllm_mlx.server.keyspace.changes import (
    PIECE_BYTES,
    Assembler,
    Change,
    Verb,
    change,
    decode,
    pieces,
)
from pion_vllm_mlx.server.keyspace.data import Data, Entry, Overlay
from pion_vllm_mlx.server.keyspace.keyspace import Keyspace
from pion_vllm_mlx.server.keyspace.recovery import SNAPSHOT_MAGIC, WAL_MAGIC, Paths, recover
from pion_vllm_mlx.server.keyspace.standing import Standing
from pion_vllm_mlx.server.keyspace.values import SortedSet
from pion_vllm_mlx.server.store import framing
from pion_vllm_mlx.server.store.config import StoreConfig
from tests.recovery.faults import failing

WAL, SNAPSHOT = "pion.wal.0", "pion.snapshot.0"
NOW = 1_900_000_000_000

#: one step with every verb of the log; a later one changes what an earlier one made
SCRIPT: list[list[Change]] = [
    [change(Verb.SET, b"s", b"\x01\x02\xff")],
    [change(Verb.SET, b"t", b"1"), change(Verb.DEADLINE, b"t", b"%d" % (NOW + 5000))],
    [change(Verb.APPEND, b"s", b"more")],
    [change(Verb.HSET, b"h", b"a", b"1", b"b", b"2")],
    [change(Verb.ZADD, b"z", b"m", (0.1).hex().encode(), b"n", b"inf")],
    [change(Verb.SADD, b"set", b"x", b"y")],
    [change(Verb.RPUSH, b"l", b"1", b"2", b"3"), change(Verb.LPUSH, b"l", b"0", b"-1")],
    [change(Verb.HDEL, b"h", b"a")],
    [change(Verb.ZREM, b"z", b"n")],
    [change(Verb.SREM, b"set", b"x")],
    [change(Verb.LPOP, b"l", b"2"), change(Verb.RPOP, b"l", b"1")],
    [change(Verb.RENAME, b"t", b"u")],
    [change(Verb.SET, b"t", b"x"), change(Verb.DELETE, b"h", b"set")],
    [change(Verb.FLUSH)],
    [change(Verb.SET, b"after", b"flush")],
]
KEYS = st.sampled_from([b"a", b"b", b"c"])
Content = dict[bytes, tuple[Any, int]]


def content(data: Data) -> Content:
    """Every key with its value and deadline."""
    return {
        key: (e.value.scores if isinstance(e.value, SortedSet) else e.value, e.deadline)
        for key, e in data.entries.items()
    }


class Keys:
    """One start of a keyspace on a folder, without a server around it."""

    def __init__(self, folder: Path, salvage: bool = False, wal: bool = True) -> None:
        self.loop = asyncio.new_event_loop()
        config = StoreConfig(folder, wal=wal, appendfsync="no", salvage=salvage)
        try:
            self.keyspace = self.loop.run_until_complete(self._open(config))
        except BaseException:
            self.loop.close()
            raise
        self.keyspace.clock = lambda: NOW

    async def _open(self, config: StoreConfig) -> Keyspace:
        return Keyspace.open(config)

    def __enter__(self) -> Keys:
        return self

    def __exit__(self, *exc: object) -> None:
        self.keyspace._thread.shutdown()
        self.loop.close()

    def do(self, changes: list[Change]) -> None:
        self.loop.run_until_complete(self.keyspace.commit(lambda: changes))

    def save(self) -> None:
        self.loop.run_until_complete(self.keyspace.save())

    @property
    def content(self) -> Content:
        return content(self.keyspace.data)


MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty data folder, where flushing costs nothing if the system has such a place."""
    place = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=place, prefix="pion-test-") as name:
        path = Path(name) / "data"
        path.mkdir(mode=0o700)
        yield path


@pytest.fixture
def fresh(folder: Path) -> Callable[[], Path]:
    """Copies of the folder, each in the place of the one before."""
    place = folder.with_name("copy")

    def copy() -> Path:
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(folder, place)
        return place

    return copy


def run(folder: Path, save_after: int = -1) -> list[Content]:
    """Carry out the script; what there was before it and after each step."""
    with Keys(folder) as keys:
        seen = [keys.content]
        for number, changes in enumerate(SCRIPT):
            keys.do(changes)
            seen.append(content_copy(keys.content))
            if number == save_after:
                keys.save()
    return seen


def content_copy(found: Content) -> Content:
    return {k: (v if isinstance(v, bytes) else v.copy(), d) for k, (v, d) in found.items()}


def fits(keys: Keys, changes: list[Change]) -> bool:
    """Whether the changes can be made, now that one before them was perhaps refused."""
    trial = Overlay(keys.keyspace.data, NOW)
    try:
        for one in changes:
            trial.apply(one)
    except DamagedData:
        return False
    return True


def reopened(folder: Path, salvage: bool = False) -> Content:
    with Keys(folder, salvage) as keys:
        return keys.content


@pytest.mark.parametrize("step", range(len(SCRIPT)))
def test_every_kind_of_change_comes_back_from_the_log_and_from_the_snapshot(
    folder: Path, fresh: Callable[[], Path], step: int
) -> None:
    with Keys(folder) as keys:
        for changes in SCRIPT[: step + 1]:
            keys.do(changes)
        expected = keys.content
        assert reopened(fresh()) == expected
        keys.save()
        assert (folder / WAL).stat().st_size == 0
        assert reopened(fresh()) == expected
        assert not (folder / f"{SNAPSHOT}.tmp").exists()


def test_a_save_in_the_middle_and_a_log_behind_it_are_one_history(folder: Path) -> None:
    for save_after in range(len(SCRIPT)):
        shutil.rmtree(folder)
        folder.mkdir()
        seen = run(folder, save_after)
        assert reopened(folder) == seen[-1]


def test_a_log_cut_at_any_byte_holds_what_was_acknowledged_before_and_goes_on(
    folder: Path, fresh: Callable[[], Path]
) -> None:
    seen = run(folder)
    frames = framing.scan(memoryview((folder / WAL).read_bytes()), WAL_MAGIC, WAL).frames
    ends = [frame.payload_offset + len(frame.payload) for frame in frames]
    for size in range((folder / WAL).stat().st_size + 1):
        copy = fresh()
        os.truncate(copy / WAL, size)
        complete = sum(1 for end in ends if end <= size)
        with Keys(copy) as keys:
            assert keys.content == seen[complete], size
            keys.do([change(Verb.SET, b"later", b"v")])
        assert reopened(copy)[b"later"] == (b"v", 0)


def test_any_flipped_bit_of_a_log_is_damage_or_a_torn_end_never_other_data(
    folder: Path, fresh: Callable[[], Path]
) -> None:
    seen = run(folder)
    size = (folder / WAL).stat().st_size
    refused = 0
    for position in range(size):
        copy = fresh()
        flip(copy / WAL, position)
        try:
            assert reopened(copy) in seen, position
        except (DamagedData, NewerFormat):
            refused += 1
            assert reopened(copy, salvage=True) in seen, position
            assert list(copy.glob(f"{WAL}.damaged-*")), position
    assert refused > size // 2


def test_any_flipped_bit_of_a_snapshot_is_refused_and_set_aside_by_a_repair(
    folder: Path, fresh: Callable[[], Path]
) -> None:
    with Keys(folder) as keys:
        for changes in SCRIPT[:7]:
            keys.do(changes)
        keys.save()
    for position in range((folder / SNAPSHOT).stat().st_size):
        copy = fresh()
        flip(copy / SNAPSHOT, position)
        if 28 <= position < 32:
            continue  # four bytes of the header mean nothing
        with pytest.raises((DamagedData, NewerFormat)):
            reopened(copy)
        if position in range(8, 12):
            continue  # a newer version is never repaired away
        assert reopened(copy, salvage=True) == {}
        assert list(copy.glob(f"{SNAPSHOT}.damaged-*"))
        assert reopened(copy) == {}


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def test_a_snapshot_cut_anywhere_is_refused(folder: Path, fresh: Callable[[], Path]) -> None:
    with Keys(folder) as keys:
        keys.do(SCRIPT[3])
        keys.save()
    for size in range((folder / SNAPSHOT).stat().st_size):
        copy = fresh()
        os.truncate(copy / SNAPSHOT, size)
        with pytest.raises(DamagedData):
            reopened(copy)


def test_a_newer_log_is_refused_by_name(folder: Path) -> None:
    run(folder)
    for name, magic in ((WAL, WAL_MAGIC), (SNAPSHOT, SNAPSHOT_MAGIC)):
        newer = framing._HEADER.pack(magic, 2, 0, 0)
        data = newer + framing._TAIL.pack(framing.crc32c(newer), 0)
        (folder / name).write_bytes(data)
        with pytest.raises(NewerFormat, match=name):
            reopened(folder)
        (folder / name).unlink()


def test_whatever_call_of_the_system_fails_a_refused_change_is_not_there_and_others_are(
    folder: Path,
) -> None:
    for fail_at in range(1000):
        shutil.rmtree(folder)
        folder.mkdir()
        with Keys(folder) as keys:
            with failing(fail_at) as faults:
                for number, changes in enumerate(SCRIPT):
                    before = content_copy(keys.content)
                    try:
                        if fits(keys, changes):
                            keys.do(changes)
                    except CommandError:
                        assert keys.content == before
                    if number == 6:
                        with contextlib.suppress(CommandError):
                            keys.save()
            final = keys.content
        assert reopened(folder) == final, (fail_at, faults.failed)
        if not faults.failed:
            break
    assert fail_at > 10


def test_a_change_longer_than_a_piece_is_there_whole_or_not_at_all(
    folder: Path, fresh: Callable[[], Path]
) -> None:
    long = os.urandom(2 * PIECE_BYTES + 5)
    with Keys(folder) as keys:
        keys.do([change(Verb.SET, b"a", b"1")])
        keys.do([change(Verb.SET, b"long", long), change(Verb.SET, b"a", b"2")])
        keys.do([change(Verb.SET, b"b", b"3")])
    frames = framing.scan(_view(folder), WAL_MAGIC, WAL)
    assert [frame.op for frame in frames.frames] == [1, 2, 3, 4, 1]
    assert reopened(folder) == {b"a": (b"2", 0), b"long": (long, 0), b"b": (b"3", 0)}
    for frame in frames.frames[1:4]:
        copy = fresh()
        os.truncate(copy / WAL, frame.payload_offset + len(frame.payload) - 1)
        with Keys(copy) as keys:
            assert keys.content == {b"a": (b"1", 0)}
            keys.do([change(Verb.SET, b"b", b"4")])
        assert reopened(copy) == {b"a": (b"1", 0), b"b": (b"4", 0)}
    with Keys(folder) as keys:
        keys.save()
    assert reopened(folder)[b"long"] == (long, 0)


def _view(folder: Path) -> memoryview:
    return memoryview((folder / WAL).read_bytes())


PARTS = st.lists(st.binary(max_size=40), max_size=5)
CHANGES = st.lists(st.builds(lambda v, p: Change(v, tuple(p)), st.sampled_from(Verb), PARTS))


@given(changes=CHANGES, piece_bytes=st.integers(1, 60))
def test_pieces_of_any_length_make_the_batch_again(changes: list[Change], piece_bytes: int) -> None:
    with mock.patch.object(log_format, "PIECE_BYTES", piece_bytes):
        cut = list(pieces(changes))
    assert all(len(piece.data) <= piece_bytes for piece in cut)
    batches = Assembler()
    found = [list(batches.add(piece.op, piece.payload())) for piece in cut]
    assert found[-1] == changes
    assert not any(found[:-1])


@given(data=st.binary(max_size=60))
def test_bytes_that_are_no_batch_are_damage(data: bytes) -> None:
    with contextlib.suppress(DamagedData):
        again = list(decode(data))
        assert sum(len(p.data) for p in pieces(again)) == len(data)


def test_a_piece_that_the_disk_refuses_takes_none_of_its_change_along(folder: Path) -> None:
    long = bytes(2 * PIECE_BYTES + 5)
    with Keys(folder) as keys:
        keys.do([change(Verb.SET, b"a", b"1")])
        with failing(1) as faults, pytest.raises(CommandError):
            keys.do([change(Verb.SET, b"long", long)])
        assert faults.failed == ["pwrite"]
        keys.do([change(Verb.SET, b"b", b"2")])
    assert reopened(folder) == {b"a": (b"1", 0), b"b": (b"2", 0)}
    other = os.urandom(PIECE_BYTES + 5)
    with Keys(folder) as keys:
        with failing(1), pytest.raises(CommandError):
            keys.do([change(Verb.SET, b"long", long)])
        keys.do([change(Verb.SET, b"other", other)])
    assert reopened(folder) == {b"a": (b"1", 0), b"b": (b"2", 0), b"other": (other, 0)}


def test_a_transaction_meets_no_key_past_its_deadline() -> None:
    data = Data()
    for one in [*SCRIPT[1], *SCRIPT[3], change(Verb.DEADLINE, b"h", b"%d" % NOW)]:
        data.apply(one)
    before = content(data)
    inside = Overlay(data, NOW + 5000)
    inside.apply(change(Verb.RPUSH, b"t", b"1"))
    inside.apply(change(Verb.HSET, b"h", b"new", b"3"))
    assert inside.entries[b"t"] == Entry(deque([b"1"]))
    assert inside.entries[b"h"] == Entry({b"new": b"3"})
    assert content(data) == before


def test_deadlines_are_absolute_and_what_ended_is_deleted_before_it_is_met_again(
    folder: Path,
) -> None:
    with Keys(folder) as keys:
        keys.do(SCRIPT[1])
        keys.keyspace.clock = lambda: NOW + 5000
        keys.do([change(Verb.HSET, b"t", b"f", b"v")])
        assert keys.content == {b"t": ({b"f": b"v"}, 0)}
    assert reopened(folder) == {b"t": ({b"f": b"v"}, 0)}


def test_without_a_log_only_a_save_keeps_anything(folder: Path) -> None:
    with Keys(folder, wal=False) as keys:
        keys.do(SCRIPT[0])
        keys.save()
        keys.do(SCRIPT[3])
    assert not (folder / WAL).exists()
    with Keys(folder, wal=False) as keys:
        assert keys.content == {b"s": (b"\x01\x02\xff", 0)}


def test_a_log_under_steady_load_is_saved_away(folder: Path) -> None:
    with Keys(folder) as keys:
        keys.keyspace.config = StoreConfig(folder, wal_size=1000)
        assert not keys.keyspace.save_soon(quiet_seconds=1e9)
        keys.do([change(Verb.SET, b"k", bytes(4001))])
        assert keys.keyspace.save_soon(quiet_seconds=1e9)
        keys.save()
        assert not keys.keyspace.save_soon(quiet_seconds=0)
        keys.do([change(Verb.SET, b"k", bytes(2000))])
        # a snapshot of 4 KB for each 2 KB logged would write thrice what is stored
        assert not keys.keyspace.save_soon(quiet_seconds=0)
        keys.do([change(Verb.SET, b"k", bytes(2100))])
        assert keys.keyspace.save_soon(quiet_seconds=0)


@pytest.mark.parametrize("damage", ["flip", "link", "missing"])
def test_a_log_never_appends_to_what_a_lost_snapshot_held(
    folder: Path, fresh: Callable[[], Path], damage: str
) -> None:
    """Values that never were: the end of a string, some fields of a hash, an emptied list."""
    with Keys(folder) as keys:
        for changes in SCRIPT[:7]:
            keys.do(changes)
        keys.save()
        for changes in SCRIPT[2:5] + SCRIPT[9:11]:
            keys.do(changes)
        keys.do([change(Verb.SET, b"new", b"1"), change(Verb.DEADLINE, b"new", b"%d" % (NOW + 9))])
        keys.do([change(Verb.APPEND, b"new", b"2"), change(Verb.DELETE, b"set")])
        keys.do([change(Verb.SADD, b"set", b"q"), change(Verb.SET, b"other", b"3")])
        keys.do([change(Verb.RENAME, b"h", b"other"), change(Verb.HSET, b"h", b"f", b"v")])
        keys.do([change(Verb.RENAME, b"new", b"z"), change(Verb.HSET, b"other", b"f", b"v")])
        whole = keys.content
    stands = {key: whole[key] for key in (b"z", b"set", b"h")}
    copy = fresh()
    if damage == "flip":
        flip(copy / SNAPSHOT, 60)
    else:
        (copy / SNAPSHOT).unlink()
    if damage == "link":
        (copy / SNAPSHOT).symlink_to(folder / SNAPSHOT)
    log = (copy / WAL).read_bytes()
    with pytest.raises(DamagedData):
        reopened(copy)
    assert reopened(copy, salvage=True) == stands
    (aside,) = copy.glob(f"{WAL}.damaged-*")
    assert aside.read_bytes() == log
    assert reopened(copy) == stands


@given(
    st.lists(
        st.one_of(
            st.builds(lambda k, v: change(Verb.SET, k, v), KEYS, KEYS),
            st.builds(lambda k, v: change(Verb.APPEND, k, v), KEYS, KEYS),
            st.builds(lambda k: change(Verb.DELETE, k), KEYS),
            st.builds(lambda k, to: change(Verb.RENAME, k, to), KEYS, KEYS),
            st.just(change(Verb.FLUSH)),
        ),
        max_size=30,
    ),
    st.integers(0, 30),
)
def test_what_stands_of_a_log_is_as_it_was_at_its_end(changes: list[Change], begin: int) -> None:
    whole, part, standing = Data(), Data(), Standing()
    for number, one in enumerate(changes):
        if one.verb == Verb.RENAME and one.parts[0] not in whole.entries:
            continue
        whole.apply(one)
        passed = standing.passed(one) if number >= begin else None
        if passed is not None:
            part.apply(passed)
    assert content(part).items() <= content(whole).items()
    if changes[begin:] and changes[begin].verb == Verb.FLUSH:
        assert content(part) == content(whole)


def test_a_log_that_has_everything_stands_without_its_snapshot(
    folder: Path, fresh: Callable[[], Path]
) -> None:
    """So it is found after a kill between writing the snapshot and emptying the log."""
    with Keys(folder) as keys:
        for changes in SCRIPT[:7]:
            keys.do(changes)
        log = (folder / WAL).read_bytes()
        keys.save()
        expected = keys.content
    copy = fresh()
    (copy / WAL).write_bytes(log)
    flip(copy / SNAPSHOT, 60)
    assert reopened(copy, salvage=True) == expected
    assert reopened(copy) == expected


def test_a_start_that_is_killed_in_a_repair_finds_the_damage_again(folder: Path) -> None:
    with Keys(folder) as keys:
        for changes in SCRIPT[:7]:
            keys.do(changes)
        keys.save()
    flip(folder / SNAPSHOT, 60)
    recover(Paths(folder), True, True)
    with pytest.raises(DamagedData):
        reopened(folder)
    assert reopened(folder, salvage=True) == {}
    assert len(list(folder.glob(f"{SNAPSHOT}.damaged-*"))) == 2
