"""KV.PREFIX.WARM: what is stored, in any format and layout, is what is attended."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pion_vllm_mlx.formats import get_format, transpose_rows
from tests.conftest import RunningServer, free_port_block
from tests.server.attention import oracle
from tests.server.attention.asking import Asking, Floats, connected, flagged, floats, normal
from tests.server.wire import Refusal, Wire, refuse

HEADS, DIM, ROWS = 2, 64, 90
WIDTH = HEADS * DIM
Q = normal(1, HEADS, 2, DIM)
CUT_AT_HEADS = ("fp32", "fp16", "bf16", "mlx4g32")
FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")


def rows_of(seed: int, count: int = ROWS, width: int = WIDTH) -> Floats:
    return normal(seed, count, width)


def by_head(rows: Floats, heads: int = HEADS) -> Floats:
    """Rows ``[n, H*D]`` as attention wants them: ``[H, n, D]``."""
    return np.ascontiguousarray(rows.reshape(len(rows), heads, -1).transpose(1, 0, 2))


def decoded(fmt: str, rows: Floats) -> Floats:
    """What a format makes of rows."""
    kind = get_format(fmt)
    return by_head(kind.decode(kind.encode(rows)))


def register(wire: Wire, ns: str, fmt: str, *options: str | int) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, fmt, *options)


def store(wire: Wire, ns: str, layer: int, keys: Floats, values: Floats, start: int = 0) -> None:
    for side, rows in (("pk", keys), ("pv", values)):
        wire.ok("V.STOREBATCH", f"{ns}_{side}", layer, start, len(rows), rows.tobytes())


def check(asking: Asking, keys: Floats, values: Floats, *window: int) -> None:
    """The slot answers as attention over ``[H, n, D]``."""
    answer = asking.query(Q, *window)
    assert isinstance(answer, bytes), answer
    wanted, lse = oracle.dense(Q, keys, values, window=window[0] if window else 0)
    cut = 4 * Q.size
    np.testing.assert_allclose(floats(answer[:cut], *Q.shape), wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(floats(answer[cut:], HEADS, 2), lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format_is_attended_as_it_decodes(ask: Asking, fmt: str) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, fmt)
    sides = {}
    for layer in (0, 5):
        keys, values = rows_of(layer), rows_of(layer + 1)
        store(wire, ns, layer, keys, values)
        sides[layer] = keys, values
    before = [wire.ask("V.FETCH", f"{ns}_pk", 5, "RANGE", 0, ROWS), wire.info("V.INFO", f"{ns}_pk")]
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "2"
    for layer, (keys, values) in sides.items():
        check(ask.at(layer=layer), decoded(fmt, keys), decoded(fmt, values))
    after = [wire.ask("V.FETCH", f"{ns}_pk", 5, "RANGE", 0, ROWS), wire.info("V.INFO", f"{ns}_pk")]
    assert after == before
    assert ask.at(layer=1).lookup() == "MISS"


@pytest.mark.parametrize("fmt", CUT_AT_HEADS)
def test_rows_stored_head_by_head_are_the_same_rows(ask: Asking, fmt: str) -> None:
    wire, ns, kind = ask.wire, ask.sid, get_format(fmt)
    register(wire, ns, fmt, "HEADS", HEADS)
    keys, values = rows_of(11), rows_of(12)
    for side, rows in (("pk", keys), ("pv", values)):
        coded = transpose_rows(kind, kind.encode(rows), WIDTH, HEADS, to_head_major=True)
        words = (f"{ns}_{side}", 0, 0, ROWS, coded.tobytes(), "FMT", "STORED", "LAYOUT", "HND")
        wire.ok("V.STOREBATCH", *words)
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "1"
    check(ask.at(layer=0), decoded(fmt, keys), decoded(fmt, values))
    answer = wire.ask("KV.PREFIX.WARM", ns, 4, 32, f"{ns}_attn")
    assert isinstance(answer, Refusal) and "rows of 2 heads, not 4" in answer


def test_many_runs_and_rows_stored_over_others_are_read_as_they_show(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(20, 200), rows_of(21, 200)
    for start in range(0, 200, 40):
        part = slice(start, start + 40)
        store(wire, ns, 0, keys[part], values[part], start)
    again = rows_of(22, 50), rows_of(23, 50)
    store(wire, ns, 0, *again, start=60)
    keys[60:110], values[60:110] = again
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "1"
    check(ask.at(layer=0), by_head(keys), by_head(values))


def test_the_shorter_side_says_how_many_tokens(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(30), rows_of(31)
    store(wire, ns, 0, keys, values[:70])
    store(wire, ns, 1, keys[:1], values)
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "2"
    check(ask.at(layer=0), by_head(keys[:70]), by_head(values[:70]))
    check(ask.at(layer=1), by_head(keys[:1]), by_head(values[:1]))


def test_layers_of_another_width_are_counted_and_half_layers_are_not(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    leaf = {"k": WIDTH, "v": WIDTH, "heads": HEADS, "format": "fp16"}
    leaves = [leaf, leaf | {"v": 32}, leaf | {"format": f"raw:{WIDTH}"}, leaf, leaf | {"v": 0}]
    register(wire, ns, "fp16", "LEAVES", json.dumps(leaves))
    keys, values = rows_of(40), rows_of(41)
    store(wire, ns, 0, keys, values)
    store(wire, ns, 1, keys, rows_of(42, ROWS, 32))
    for side in ("pk", "pv"):
        raw = np.zeros(ROWS * WIDTH, "u1").tobytes()
        wire.ok("V.STOREBATCH", f"{ns}_{side}", 2, 0, ROWS, raw, "FMT", "STORED")
    wire.ok("V.STOREBATCH", f"{ns}_pk", 3, 0, ROWS, keys.tobytes())
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "1 skipped_dim=2"
    check(ask.at(layer=0), decoded("fp16", keys), decoded("fp16", values))
    assert [ask.at(layer=n).lookup() for n in range(1, 5)] == ["MISS"] * 4
    assert wire.ask("KV.PREFIX.WARM", ns, 4, DIM) == "0 skipped_dim=3"


def test_rows_of_other_heads_are_not_taken_for_as_wide_ones(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32", "HEADS", HEADS)
    keys, values = rows_of(46), rows_of(47)
    store(wire, ns, 0, keys, values)
    answer = wire.ask("KV.PREFIX.WARM", ns, 2 * HEADS, DIM // 2)
    assert isinstance(answer, Refusal)
    assert f"layer 0 has rows of {HEADS} heads, not {2 * HEADS}" in answer
    assert ask.at(layer=0).lookup() == "MISS"
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "1"
    check(ask.at(layer=0), by_head(keys), by_head(values))


def test_rows_that_were_never_stored_are_not_attended(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(50), rows_of(51)
    store(wire, ns, 0, keys, values, start=30)
    store(wire, ns, 1, keys[:10], values[:10])
    store(wire, ns, 1, keys[40:], values[40:], start=40)
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "2"
    windowed = ask.at(layer=0)
    check(windowed, by_head(keys), by_head(values), 90)
    check(windowed, by_head(keys), by_head(values), 17)
    suffix = normal(53, HEADS, 3, DIM), normal(54, HEADS, 3, DIM)
    auto = (HEADS, DIM, 8, 2, HEADS)
    for window in ((), (0,), (91,), (120,), (1000,)):
        answers = [
            windowed.query(Q, *window),
            windowed.fused(Q, *suffix, b"", *window),
            windowed.framed(Q, suffix, bytes(range(HEADS)), *window)[1].decode(),
            windowed.command("QUERY_SPARSE_AUTO", *auto, Q[:, 0].tobytes(), b"", *window),
        ]
        for answer in answers:
            assert "the first 30 of 120 tokens are not stored" in answer
            assert "fa_window must be 1 to 90" in answer
        assert isinstance(answers[0], Refusal)
    gap = ask.at(layer=1)
    check(gap, by_head(keys[40:]), by_head(values[40:]), 50)
    assert isinstance(gap.query(Q, 51), Refusal)
    # an index counts from the first token, stored or not
    q = normal(52, HEADS, 1, DIM)
    rows = np.array([[30, 119, 5], [40, 41, 42]], "<i4")
    words = (HEADS, DIM, 3, q.tobytes(), rows.tobytes(), np.array([3, 3], "<u4").tobytes(), 90)
    out = floats(windowed.command("QUERY_SPARSE", *words), HEADS, DIM)
    k, v = by_head(keys), by_head(values)
    for h, seen in enumerate(([0, 89], [10, 11, 12])):
        wanted, _ = oracle.softmax_over(q[h, 0], k[h, seen], v[h, seen])
        np.testing.assert_allclose(out[h], wanted, rtol=0, atol=1e-5)


def test_another_session_may_be_named(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(60), rows_of(61)
    store(wire, ns, 0, keys, values)
    assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM, "some|other sid") == "1"
    assert ask.at(layer=0).lookup() == "MISS"
    check(ask.at("some|other sid", 0), by_head(keys), by_head(values))


def test_with_tokens_a_half_stored_layer_is_refused(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(62), rows_of(63)
    words = ("KV.PREFIX.WARM", ns, HEADS, DIM, ns, "TOKENS", ROWS)
    store(wire, ns, 0, keys[:45], values[:45])
    refuse(wire, f"layer 0 holds 45 tokens, not {ROWS}", *words)
    wire.ok("V.STOREBATCH", f"{ns}_pk", 0, 45, 45, keys[45:].tobytes())
    refuse(wire, "layer 0 holds 45 tokens", *words)
    assert ask.at(layer=0).lookup() == "MISS"
    wire.ok("V.STOREBATCH", f"{ns}_pv", 0, 45, 45, values[45:].tobytes())
    assert wire.ask(*words) == "1"
    check(ask.at(layer=0), by_head(keys), by_head(values))
    refuse(wire, f"layer 0 holds {ROWS} tokens, not 45", *words[:-1], 45)
    sliding = ns + "sliding"
    register(wire, sliding, "fp32")
    store(wire, sliding, 0, keys[:30], values[:30], start=60)
    assert wire.ask("KV.PREFIX.WARM", sliding, HEADS, DIM, sliding, "TOKENS", ROWS) == "1"
    check(ask.at(sliding, 0), by_head(keys[:30]), by_head(values[:30]), 30)


def test_with_a_record_only_what_is_stored_under_it_is_warmed(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    keys, values = rows_of(64), rows_of(65)
    store(wire, ns, 0, keys, values)
    record = b"what was stored" * 1000
    words = ("KV.PREFIX.WARM", ns, HEADS, DIM, ns, "RECORD", hashlib.sha256(record).hexdigest())
    refuse(wire, "no completion record", *words)
    wire.ok("SSM.PREFIX.STORE", ns, 65535, record[1:])
    refuse(wire, "another completion record", *words)
    assert ask.at(layer=0).lookup() == "MISS"
    wire.ok("SSM.PREFIX.STORE", ns, 65535, record)
    assert wire.ask(*words) == "1"
    check(ask.at(layer=0), by_head(keys), by_head(values))


def test_one_layer_may_be_named_and_the_others_stay_as_they_are(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    register(wire, ns, "fp32")
    sides = [(rows_of(66 + n), rows_of(76 + n)) for n in range(3)]
    for layer, (keys, values) in enumerate(sides):
        store(wire, ns, layer, keys, values)
    words = ("KV.PREFIX.WARM", ns, HEADS, DIM, ns, "LAYER")
    assert wire.ask(*words, 1) == "1"
    assert [ask.at(layer=n).lookup() for n in range(3)] == ["MISS", "HIT", "MISS"]
    # the same rows as other heads: each layer is of its own shape
    half = ("KV.PREFIX.WARM", ns, HEADS // 2, DIM * 2, ns, "LAYER")
    assert wire.ask(*half, 2) == "1"
    check(ask.at(layer=1), *map(by_head, sides[1]))
    assert wire.ask(*words, 7) == "0"
    assert wire.ask("KV.PREFIX.WARM", ns, 1, 32, ns, "LAYER", 0) == "0 skipped_dim=1"
    for bad in ("-1", "65536", "x", ""):
        refuse(wire, "LAYER", *words, bad)
    assert wire.ask(*words, 0, "TOKENS", ROWS) == "1"
    check(ask.at(layer=0), *map(by_head, sides[0]))


def test_what_cannot_be_warmed_is_refused(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    missing = "KV.PREFIX.WARM session not found"
    refuse(wire, missing, "KV.PREFIX.WARM", ns, HEADS, DIM)
    register(wire, ns, "fp32")
    store(wire, ns, 0, rows_of(70), rows_of(71))
    refuse(wire, "unsupported head dim D=48", "KV.PREFIX.WARM", ns, HEADS, 48)
    for bad in ("0", "-1", "1025", "x", ""):
        refuse(wire, "H", "KV.PREFIX.WARM", ns, bad, DIM)
        refuse(wire, "", "KV.PREFIX.WARM", ns, HEADS, bad + "0" if bad == "0" else bad)
    refuse(wire, "wrong number", "KV.PREFIX.WARM", ns, HEADS)
    refuse(wire, "unknown option", "KV.PREFIX.WARM", ns, HEADS, DIM, "a", "b")
    refuse(wire, "lacks its value", "KV.PREFIX.WARM", ns, HEADS, DIM, "a", "TOKENS")
    refuse(wire, "TOKENS", "KV.PREFIX.WARM", ns, HEADS, DIM, "a", "TOKENS", 0)
    refuse(wire, "1 to 65535 bytes", "KV.PREFIX.WARM", ns, HEADS, DIM, "")
    wire.ask("V.DROP", f"{ns}_pv")
    refuse(wire, missing, "KV.PREFIX.WARM", ns, HEADS, DIM)


def test_a_dropped_namespace_is_gone_from_here_too(ask: Asking) -> None:
    wire, ns = ask.wire, ask.sid
    keep = ask.at(ns + "x", 0)
    keep.store(by_head(rows_of(80)), by_head(rows_of(81)))
    for how in (("KV.PREFIX.DROP", ns), ("KV.PREFIX.EXPIRE", ns, 0)):
        register(wire, ns, "fp16")
        store(wire, ns, 0, rows_of(80), rows_of(81))
        for words in ((), (f"{ns}_attn",), ("free",)):
            assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM, *words) == "1"
        assert wire.ask(*how) == 1
        slots = [ask.at(name, 0) for name in (ns, f"{ns}_attn", "free")]
        ends_at = time.monotonic() + 20
        while slots[0].lookup() == "HIT" and time.monotonic() < ends_at:
            time.sleep(0.02)  # what is past its deadline is dropped by the next housekeeping
        assert [slot.lookup() for slot in slots] == ["MISS"] * 3
        assert keep.lookup() == "HIT"


def test_a_namespace_evicted_from_disk_is_still_attended(tmp_path: Path) -> None:
    keys, values = rows_of(85), rows_of(86)
    with flagged(tmp_path / "data", "--max-sessions", "4") as server:
        with connected(server, "old") as asking:
            wire = asking.wire
            register(wire, "old", "fp32")
            store(wire, "old", 0, keys, values)
            assert wire.ask("KV.PREFIX.WARM", "old", HEADS, DIM) == "1"
            for name in ("new", "newer"):
                register(wire, name, "fp32")
            assert wire.ask("KV.PREFIX.LOOKUP", "old") == "MISS"
            check(asking, by_head(keys), by_head(values))
            missing = "ERR KV.PREFIX.WARM session not found"
            assert wire.ask("KV.PREFIX.WARM", "old", HEADS, DIM) == missing


def test_damaged_rows_are_not_attended(pion_server: RunningServer) -> None:
    with connected(pion_server, "ns") as asking:
        register(asking.wire, "ns", "fp32")
        store(asking.wire, "ns", 0, rows_of(90, 2000), rows_of(91, 2000))
        asking.wire.ok("KV.PREFIX.SAVE")
    pion_server.stop()
    (segment,) = (pion_server.dir / "pion.segments.0").glob("*.safetensors")
    data = bytearray(segment.read_bytes())
    data[-5000] ^= 1
    segment.write_bytes(data)
    pion_server.start()
    with connected(pion_server, "ns") as asking:
        missing = "ERR KV.PREFIX.WARM session not found"
        assert asking.wire.ask("KV.PREFIX.WARM", "ns", HEADS, DIM) == missing
        assert asking.lookup() == "MISS"
        assert asking.wire.info("KV.PREFIX.INFO")["vstore_damaged"] == "2"


@pytest.fixture(scope="module")
def as_stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that keeps rows in their own format."""
    folder = tmp_path_factory.mktemp("stored") / "data"
    with flagged(folder, "--attend-dtype", "stored") as server:
        yield server


