"""What a repair keeps of a damaged snapshot is what was there; nothing is deleted meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pion_vllm_mlx.errors import DamagedData
from pion_vllm_mlx.server.store import framing, records
from pion_vllm_mlx.server.store.findings import Kind
from pion_vllm_mlx.server.store.recovery import Paths, Recovery
from tests.recovery.broken import (
    SALVAGE,
    SSM_WAL,
    VSTORE_WAL,
    Copies,
    boundaries,
    content_of,
    damaged_files,
)
from tests.recovery.driving import Content, Driver
from tests.recovery.material import COMPLETION_LAYER, agrees, open_sealed, register, rows, state
from tests.recovery.twins import prefix, share, sound

WIDTH = 8
MANIFEST, STATES = "pion.vstore.0", "pion.ssm.0"
MAGIC = {MANIFEST: framing.VSTORE_SNAPSHOT, STATES: framing.SSM_SNAPSHOT}


def store(driver: Driver, name: str) -> None:
    driver.ask(*register(name, 1, WIDTH))
    for side in ("_pk", "_pv"):
        driver.ask(*rows(name + side, 0, 0, 3, WIDTH))
        driver.ask(*rows(name + side, 0, 1, 4, WIDTH))  # lies over the first
    driver.ask(*state(name, 0, 20))
    driver.ask(*state(name, COMPLETION_LAYER, 20))


def fill(folder: Path) -> Content:
    """Sessions in the snapshot, some of which the log extends, replaces or drops, and new ones."""
    with Driver(folder) as driver:
        for name in "abcd":
            store(driver, name)
        driver.ask("KV.PREFIX.SAVE")
        for side in ("_pk", "_pv"):
            driver.ask(*rows("a" + side, 0, 2, 5, WIDTH))
        driver.ask(*state("a", 0, 20, salt=1))
        driver.ask("KV.PREFIX.DROP", "b")
        store(driver, "c")
        store(driver, "later")
        driver.ask("SSM.PREFIX.DROP", "d", 0)
        return driver.content()


def frames(path: Path) -> list[framing.Frame]:
    found = framing.scan(memoryview(path.read_bytes()), MAGIC[path.name], path.name)
    return found.frames


def segments_of(folder: Path) -> set[str]:
    """The names of all segment files, those that were set aside included."""
    return {path.name for path in folder.glob("pion.segments.0*/*")}


def by_owner(content: Content) -> dict[tuple[str, bytes, int], Content]:
    """The content, a part for each session and for each state."""
    parts: dict[tuple[str, bytes, int], Content] = {}
    for key, value in content.items():
        owner = key if key[0] == "state" else ("session", key[1], -1)
        parts.setdefault(owner, {})[key] = value
    return parts


def flips(folder: Path, name: str) -> Iterator[tuple[int, Path]]:
    """Copies of the folder with one byte of a file turned over.

    Every byte that says what a record is and how long, and some of each payload.
    """
    copies = Copies(folder)
    positions = set(range(0, framing.HEADER_BYTES, 4)) - {28}
    for frame in frames(folder / name):
        begin = frame.payload_offset - framing.FRAME_BYTES
        positions.update(range(begin, frame.payload_offset))
        positions.update(range(frame.payload_offset, frame.payload_offset + len(frame.payload), 41))
    for position in sorted(positions):
        yield position, copies.flipped(name, position)


@pytest.mark.parametrize("name", [MANIFEST, STATES])
def test_each_session_and_state_of_a_damaged_snapshot_is_as_it_was_at_the_end_or_gone(
    folder: Path, name: str
) -> None:
    whole = by_owner(fill(folder))
    payloads = {
        position
        for frame in frames(folder / name)
        for position in range(frame.payload_offset, frame.payload_offset + len(frame.payload))
    }
    files = segments_of(folder)
    for position, flipped in flips(folder, name):
        with pytest.raises(DamagedData):
            Driver(flipped)
        content = content_of(flipped, SALVAGE)
        found = by_owner(content)
        for owner, part in found.items():
            assert part == whole[owner], (position, owner)
        lost = whole.keys() - found.keys()
        assert all((owner[0] == "state") == (name == STATES) for owner in lost), position
        if position in payloads:
            # a record may have been of the session before or after it
            assert len(lost) <= (2 if name == MANIFEST else 1), (position, lost)
        assert segments_of(flipped) >= files, "nothing is deleted when something was set aside"
        assert any(path.name.startswith(f"{name}.damaged-") for path in damaged_files(flipped))
        assert content_of(flipped) == content, "what was repaired is sound, and stays"


@pytest.mark.parametrize("name", [MANIFEST, STATES])
def test_a_start_that_is_killed_in_a_repair_finds_the_damage_again(folder: Path, name: str) -> None:
    fill(folder)
    copies = Copies(folder)
    last = frames(folder / name)[3]
    copies.flipped(name, last.payload_offset)
    content = content_of(copies.folder, SALVAGE)
    flipped = copies.flipped(name, last.payload_offset)
    Recovery(Paths(flipped), wal_enabled=True, salvage=True).run()
    with pytest.raises(DamagedData, match=name):
        Driver(flipped)
    assert content_of(flipped, SALVAGE) == content


def test_a_sealed_segment_whose_seal_is_lost_is_not_written_to_again(folder: Path) -> None:
    """It would be cut behind the rows of one of those that share it."""
    with Driver(folder) as driver:
        for name in ("a", "b"):
            prefix(driver, name)
            driver.ask("KV.PREFIX.MAP", name)
        assert share(driver)
        # the last in the snapshot is lost with the seal behind it: the one the segment is named for
        driver.ask("V.FETCH", "a_pv", 0, "RANGE", 0, 4)
        driver.ask("KV.PREFIX.SAVE")
        whole = driver.content()
    seals = [f for f in frames(folder / MANIFEST) if f.op == records.Seal.op]
    copies = Copies(folder)
    owners = by_owner(whole)
    assert seals
    for place in [*(f.payload_offset for f in seals), (folder / MANIFEST).stat().st_size - 1]:
        flipped = copies.flipped(MANIFEST, place)
        before = {p.name: p.read_bytes() for p in (flipped / "pion.segments.0").iterdir()}
        with Driver(flipped, SALVAGE) as driver:
            content = driver.content()
            kept = by_owner(content)
            assert all(kept[owner] == owners[owner] for owner in kept)
            # what was lost before a seal may have been of the session before it
            assert owners.keys() - kept.keys() <= {("session", b"a_pv", -1)}
            for name in ("a", "b"):
                driver.ask("KV.PREFIX.MAP", name)
            driver.ask("KV.PREFIX.SAVE")
            assert driver.content() == content
            assert agrees(driver, "b") == 4
            assert open_sealed(driver) == len(before)
            sound(driver)
        after = {p.name: p.read_bytes() for p in (flipped / "pion.segments.0").iterdir()}
        assert after == before
        assert content_of(flipped) == content


@pytest.mark.parametrize("shared", [True, False])
def test_what_several_share_goes_where_nobody_knows_whether_it_was_sealed(
    folder: Path, shared: bool
) -> None:
    with Driver(folder) as driver:
        for name in "ab"[: 1 + shared]:
            prefix(driver, name)
            driver.ask("KV.PREFIX.MAP", name)
        driver.ask(*register("z", 1, WIDTH))  # behind it, a seal that is lost is of nobody's rows
        if shared:
            assert share(driver)
        driver.ask("KV.PREFIX.SAVE")
        whole = driver.content()
    (seal,) = (f for f in frames(folder / MANIFEST) if f.op == records.Seal.op)
    flipped = Copies(folder).flipped(MANIFEST, seal.payload_offset)
    (segment,) = (flipped / "pion.segments.0").iterdir()
    content = bytearray(segment.read_bytes())
    content[60] ^= 255
    segment.write_bytes(content)
    with Driver(flipped, SALVAGE) as driver:
        kept = driver.content()
        assert kept.items() <= whole.items()
        assert any(key[1].startswith(b"a_") for key in kept) != shared
        driver.ask("KV.PREFIX.SAVE")
        assert driver.content() == kept
        sound(driver)
    assert content_of(flipped) == kept
    aside = [path.read_bytes() for path in flipped.glob("pion.segments.0.damaged-*/*")]
    assert aside == [bytes(content)] * shared


@pytest.mark.parametrize("size", [3, 600])
def test_a_log_that_is_damaged_before_a_seal_keeps_what_the_seal_calls_dead(
    folder: Path, size: int
) -> None:
    with Driver(folder) as driver:
        driver.ask(*register("a", 1, 64))
        driver.ask(*rows("a_pk", 0, 0, size))
        before = driver.content()
        driver.ask(*rows("a_pk", 0, 0, size + 1))
        driver.ask("KV.PREFIX.MAP", "a")
        driver.ask(*rows("a_pv", 0, 0, 3))
    *_, first, _second, _seal, _last = boundaries(folder / VSTORE_WAL)
    flipped = Copies(folder).flipped(VSTORE_WAL, first + framing.FRAME_BYTES)
    assert content_of(flipped, SALVAGE) == before
    assert content_of(flipped) == before


@pytest.mark.parametrize("size", [27, 32, 64])
@pytest.mark.parametrize("reaches", [False, True], ids=["inside", "into the next"])
@pytest.mark.parametrize("counted", [4, 5, None])
def test_what_was_stored_is_never_taken_for_a_record(
    size: int, reaches: bool, counted: int | None
) -> None:
    """Not where a damaged length leads to it, nor where it goes on to the record after next."""
    op = records.StoreState.op
    behind = [framing.frame(3, op, b"three"), framing.frame(4, op, b"four")]
    if counted is not None:
        behind.append(framing.frame(5, framing.END, framing.end_payload(counted)))
    inside = b"f" * (size - framing.FRAME_BYTES)
    forged = framing.frame(3, op, inside + behind[0] * reaches)[:size]
    before = framing.header(framing.SSM_SNAPSHOT) + framing.frame(1, op, b"one")
    snapshot = before + framing.frame(2, op, b"two" + forged) + b"".join(behind)
    seen = set()
    for bit in range(8 * (framing.FRAME_BYTES + 3 + size)):
        damaged = bytearray(snapshot)
        damaged[len(before) + bit // 8] ^= 1 << bit % 8
        _, found = framing.survivors(memoryview(damaged), framing.SSM_SNAPSHOT, "x")
        kept = tuple(bytes(frame.payload) for frame in found if frame is not None)
        assert kept in ((b"one",), (b"one", b"three", b"four")), bit
        seen.add(kept)
    # what leads to an end that counts right stays
    assert ((b"one", b"three", b"four") in seen) == (counted == 4)


@pytest.mark.parametrize("name", [VSTORE_WAL, SSM_WAL])
def test_a_repair_of_a_log_deletes_no_segment(folder: Path, name: str) -> None:
    fill(folder)
    with Driver(folder) as driver:
        driver.ask("KV.PREFIX.MAP", "later")  # the segment that it makes is named in the log alone
    files = segments_of(folder)
    *_, last, _ = boundaries(folder / name)
    for position in range(40, last, 97):
        flipped = Copies(folder).flipped(name, position)
        with Driver(flipped, SALVAGE) as driver:
            kinds = {note.kind for note in driver.store.replayed.notes}
            assert Kind.SET_ASIDE in kinds and Kind.ORPHANS not in kinds
        assert segments_of(flipped) >= files, position


def test_segments_without_any_file_of_records_are_set_aside_not_deleted(folder: Path) -> None:
    fill(folder)
    files = segments_of(folder)
    for path in folder.glob("pion.*.0"):
        if path.is_file():
            path.unlink()
    with Driver(folder) as driver:
        assert driver.content() == {}
        (note,) = driver.store.replayed.notes
        assert note.kind is Kind.SEGMENTS_ASIDE and note.count == len(files)
        assert driver.store.space.use.total() >= sum(
            path.stat().st_blocks * 512 for path in (folder / note.kept_as).iterdir()
        ), "they count for the disk"
    assert segments_of(folder) == files
    shutil.rmtree(folder / note.kept_as)
    with Driver(folder) as driver:
        assert driver.store.replayed.notes == []
