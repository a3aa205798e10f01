"""BLOCKS and MEMBERSHIP: the table of a namespace, and which probes it holds."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from tests.recovery.driving import Driver, refused
from tests.recovery.material import register, rows
from tests.server.wire import Wire, refuse

TABLE = [0x1122334455667788, 0x10]
EXAMPLE = bytes.fromhex("88776655443322111000000000000000")


def packed(hashes: list[int]) -> bytes:
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def with_blocks(ns: str, hashes: list[int], block_size: int = 64) -> tuple[bytes | str | int, ...]:
    blocks = ("BLOCKS", block_size, len(hashes), packed(hashes))
    return ("KV.PREFIX.REGISTER", ns, 64, "fp16", *blocks)


def test_the_worked_examples_of_the_protocol(wire: Wire, ns: str) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16", "BLOCKS", 64, 2, EXAMPLE)

    assert wire.ask("KV.PREFIX.BLOCKS", ns) == b"\x40\0\0\0\x02\0\0\0" + EXAMPLE
    probes = packed([0x10, 0xBAD, 0x1122334455667788])
    assert wire.ask("KV.PREFIX.MEMBERSHIP", ns, 3, probes) == b"\x05"


def test_a_namespace_without_a_table_is_unknown(wire: Wire, ns: str) -> None:
    for _ in range(2):
        assert wire.ask("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"
        assert wire.ask("KV.PREFIX.MEMBERSHIP", ns, 1, bytes(8)) == "UNKNOWN"
        wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")


def test_an_empty_table_holds_nothing(wire: Wire, ns: str) -> None:
    wire.ok(*with_blocks(ns, [], 16))

    assert wire.ask("KV.PREFIX.BLOCKS", ns) == struct.pack("<II", 16, 0)
    assert wire.ask("KV.PREFIX.MEMBERSHIP", ns, 9, bytes(72)) == bytes(2)
    assert wire.ask("KV.PREFIX.MEMBERSHIP", ns, 0, b"") == b""


def test_membership_is_what_a_set_says(wire: Wire, ns: str) -> None:
    dice = random.Random(7)
    extremes = [0, 1, (1 << 64) - 1, 1 << 63]
    table = [dice.getrandbits(64) for _ in range(500)] + extremes
    dice.shuffle(table)
    wire.ok(*with_blocks(ns, table))
    for count in (1, 7, 8, 9, 64, 1001):
        probes = [dice.choice([dice.getrandbits(64), dice.choice(table)]) for _ in range(count)]
        expected = bytearray(-(-count // 8))
        for index, probe in enumerate(probes):
            expected[index >> 3] |= (probe in table) << (index & 7)

        assert wire.ask("KV.PREFIX.MEMBERSHIP", ns, count, packed(probes)) == bytes(expected)
    assert wire.ask("KV.PREFIX.BLOCKS", ns)[8:] == packed(table)


def test_registering_again_replaces_the_table_and_keeps_the_rows(wire: Wire, ns: str) -> None:
    wire.ok(*with_blocks(ns, [1, 2, 3]))
    wire.ok("V.STOREBATCH", f"{ns}_pk", 0, 0, 1, bytes(64 * 4))
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")
    assert wire.ask("KV.PREFIX.BLOCKS", ns)[8:] == packed([1, 2, 3])

    wire.ok(*with_blocks(ns, [4], 16))

    assert wire.ask("KV.PREFIX.BLOCKS", ns) == struct.pack("<IIQ", 16, 1, 4)
    assert wire.info("V.INFO", f"{ns}_pk")["layer_0_tokens"] == "1"


def test_a_table_goes_with_its_namespace(wire: Wire, ns: str) -> None:
    wire.ok(*with_blocks(ns, TABLE))
    wire.ask("KV.PREFIX.DROP", ns)
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16")

    assert wire.ask("KV.PREFIX.BLOCKS", ns) == "UNKNOWN"


@pytest.mark.parametrize(
    ("fragment", "clause"),
    [
        ("BLOCKS: blob size", (64, 2, bytes(15))),
        ("BLOCKS: blob size", (64, 0, bytes(8))),
        ("block_size", (0, 1, bytes(8))),
        ("block_size", ("x", 1, bytes(8))),
        ("hash_count", (64, -1, b"")),
        ("hash_count", (64, 1 << 40, b"")),
        ("lacks its value", (64, 1)),
    ],
)
def test_a_bad_clause_is_refused_and_registers_nothing(
    wire: Wire, ns: str, fragment: str, clause: tuple[bytes | str | int, ...]
) -> None:
    refuse(wire, fragment, "KV.PREFIX.REGISTER", ns, 64, "fp16", "BLOCKS", *clause)
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "MISS"


def test_probes_of_the_wrong_length_are_refused(wire: Wire, ns: str) -> None:
    wire.ok(*with_blocks(ns, TABLE))
    refuse(wire, "blob size", "KV.PREFIX.MEMBERSHIP", ns, 2, bytes(8))
    refuse(wire, "hash_count", "KV.PREFIX.MEMBERSHIP", ns, "many", bytes(8))


def test_a_table_survives_log_and_snapshot(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"), "BLOCKS", 64, 2, EXAMPLE)
        assert driver.store.vstore_wal.appended >= 3
        driver.ask(*register("b"), "BLOCKS", 16, 1, packed([9]))
        driver.ask(*rows("a_pk", 0, 0, 3))
        tables = [driver.ask("KV.PREFIX.BLOCKS", name) for name in "ab"]
    for command in ("KV.PREFIX.SAVE", "PING", "KV.PREFIX.SAVE"):
        with Driver(tmp_path) as driver:
            assert [driver.ask("KV.PREFIX.BLOCKS", name) for name in "ab"] == tables
            assert driver.ask("KV.PREFIX.MEMBERSHIP", "a", 1, EXAMPLE[8:]) == b"\x01"
            driver.ask(command)


def test_the_same_table_again_is_not_logged_again(tmp_path: Path) -> None:
    with Driver(tmp_path) as driver:
        driver.ask(*register("a"), "BLOCKS", 64, 2, EXAMPLE)
        size = driver.store.vstore_wal.size
        driver.ask(*register("a"), "BLOCKS", 64, 2, EXAMPLE)
        assert driver.store.vstore_wal.size == size
        assert "unknown option" in refused(driver, *register("a"), "BLOCK", 64, 2, EXAMPLE)
