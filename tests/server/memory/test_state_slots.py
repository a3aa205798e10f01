"""STATE.*: slots of fixed size, overwritten in place."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.server.wire import Wire, Word, refuse, settle

INT64 = 1 << 63


@pytest.fixture
def slot(wire: Wire, ns: str) -> Iterator[str]:
    """A fixed slot of 16 bytes that holds 0123456789abcdef."""
    wire.ok("STATE.ALLOC", ns, 16)
    assert wire.ask("STATE.WRITE", ns, 0, "0123456789abcdef") == 16
    yield ns
    wire.ask("STATE.FREE", ns)


def refused(wire: Wire, fragment: str, *words: Word) -> None:
    """Refused in these words, and no slot has changed."""
    before = wire.ask("STATE.INFO")
    refuse(wire, fragment, *words)
    assert wire.ask("STATE.INFO") == before


def test_a_slot_begins_with_zeros_and_is_overwritten_in_place(wire: Wire, ns: str) -> None:
    wire.ok("STATE.ALLOC", ns, 8)
    assert wire.ask("STATE.READ", ns, 0, 8) == bytes(8)
    assert wire.ask("STATE.WRITE", ns, 2, b"\x01\x00\xff") == 3
    assert wire.ask("STATE.WRITE", ns, 4, b"xy") == 2
    assert wire.ask("STATE.READ", ns, 0, 8) == b"\0\0\x01\0xy\0\0"
    assert wire.ask("STATE.READ", ns, 5, 1) == b"y"
    assert wire.ask("STATE.WRITE", ns, 8, b"") == 0
    assert wire.ask("STATE.FREE", ns) == 1


def test_a_ring_wraps_as_the_protocol_shows(wire: Wire, ns: str) -> None:
    wire.ok("STATE.ALLOC", ns, 16, "mode", "Ring")
    assert wire.ask("STATE.WRITE", ns, 0, "0123456789abcdef") == 16
    assert wire.ask("STATE.WRITE", ns, 12, "WXYZ!@#$") == 8
    assert wire.ask("STATE.READ", ns, 0, 16) == b"!@#$456789abWXYZ"
    assert wire.ask("STATE.READ", ns, 12, 8) == b"WXYZ!@#$"
    assert wire.ask("STATE.WRITE", ns, 20, "--") == 2
    assert wire.ask("STATE.READ", ns, 4, 2) == b"--"
    assert wire.ask("STATE.READ", ns, INT64 - 16, 4) == b"!@#$"
    refused(wire, "out of range", "STATE.WRITE", ns, 0, bytes(17))
    refused(wire, "out of range", "STATE.READ", ns, 0, 17)
    assert wire.ask("STATE.FREE", ns) == 1


def test_freeing_twice_is_no_error_and_the_name_can_be_used_again(wire: Wire, ns: str) -> None:
    assert wire.ask("STATE.FREE", ns) == 0
    wire.ok("STATE.ALLOC", ns, 4)
    assert wire.ask("STATE.WRITE", ns, 0, "abcd") == 4
    assert [wire.ask("STATE.FREE", ns) for _ in range(2)] == [1, 0]
    wire.ok("STATE.ALLOC", ns, 4)
    assert wire.ask("STATE.READ", ns, 0, 4) == bytes(4)
    assert wire.ask("STATE.FREE", ns) == 1


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ("already allocated", ("STATE.ALLOC", "SLOT", 16)),
        ("already allocated", ("STATE.ALLOC", "SLOT", 99, "MODE", "ring")),
        ("size", ("STATE.ALLOC", "new", 0)),
        ("size", ("STATE.ALLOC", "new", -5)),
        ("size", ("STATE.ALLOC", "new", "1e3")),
        ("size", ("STATE.ALLOC", "new", (512 << 20) + 1)),
        ("size", ("STATE.ALLOC", "new", "99999999999999999999")),
        ("wrong number of arguments", ("STATE.ALLOC", "new")),
        ("wrong number of arguments", ("STATE.ALLOC",)),
        ("MODE", ("STATE.ALLOC", "new", 16, "MODE", "circle")),
        ("MODE", ("STATE.ALLOC", "new", 16, "MODE")),
        ("unknown option", ("STATE.ALLOC", "new", 16, "RING")),
        ("session id", ("STATE.ALLOC", "", 16)),
        ("out of range", ("STATE.WRITE", "SLOT", 9, "12345678")),
        ("out of range", ("STATE.WRITE", "SLOT", 17, "")),
        ("out of range", ("STATE.WRITE", "SLOT", INT64 - 1, "1")),
        ("offset", ("STATE.WRITE", "SLOT", INT64, "1")),
        ("offset", ("STATE.WRITE", "SLOT", "x", "1")),
        ("non-negative", ("STATE.WRITE", "SLOT", -1, "1")),
        ("not allocated", ("STATE.WRITE", "nobody", 0, "1")),
        ("wrong number of arguments", ("STATE.WRITE", "SLOT", 0)),
        ("out of range", ("STATE.READ", "SLOT", 9, 8)),
        ("out of range", ("STATE.READ", "SLOT", 0, INT64 - 1)),
        ("non-negative", ("STATE.READ", "SLOT", -1, 1)),
        ("not allocated", ("STATE.READ", "nobody", 0, 1)),
        ("length", ("STATE.READ", "SLOT", 0, 0)),
        ("length", ("STATE.READ", "SLOT", 0, -4)),
        ("length", ("STATE.READ", "SLOT", 0, "x")),
        ("not allocated", ("STATE.INFO", "nobody")),
        ("wrong number of arguments", ("STATE.INFO", "SLOT", "more")),
        ("wrong number of arguments", ("STATE.FREE",)),
    ],
)
def test_what_is_refused_changes_nothing(
    wire: Wire, slot: str, fragment: str, words: tuple[Word, ...]
) -> None:
    refused(wire, fragment, *(slot if word == "SLOT" else word for word in words))
    assert wire.ask("STATE.READ", slot, 0, 16) == b"0123456789abcdef"


def test_the_table_has_64_slots_and_then_is_full(wire: Wire, ns: str) -> None:
    names = [f"{ns}.{n}" for n in range(64)]
    for name in names:
        wire.ok("STATE.ALLOC", name, 1)
    assert wire.info("STATE.INFO")["sessions"] == "64"
    refused(wire, "no free state slot", "STATE.ALLOC", f"{ns}.64", 1)
    assert wire.ask("STATE.FREE", names[7]) == 1
    wire.ok("STATE.ALLOC", f"{ns}.64", 1)
    for name in [*names, f"{ns}.64"]:
        wire.ask("STATE.FREE", name)


def test_info_counts_what_was_written_and_read(wire: Wire, slot: str) -> None:
    assert wire.info("STATE.INFO") == {"enabled": "1", "sessions": "1", "max_sessions": "64"}
    wire.ask("STATE.READ", slot, 4, 4)
    assert wire.info("STATE.INFO", slot) == {
        "size": "16",
        "mode": "fixed",
        "bytes_written": "16",
        "bytes_read": "4",
    }


def test_a_state_of_many_megabytes_comes_back_and_wraps(wire: Wire, ns: str) -> None:
    size = 6 << 20
    data = np.random.default_rng(1).bytes(size)
    wire.ok("STATE.ALLOC", ns, size, "MODE", "RING")
    assert wire.ask("STATE.WRITE", ns, size - 1000, data) == size
    assert wire.ask("STATE.READ", ns, size - 1000, size) == data
    assert wire.ask("STATE.READ", ns, 0, size) == data[1000:] + data[:1000]
    refused(wire, "out of range", "STATE.WRITE", ns, 0, data + b"x")
    refused(wire, "not allocated", "STATE.WRITE", "nobody", 0, data)
    settle(wire)
    assert wire.ask("STATE.FREE", ns) == 1
