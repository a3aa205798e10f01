"""Rows come back as they were stored: every format, encoding, layout and size."""

from __future__ import annotations

import json

import numpy as np
import pytest
from crc32c import crc32c
from numpy.typing import NDArray

from tests.conftest import RunningServer
from tests.server import oracle
from tests.server.oracle import Rows
from tests.server.wire import Wire, settle

WIDTH, HEADS = 64, 2
# one row, rows that ride in the log, few and many rows in a segment
SIZES = (1, 13, 37, 700)
#: a blob that does not fit one window, in any format
STREAMED_BYTES = 9 << 20


def random_rows(n: int, width: int = WIDTH, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


def fetched(wire: Wire, *words: bytes | str | int) -> NDArray[np.uint8]:
    answer = wire.ask("V.FETCH", *words)
    assert isinstance(answer, bytes), answer
    return np.frombuffer(answer, np.uint8)


def check_all_ways_out(wire: Wire, sid: str, fmt: str, expected: NDArray[np.uint8]) -> None:
    """Layer 0 holds exactly the wire rows ``expected``."""
    n = len(expected)
    values = oracle.floats(fmt, expected, WIDTH)
    out = fetched(wire, sid, 0, "RANGE", 0, n)
    np.testing.assert_array_equal(out.view("<f4").reshape(n, WIDTH), values)
    ids = [n - 1, 0, n // 2, 0]
    out = fetched(wire, sid, 0, *ids)
    np.testing.assert_array_equal(out.view("<f4").reshape(len(ids), WIDTH), values[ids])
    native = fetched(wire, sid, 0, "RANGE", 0, n, "FMT", "NATIVE")
    wanted = expected if fmt == "fp16" else np.ascontiguousarray(values).view(np.uint8)
    np.testing.assert_array_equal(native, wanted.reshape(-1))
    first, last = n // 3, n // 3 + max(1, n // 2)
    part = fetched(wire, sid, 0, "RANGE", first, last, "FMT", "STORED")
    np.testing.assert_array_equal(part, expected[first:last].reshape(-1))
    (batch,) = wire.ask("V.FETCH", sid, "BATCH", 0, n, 1, "fmt", "stored")
    assert batch == expected.tobytes()
    if fmt == "int8":
        return
    by_head = oracle.head_major(fmt, expected, WIDTH, HEADS)
    out = fetched(wire, sid, 0, "RANGE", 0, n, "LAYOUT", "HND", "FMT", "STORED")
    np.testing.assert_array_equal(out, by_head.reshape(-1))
    out = fetched(wire, sid, 0, "RANGE", first, last, "FMT", "STORED", "LAYOUT", "HND")
    cut = oracle.head_major(fmt, expected[first:last], WIDTH, HEADS)
    np.testing.assert_array_equal(out, cut.reshape(-1))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_rows_come_back_from_every_way_in_by_every_way_out(
    wire: Wire, ns: str, fmt: str, n: int
) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, fmt, "HEADS", HEADS)
    sid = ns + "_pk"
    rows = random_rows(n)
    expected = oracle.stored(fmt, rows)
    wire.ok("V.STOREBATCH", sid, 0, 0, n, rows.tobytes())
    check_all_ways_out(wire, sid, fmt, expected)

    half = random_rows(n, seed=1).astype("<f2")
    expected = oracle.stored(fmt, half.astype(np.float32))
    wire.ok("V.STOREBATCH", sid, 0, 0, n, half.tobytes(), "FMT", "F16", "CRC", crc32c(half))
    check_all_ways_out(wire, sid, fmt, expected)

    expected = oracle.stored(fmt, random_rows(n, seed=2))
    wire.ok("V.STOREBATCH", sid, 0, 0, n, expected.tobytes(), "FMT", "STORED")
    check_all_ways_out(wire, sid, fmt, expected)

    if fmt != "int8":
        expected = oracle.stored(fmt, random_rows(n, seed=3))
        blob = oracle.head_major(fmt, expected, WIDTH, HEADS)
        crc = crc32c(blob.tobytes())
        options = ("LAYOUT", "HND", "FMT", "STORED", "CRC", crc)
        wire.ok("V.STOREBATCH", sid, 0, 0, n, blob.tobytes(), *options)
        check_all_ways_out(wire, sid, fmt, expected)


#: int8 rows cannot be cut at heads
WAYS_IN = [
    (fmt, encoding)
    for fmt in oracle.FORMATS
    for encoding in ("F32", "F16", "STORED", "HND")
    if (fmt, encoding) != ("int8", "HND")
]


@pytest.mark.parametrize(("fmt", "encoding"), WAYS_IN)
def test_streamed_rows_come_back_whatever_layout_was_guessed(
    wire: Wire, ns: str, fmt: str, encoding: str
) -> None:
    width = 1024
    wire.ok("KV.PREFIX.REGISTER", ns, width, fmt, "HEADS", 4)
    sid = ns + "_pv"
    row_bytes = {"F32": 4 * width, "F16": 2 * width}.get(
        encoding, oracle.stored(fmt, random_rows(1, width)).size
    )
    n = STREAMED_BYTES // row_bytes
    rows = random_rows(n, width)
    options: tuple[str, ...] = ("FMT", encoding) if encoding in ("F16", "STORED") else ()
    if encoding == "F32":
        blob, expected = rows.tobytes(), oracle.stored(fmt, rows)
    elif encoding == "F16":
        half = rows.astype("<f2")
        blob, expected = half.tobytes(), oracle.stored(fmt, half.astype(np.float32))
    else:
        expected = oracle.stored(fmt, rows)
        blob = expected.tobytes()
    if encoding == "HND":
        options = ("FMT", "STORED", "LAYOUT", "HND")
        blob = oracle.head_major(fmt, expected, width, 4).tobytes()
    # twice: the second time the guess at the layout is what came the first time
    for _ in range(2):
        wire.ok("V.STOREBATCH", sid, 3, 0, n, blob, *options, "CRC", crc32c(blob))
        out = fetched(wire, sid, 3, "RANGE", 0, n, "FMT", "STORED")
        np.testing.assert_array_equal(out, expected.reshape(-1))
    values = fetched(wire, sid, 3, "RANGE", n - 5, n)
    wanted = oracle.floats(fmt, expected[-5:], width)
    np.testing.assert_array_equal(values.view("<f4").reshape(5, width), wanted)
    settle(wire)


def test_every_bit_pattern_of_16_bits_survives_in_fp16_and_bf16(wire: Wire, ns: str) -> None:
    patterns = np.arange(1 << 16, dtype="<u2").tobytes()
    for fmt in ("fp16", "bf16"):
        sid = f"{ns}{fmt}"
        assert wire.ask("V.CREATE", sid, 256, "VQUANT", fmt) >= 0
        encoding = "F16" if fmt == "fp16" else "STORED"
        wire.ok("V.STOREBATCH", sid, 0, 0, 256, patterns, "FMT", encoding)
        assert wire.ask("V.FETCH", sid, 0, "RANGE", 0, 256, "FMT", "STORED") == patterns
    assert wire.ask("V.FETCH", ns + "fp16", 0, "RANGE", 0, 256, "FMT", "NATIVE") == patterns


def test_opaque_rows_come_back_as_they_are(wire: Wire, ns: str) -> None:
    leaves = [{"k": 40, "v": 0, "heads": 4, "format": "raw:20", "v_format": "raw:0"}]
    wire.ok("KV.PREFIX.REGISTER", ns, 40, "fp16", "LEAVES", json.dumps(leaves))
    sid = ns + "_pk"
    for n in (3, 5_000):
        rows = np.random.default_rng(n).integers(0, 256, (n, 20), np.uint8)
        wire.ok("V.STOREBATCH", sid, 0, 0, n, rows.tobytes(), "FMT", "STORED")
        assert fetched(wire, sid, 0, "RANGE", 0, n, "FMT", "STORED").tobytes() == rows.tobytes()
        by_head = rows.reshape(n, 4, 5).transpose(1, 0, 2)
        words = (sid, 0, "RANGE", 0, n, "FMT", "STORED", "LAYOUT", "HND")
        assert fetched(wire, *words).tobytes() == by_head.tobytes()
    wire.ok("V.STOREBATCH", ns + "_pv", 0, 0, 7, b"", "FMT", "STORED")
    assert wire.ask("V.FETCH", ns + "_pv", 0, "RANGE", 0, 7, "FMT", "STORED") is None


def test_an_opaque_row_may_be_larger_than_what_may_be_in_flight(wire: Wire, ns: str) -> None:
    size = 70_000_000
    leaves = [{"k": 4, "v": 4, "heads": 2, "format": f"raw:{size}"}]
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16", "LEAVES", json.dumps(leaves))
    row = np.random.default_rng(0).bytes(size)
    for options in (("LAYOUT", "NHD"), ("LAYOUT", "HND")):
        wire.ok("V.STOREBATCH", ns + "_pk", 0, 0, 1, row, "FMT", "STORED", *options)
        for wanted in (("LAYOUT", "HND"), ("LAYOUT", "NHD")):
            words = (ns + "_pk", 0, "RANGE", 0, 1, "FMT", "STORED", *wanted)
            assert wire.ask("V.FETCH", *words) == row
    settle(wire)
    assert wire.ask("KV.PREFIX.DROP", ns) == 1


class Sheet:
    """What a layer of rows should hold: a model of overlapping stores."""

    def __init__(self, width: int) -> None:
        self.rows = np.zeros((0, width), "<f2")

    def store(self, start: int, rows: NDArray[np.float16]) -> None:
        short = start + len(rows) - len(self.rows)
        if short > 0:
            self.rows = np.pad(self.rows, ((0, short), (0, 0)))
        self.rows[start : start + len(rows)] = rows


@pytest.mark.parametrize("seed", range(3))
def test_overlapping_runs_show_what_was_stored_last(
    shared: RunningServer, wire: Wire, ns: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "fp16", "HEADS", HEADS)
    sid = ns + "_pk"
    sheet = Sheet(WIDTH)
    for turn in range(40):
        start, n = int(random.integers(0, 900)), int(random.choice([1, 5, 60, 700]))
        rows = random.standard_normal((n, WIDTH)).astype("<f2")
        if turn % 2:
            blob = oracle.head_major("fp16", rows.view(np.uint8), WIDTH, HEADS)
            options = ("FMT", "STORED", "LAYOUT", "HND")
        else:
            blob, options = rows.view(np.uint8), ("FMT", "F16")
        wire.ok("V.STOREBATCH", sid, 0, start, n, blob.tobytes(), *options)
        sheet.store(start, rows)
        if turn == 20:
            assert isinstance(wire.ask("KV.PREFIX.MAP", ns), (bytes, str))
        if turn == 30:
            wire.ok("KV.PREFIX.SAVE")
        first = int(random.integers(0, len(sheet.rows)))
        last = min(len(sheet.rows), first + int(random.integers(1, 400)))
        wanted = sheet.rows[first:last]
        out = fetched(wire, sid, 0, "RANGE", first, last, "FMT", "NATIVE")
        assert out.tobytes() == wanted.tobytes()
        by_head = oracle.head_major("fp16", wanted.view(np.uint8), WIDTH, HEADS)
        words = (sid, 0, "RANGE", first, last, "FMT", "STORED", "LAYOUT", "HND")
        assert fetched(wire, *words).tobytes() == by_head.tobytes()
    info = wire.info("V.INFO", sid)
    assert info["layer_0_tokens"] == str(len(sheet.rows))


def test_rows_outside_what_is_stored_are_zero_and_unstored_layers_are_nil(
    wire: Wire, ns: str
) -> None:
    assert wire.ask("V.CREATE", ns, WIDTH, "VQUANT", "fp16") >= 0
    rows = random_rows(4).astype("<f2")
    wire.ok("V.STOREBATCH", ns, 1, 10, 4, rows.tobytes(), "FMT", "F16")
    out = fetched(wire, ns, 1, "RANGE", 8, 16).view("<f4").reshape(8, WIDTH)
    np.testing.assert_array_equal(out[2:6], rows.astype(np.float32))
    assert not out[:2].any() and not out[6:].any()
    native = fetched(wire, ns, 1, "RANGE", 8, 16, "FMT", "NATIVE").view("<f2")
    np.testing.assert_array_equal(native.astype(np.float32), out.reshape(-1))
    ids = fetched(wire, ns, 1, 2, 11).view("<f4").reshape(2, WIDTH)
    assert not ids[0].any() and (ids[1] == rows[1].astype(np.float32)).all()
    assert wire.ask("V.FETCH", ns, 1, 0, 5, 99) is None
    assert wire.ask("V.FETCH", ns, 0, "RANGE", 0, 4) is None
    assert wire.ask("V.FETCH", ns, 0, 1, 2, 3) is None
    batch = wire.ask("V.FETCH", ns, "BATCH", 0, 12)
    assert batch[0] is None and len(batch) == 2 and len(batch[1]) == 12 * WIDTH * 4
    assert [item is None for item in wire.ask("V.FETCH", ns, "BATCH", 0, 12, 4)] == [
        True,
        False,
        True,
        True,
    ]
    wide = fetched(wire, ns, 1, "RANGE", 0, 100_000, "FMT", "NATIVE").view("<f2")
    assert not wide[14 * WIDTH :].any() and not wide[: 10 * WIDTH].any()


def test_each_layer_follows_its_own_leaf(wire: Wire, ns: str) -> None:
    leaves = [
        {"k": 32, "v": 64, "heads": 1, "format": "fp32"},
        {"k": 64, "v": 0, "heads": 2, "format": "bf16"},
        {"k": 48, "v": 48, "heads": 1, "format": "mlx4g32"},
    ]
    wire.ok("KV.PREFIX.REGISTER", ns, 64, "fp16", "LEAVES", json.dumps(leaves))
    info = wire.info("V.INFO", ns + "_pk")
    assert info["schema"] == "heterogeneous"
    assert [info[f"layer_{n}_fmt"] for n in range(3)] == ["fp32", "bf16", "int8"]
    assert [info[f"layer_{n}_dim"] for n in range(3)] == ["32", "64", "48"]
    for layer, (fmt, width) in enumerate([("fp32", 32), ("bf16", 64), ("int8", 48)]):
        rows = random_rows(6, width, seed=layer)
        wire.ok("V.STOREBATCH", ns + "_pk", layer, 0, 6, rows.tobytes())
        out = fetched(wire, ns + "_pk", layer, "RANGE", 0, 6, "FMT", "STORED")
        np.testing.assert_array_equal(out, oracle.stored(fmt, rows).reshape(-1))
    sizes = [len(item) for item in wire.ask("V.FETCH", ns + "_pk", "BATCH", 0, 6, "FMT", "STORED")]
    assert sizes == [6 * 32 * 4, 6 * 64 * 2, 6 * 56]


def test_the_worked_examples_of_the_formats_hold(wire: Wire, ns: str) -> None:
    row = bytes.fromhex("0000803f 000000c0 0000003f 00000000")
    assert wire.ask("V.CREATE", ns + "i", 4) >= 0
    wire.ok("V.STOREBATCH", ns + "i", 0, 0, 1, row)
    stored = fetched(wire, ns + "i", 0, "RANGE", 0, 1, "FMT", "STORED").tobytes()
    assert stored == bytes.fromhex("000000c0 0000803f ff00d4aa")
    assert wire.ask("V.CREATE", ns + "h", 4, "VQUANT", "fp16") >= 0
    wire.ok("V.STOREBATCH", ns + "h", 0, 0, 1, row)
    native = wire.ask("V.FETCH", ns + "h", 0, "RANGE", 0, 1, "FMT", "NATIVE")
    assert native == bytes.fromhex("003c00c000380000")
    assert wire.ask("V.CREATE", ns + "m", 32, "VQUANT", "mlx4g32") >= 0
    ramp = np.linspace(-1, 1, 32, dtype="<f4")
    wire.ok("V.STOREBATCH", ns + "m", 0, 0, 1, ramp.tobytes())
    stored = fetched(wire, ns + "m", 0, "RANGE", 0, 1, "FMT", "STORED").tobytes()
    assert stored == bytes.fromhex("00112233445566778899aabbccddeeff 4430 00bc")