@pytest.mark.parametrize(
    ("fmt", "hnd"),
    [*((fmt, False) for fmt in FORMATS), *((fmt, True) for fmt in CUT_AT_HEADS)],
)
def test_rows_may_stay_in_their_format(as_stored: RunningServer, fmt: str, hnd: bool) -> None:
    kind = get_format(fmt)
    with connected(as_stored, f"{fmt}{hnd}") as asking:
        wire, ns = asking.wire, asking.sid
        register(wire, ns, fmt, *(("HEADS", HEADS) if hnd else ()))
        keys, values = rows_of(95), rows_of(96)
        for side, rows in (("pk", keys), ("pv", values)):
            words = (f"{ns}_{side}", 0, 0, ROWS)
            if hnd:
                coded = transpose_rows(kind, kind.encode(rows), WIDTH, HEADS, to_head_major=True)
                wire.ok("V.STOREBATCH", *words, coded.tobytes(), "FMT", "STORED", "LAYOUT", "HND")
            else:
                wire.ok("V.STOREBATCH", *words, rows.tobytes())
        before = asking.info()["sdpa_bytes"]
        assert wire.ask("KV.PREFIX.WARM", ns, HEADS, DIM) == "1"
        check(asking, decoded(fmt, keys), decoded(fmt, values))
        per_value = {"fp16": 2, "bf16": 2, "mlx4g32": 20 / 32}.get(fmt, 4)
        assert asking.info()["sdpa_bytes"] - before == 2 * ROWS * WIDTH * per_value


