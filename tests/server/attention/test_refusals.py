"""What cannot be answered is refused in the protocol's words, and changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.server.attention.asking import Asking, floats, fused_body, normal
from tests.server.memory.lane import ERROR, MISS, PING, QUERY_FUSED
from tests.server.wire import refuse

KEYS, VALUES = normal(1, 2, 40, 32), normal(2, 2, 40, 32)
Q = normal(3, 2, 1, 32)
Q_BYTES, NO_SUFFIX = Q.tobytes(), normal(0, 2, 0, 32)
ONE = np.zeros(2, "<i4").tobytes()


@pytest.fixture
def stored(ask: Asking) -> Asking:
    """H=2, N=40, D=32 in layer 3."""
    ask.store(KEYS, VALUES)
    return ask


BAD_NUMBERS = ["abc", "-5", "0", "1e3", "99999999999999999999", "", "+1", " 1", "1.0"]


@pytest.mark.parametrize("bad", BAD_NUMBERS)
@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("form", ["STORE", "QUERY", "SPARSE", "AUTO"])
def test_a_bad_number_is_refused(stored: Asking, bad: str, at: int, form: str) -> None:
    words: dict[str, list[Any]] = {
        "STORE": ["STORE", stored.sid, 3, 2, 40, 32, KEYS.tobytes(), VALUES.tobytes()],
        "QUERY": ["QUERY", stored.sid, 3, 2, 32, 40, Q_BYTES],
        "SPARSE": ["QUERY_SPARSE", stored.sid, 3, 2, 32, 1, Q_BYTES, ONE, ONE],
        "AUTO": ["QUERY_SPARSE_AUTO", stored.sid, 3, 2, 32, 16, 2, 2, Q_BYTES, b""],
    }
    name, *rest = words[form]
    rest[at - 1] = bad
    before = stored.info()
    refuse(stored.wire, "", f"ATTEND.PREFIX.{name}", *rest)
    assert stored.info() == before
    assert stored.lookup() == "HIT"


@pytest.mark.parametrize("layer", ["-1", "65536", "x", "9999999999", ""])
def test_a_layer_out_of_bounds_is_refused(stored: Asking, layer: str) -> None:
    for name, *rest in (
        ("LOOKUP",),
        ("STORE", 2, 40, 32, KEYS.tobytes(), VALUES.tobytes()),
        ("QUERY", 2, 32, 40, Q_BYTES),
    ):
        refuse(stored.wire, "layer", f"ATTEND.PREFIX.{name}", stored.sid, layer, *rest)


@pytest.mark.parametrize("dim", [1, 31, 33, 48, 80, 384, 1024])
def test_a_head_dimension_without_kernels_is_named(stored: Asking, dim: int) -> None:
    text = f"unsupported head dim D={dim}"
    blob = bytes(4 * 2 * dim)
    refuse(stored.wire, text, "ATTEND.PREFIX.STORE", stored.sid, 3, 2, 1, dim, blob, blob)
    refuse(stored.wire, text, "ATTEND.PREFIX.QUERY", stored.sid, 3, 2, dim, 1, blob)
    refuse(stored.wire, text, "KV.PREFIX.WARM", stored.sid, 2, dim)
    q, none = np.zeros((2, 1, dim), "<f4"), np.zeros((2, 0, dim), "<f4")
    status, body = stored.framed(q, (none, none), bytes([0, 1]))
    assert status == ERROR and body.decode() == f"ERR {text}"


def test_a_blob_of_another_size_is_refused(stored: Asking) -> None:
    sid, good = stored.sid, KEYS.tobytes()
    for keys, values in ((good[:-4], good), (good, good + bytes(4)), (b"", good), (good, b"")):
        words = ("ATTEND.PREFIX.STORE", sid, 3, 2, 40, 32, keys, values)
        refuse(stored.wire, "blob size", *words)
    for q in (b"", Q_BYTES[:-1], Q_BYTES + bytes(4), bytes(4)):
        refuse(stored.wire, "blob size", "ATTEND.PREFIX.QUERY", sid, 3, 2, 32, 40, q)
        words = ("ATTEND.PREFIX.QUERY_SPARSE", sid, 3, 2, 32, 1, q, ONE, ONE)
        refuse(stored.wire, "blob size", *words)
        fused = ("ATTEND.PREFIX.QUERY_FUSED", sid, 3, 2, 32, 0, 2, q, b"", b"", b"")
        refuse(stored.wire, "blob size", *fused)
    two = Q_BYTES * 2  # M = 2 where one query is taken
    refuse(
        stored.wire,
        "blob size",
        "ATTEND.PREFIX.QUERY_SPARSE_AUTO",
        sid,
        3,
        2,
        32,
        8,
        1,
        2,
        two,
        b"",
    )
    fused = ("ATTEND.PREFIX.QUERY_FUSED", sid, 3, 2, 32, 1, 2, Q_BYTES, Q_BYTES[4:], Q_BYTES, b"")
    refuse(stored.wire, "blob size", *fused)
    refuse(stored.wire, "blob size", *fused[:5], 2, *fused[6:])


def test_a_frame_of_another_length_is_refused(stored: Asking) -> None:
    body = fused_body(stored.sid, 3, Q, (NO_SUFFIX, NO_SUFFIX), bytes([0, 1]))
    for bad in (body[:-1], body + b"\0", body + bytes(3), body + bytes(5), body[:-2]):
        stored.lane.refuse("blob size", QUERY_FUSED, bad)
    for short in (b"", b"\3", body[:3], body[: len(stored.sid) + 10]):
        stored.lane.refuse("malformed body", QUERY_FUSED, short)
    huge = fused_body(stored.sid, 3, Q, (NO_SUFFIX, NO_SUFFIX), bytes([0, 1]))
    at = 2 + len(stored.sid) + 8
    stored.lane.refuse("blob size", QUERY_FUSED, huge[:at] + b"\xff" * 8 + huge[at + 8 :])
    stored.lane.refuse("Q blob size", QUERY_FUSED, body[:at] + bytes(8) + bytes([0, 1]))


def test_other_heads_or_dimensions_than_stored_are_a_mismatch(stored: Asking) -> None:
    mismatch = "ATTEND.PREFIX: shape mismatch"
    for heads, dim in ((1, 32), (4, 32), (2, 64), (1, 64)):
        q = normal(4, heads, 1, dim)
        words = ("ATTEND.PREFIX.QUERY", stored.sid, 3, heads, dim, 40, q.tobytes())
        refuse(stored.wire, mismatch, *words)
        none = normal(0, heads, 0, dim)
        status, body = stored.framed(q, (none, none), bytes(range(heads)))
        assert status == ERROR and body.decode().startswith(f"ERR {mismatch}")
    q = normal(4, 4, 1, 32)
    words = ("ATTEND.PREFIX.QUERY_FUSED", stored.sid, 3, 4, 32, 0, 4, q.tobytes(), b"", b"", b"")
    refuse(stored.wire, mismatch, *words)


def test_a_head_map_has_to_fit(stored: Asking) -> None:
    q = normal(5, 4, 1, 32)
    words = ("ATTEND.PREFIX.QUERY_FUSED", stored.sid, 3, 4, 32, 0, 2, q.tobytes(), b"", b"")
    for head_map in (b"", bytes(3), bytes(5), bytes([0, 0, 1, 2]), bytes([255] * 4)):
        refuse(stored.wire, "head_map", *words, head_map)
    sparse = ("ATTEND.PREFIX.QUERY_SPARSE_AUTO", stored.sid, 3, 4, 32, 8, 1, 2, q.tobytes())
    refuse(stored.wire, "head_map", *sparse, bytes([0, 1, 2, 0]))
    status, body = stored.framed(q, (NO_SUFFIX, NO_SUFFIX), bytes([0, 0, 1, 2]))
    assert status == ERROR and b"head_map" in body


@pytest.mark.parametrize("window", ["-2", "x", "", "4294967296"])
def test_a_bad_window_is_refused(stored: Asking, window: str) -> None:
    query = ("ATTEND.PREFIX.QUERY", stored.sid, 3, 2, 32, 40, Q_BYTES)
    refuse(stored.wire, "fa_window", *query, window)


@pytest.mark.parametrize("selector", ["2", "-1", "quest", ""])
def test_an_unknown_selector_is_refused(stored: Asking, selector: str) -> None:
    words = ("ATTEND.PREFIX.QUERY_SPARSE_AUTO", stored.sid, 3, 2, 32, 8, 1, 2, Q_BYTES, b"", -1)
    refuse(stored.wire, "selector", *words, selector)


@pytest.mark.parametrize("index", [-1, 40, 2**31 - 1, -(2**31)])
def test_an_index_outside_the_prefix_is_refused(stored: Asking, index: int) -> None:
    rows = np.array([[0, index], [1, 2]], "<i4").tobytes()
    words = ("ATTEND.PREFIX.QUERY_SPARSE", stored.sid, 3, 2, 32, 2, Q_BYTES, rows)
    refuse(stored.wire, "outside", *words, np.array([2, 2], "<u4").tobytes())
    # one that is not counted may be anything
    answer = stored.wire.ask(*words, np.array([1, 2], "<u4").tobytes())
    assert floats(answer, 2, 32).any()
    refuse(stored.wire, "counts", *words, np.array([3, 1], "<u4").tobytes())


def test_what_was_never_stored_is_not_found(stored: Asking) -> None:
    for other in (stored.at(stored.sid + "x"), stored.at(layer=4)):
        assert other.lookup() == "MISS"
        assert other.query(Q) == "ERR session not found"
        assert other.fused(Q, NO_SUFFIX, NO_SUFFIX) == "ERR session not found"
        assert other.framed(Q, (NO_SUFFIX, NO_SUFFIX), bytes([0, 1])) == (MISS, b"")
    assert stored.lane.ok(PING) == b""


@pytest.mark.parametrize(
    "words",
    [
        ("STORE", 2, 40, 32, b""),
        ("STORE", 2, 40, 32, b"", b"", b""),
        ("QUERY", 2, 32, 40),
        ("QUERY", 2, 32, 40, b"", 0, 0),
        ("QUERY_FUSED", 2, 32, 0, 2, b"", b"", b""),
        ("QUERY_FUSED", 2, 32, 0, 2, b"", b"", b"", b"", 0, 0),
        ("QUERY_SPARSE", 2, 32, 1, b"", b""),
        ("QUERY_SPARSE", 2, 32, 1, b"", b"", b"", 0, 0),
        ("QUERY_SPARSE_AUTO", 2, 32, 1, 1, 2, b""),
        ("QUERY_SPARSE_AUTO", 2, 32, 1, 1, 2, b"", b"", 0, 0, 0),
        ("QUERY_SPARSE_AUTO_FUSED", 2, 32, 1, 1, 2, 0, b"", b"", b""),
        ("QUERY_SPARSE_AUTO_FUSED", 2, 32, 1, 1, 2, 0, b"", b"", b"", b"", 0, 0, 0),
    ],
    ids=lambda words: f"{words[0]}_{len(words)}",
)
def test_a_wrong_number_of_words_is_refused(stored: Asking, words: tuple[Any, ...]) -> None:
    name, *rest = words
    command = (f"ATTEND.PREFIX.{name}", stored.sid, 3, *rest)
    refuse(stored.wire, "wrong number of arguments", *command)


def test_an_unknown_option_of_a_lookup_is_refused(stored: Asking) -> None:
    for more in ((1,), ("SHAPE", 1)):
        command = ("ATTEND.PREFIX.LOOKUP", stored.sid, 3, *more)
        refuse(stored.wire, "unknown option '1'", *command)


def test_more_kv_heads_than_a_map_can_name_are_refused(stored: Asking) -> None:
    blob = bytes(4 * 257 * 32)
    words = ("ATTEND.PREFIX.STORE", stored.sid, 3, 257, 1, 32, blob, blob)
    refuse(stored.wire, "at most 256", *words)
    refuse(stored.wire, "H", "ATTEND.PREFIX.STORE", stored.sid, 3, 1025, 1, 32, blob, blob)
    assert floats(stored.query(Q), 2, 1, 32).any()


def test_both_lanes_refuse_in_the_same_words(stored: Asking) -> None:
    """A frame has one length, RESP one a blob: all but those texts are the same."""
    none = NO_SUFFIX, NO_SUFFIX
    long = normal(6, 2, 1, 48), (normal(0, 2, 0, 48), normal(0, 2, 0, 48))
    one = normal(7, 1, 1, 32), (normal(0, 1, 0, 32), normal(0, 1, 0, 32))
    for q, suffix, head_map, said in (
        (Q, none, bytes([0, 2]), "head_map names head 2 of 2"),
        (Q[:, :0], none, bytes([0, 1]), "holds no query, M must be 1 or more"),
        (*long, bytes([0, 1]), "unsupported head dim D=48"),
        (*one, bytes(1), "shape mismatch"),
    ):
        line = stored.fused(q, *suffix, head_map)
        status, body = stored.framed(q, suffix, head_map)
        assert (status, body.decode()) == (ERROR, line) and said in line
        assert line.startswith("ERR ") and "ERR" not in line[4:]
