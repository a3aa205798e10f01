"""The value receipt: what a lookup credits, to the microsecond."""

from __future__ import annotations

import struct
from typing import Any

from tests.server.wire import Wire

ROW = struct.pack("<4f", 1, -2, 0.5, 0)


def receipt(wire: Wire) -> dict[str, Any]:
    flat = wire.ask("PION.STATS")
    assert len(flat) == 32
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return {name.decode(): value for name, value in pairs}


def start(wire: Wire) -> None:
    wire.ok("PION.STATS", "RESET")


def test_the_worked_example_adds_up(wire: Wire, ns: str) -> None:
    start(wire)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16", "PREFILL_MS", 1200)
    for _ in range(3):
        assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    seen = receipt(wire)
    assert seen["kvprefix_hits"] == seen["kvprefix_hits_measured"] == 3
    assert seen["kvprefix_prefill_us_saved"] == 3_600_000
    assert seen["prefill_seconds_avoided"] == b"3.600"
    other = ns + "x"
    wire.ok("KV.PREFIX.REGISTER", other, 4, "fp16")
    wire.ok("V.STOREBATCH", other + "_pk", 0, 0, 100, ROW * 100)
    assert wire.ask("KV.PREFIX.LOOKUP", other) == "HIT"
    seen = receipt(wire)
    assert seen["kvprefix_hits"] == 4 and seen["kvprefix_hits_measured"] == 3
    assert seen["kvprefix_tokens_served"] == 100
    assert seen["kvprefix_prefill_us_saved"] == 3_655_500
    assert seen["kvprefix_prefill_us_measured"] == 3_600_000
    # cut, not rounded
    assert seen["prefill_seconds_avoided"] == b"3.655"
    assert seen["prefill_seconds_avoided_measured"] == b"3.600"
    assert wire.info("INFO", "pion")["prefill_seconds_avoided"] == "3.655"


def test_estimated_seconds_are_cut_behind_the_third_decimal(wire: Wire, ns: str) -> None:
    start(wire)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 300, ROW * 300)
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    seen = receipt(wire)
    assert seen["kvprefix_prefill_us_saved"] == 166_500
    assert seen["prefill_seconds_avoided"] == b"0.166"


def test_the_lookups_own_numbers_come_first(wire: Wire, ns: str) -> None:
    start(wire)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16", "PREFILL_MS", 1000)
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 7, ROW * 7)
    assert wire.ask("KV.PREFIX.LOOKUP", ns, "TOKENS", 300) == "HIT"
    seen = receipt(wire)
    assert seen["kvprefix_tokens_served"] == 300
    assert seen["kvprefix_prefill_us_saved"] == 1_000_000
    assert wire.ask("KV.PREFIX.LOOKUP", ns, "PREFILL_MS", 5, "TOKENS", 0) == "HIT"
    seen = receipt(wire)
    assert seen["kvprefix_tokens_served"] == 300
    assert seen["kvprefix_prefill_us_measured"] == 1_005_000
    # 0 is "not given"
    assert wire.ask("KV.PREFIX.LOOKUP", ns, "PREFILL_MS", 0) == "HIT"
    assert receipt(wire)["kvprefix_prefill_us_measured"] == 2_005_000


def test_registering_again_replaces_the_time_only_where_it_says_one(wire: Wire, ns: str) -> None:
    start(wire)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16", "PREFILL_MS", 100)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert receipt(wire)["kvprefix_prefill_us_measured"] == 100_000
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16", "PREFILL_MS", 7)
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert receipt(wire)["kvprefix_prefill_us_measured"] == 107_000
    # a namespace that was dropped does not lend its time to the next one of its name
    assert wire.ask("KV.PREFIX.DROP", ns) == 1
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert receipt(wire)["kvprefix_hits_measured"] == 2


def test_a_miss_credits_nothing_but_itself(wire: Wire, ns: str) -> None:
    start(wire)
    assert wire.ask("KV.PREFIX.LOOKUP", ns, "TOKENS", 500, "PREFILL_MS", 9) == "MISS"
    seen = receipt(wire)
    assert seen.pop("kvprefix_misses") == 1
    assert not any(value for value in seen.values() if isinstance(value, int) and value > 60)
    assert seen["kvprefix_hits"] == seen["kvprefix_tokens_served"] == 0


def test_bytes_served_are_the_payload_of_bulk_strings(wire: Wire, ns: str) -> None:
    start(wire)
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 2, ROW * 2)
    sid = ns + "_pk"
    expected = 0
    for words, size in (
        ((0, 0), 16),
        ((0, 1, 0, 1), 48),
        ((0, "RANGE", 0, 2), 32),
        ((0, "RANGE", 0, 2, "FMT", "NATIVE"), 16),
        ((0, "RANGE", 0, 5, "FMT", "STORED"), 40),
        (("BATCH", 0, 2, 3), 32),
        ((1, "RANGE", 0, 2), 0),
    ):
        wire.ask("V.FETCH", sid, *words)
        expected += size
        assert receipt(wire)["kvprefix_bytes_served"] == expected, words
    wire.ok("SSM.PREFIX.STORE", ns, 0, b"state")
    assert wire.ask("SSM.PREFIX.FETCH", ns, 0) == b"state"
    assert receipt(wire)["kvprefix_bytes_served"] == expected


def test_reset_keeps_the_uptime(wire: Wire) -> None:
    before = receipt(wire)["uptime_in_seconds"]
    wire.ok("pion.stats", "reset")
    seen = receipt(wire)
    assert seen["uptime_in_seconds"] >= before
    assert not any(value for name, value in seen.items() if name.startswith("kvprefix"))