def test_a_warm_server_reads_what_a_restart_left(pion_server: RunningServer) -> None:
    keys, values = rows_of(97, 300), rows_of(98, 300)
    with connected(pion_server, "ns") as asking:
        register(asking.wire, "ns", "bf16")
        store(asking.wire, "ns", 0, keys, values)
    pion_server.restart()
    with connected(pion_server, "ns") as asking:
        assert asking.wire.ask("KV.PREFIX.WARM", "ns", HEADS, DIM) == "1"
        check(asking, decoded("bf16", keys), decoded("bf16", values))


def test_workers_say_where_the_rows_are(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    flags = ("-w", "2", "--independent-workers")
    server = RunningServer(port=free_port_block(8), dir=folder, flags=flags)
    server.start()
    try:
        own = [Wire.tcp(server.port + 2 + n) for n in range(2)]
        register(own[1], "ns", "fp32")
        store(own[1], "ns", 0, rows_of(99), rows_of(100))
        refuse(own[0], "KV.PREFIX.WARM session lives on worker 1", "KV.PREFIX.WARM", "ns", 2, DIM)
        assert own[1].ask("KV.PREFIX.WARM", "ns", HEADS, DIM) == "1"
        places = [wire.ask("ATTEND.PREFIX.LOOKUP", "ns", 0) for wire in own]
        assert places == ["MISS", "HIT"]
        for wire in own:
            wire.close()
    finally:
        server.stop()
