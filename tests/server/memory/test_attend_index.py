"""ATTEND.*: value rows found by the L2 distance of their keys, exactly."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.server.wire import Wire, Word, refuse, settle

Floats = NDArray[np.float32]


def rows(seed: int, count: int, width: int) -> Floats:
    return np.random.default_rng(seed).standard_normal((count, width)).astype("<f4")


def floats(answer: object) -> Floats:
    assert isinstance(answer, bytes), answer
    return np.frombuffer(answer, "<f4")


def nearest(keys: Floats, query: Floats, k: int) -> NDArray[np.int64]:
    """The oracle: every distance in float64, sorted."""
    distances = np.linalg.norm(keys.astype("f8") - query.astype("f8"), axis=1)
    return np.argsort(distances, kind="stable")[:k]


def lines(wire: Wire, sid: str) -> dict[str, str]:
    """The lines of ATTEND.INFO about one session."""
    fields = wire.info("ATTEND.INFO")
    slot = next(name for name, value in fields.items() if name.endswith(".id") and value == sid)
    prefix = slot.removesuffix("id")
    return {
        name.removeprefix(prefix): value
        for name, value in fields.items()
        if name.startswith(prefix)
    }


@pytest.fixture
def index(wire: Wire, ns: str) -> str:
    """Keys of 8, values of 4, fp32; 10 rows in layer 3."""
    wire.ask("ATTEND.CREATE", ns, 8, 4, "VQUANT", "fp32")
    wire.ok("ATTEND.STORE", ns, 3, 10, rows(1, 10, 8).tobytes(), rows(2, 10, 4).tobytes())
    return ns


def refused(wire: Wire, fragment: str, *words: Word) -> None:
    before = wire.ask("ATTEND.INFO")
    refuse(wire, fragment, *words)
    assert wire.ask("ATTEND.INFO") == before


def test_the_answer_is_that_of_a_full_search_in_float64(wire: Wire, ns: str) -> None:
    keys, values = rows(3, 3000, 24), rows(4, 3000, 5)
    assert isinstance(wire.ask("ATTEND.CREATE", ns, 24, 5, "VQUANT", "fp32"), int)
    for at in range(0, 3000, 300):
        part = slice(at, at + 300)
        wire.ok("ATTEND.STORE", ns, 0, 300, keys[part].tobytes(), values[part].tobytes())
    for finalized in (False, True):
        for query in rows(5, 10, 24):
            answer = floats(wire.ask("ATTEND.QUERY", ns, 0, 70, query.tobytes()))
            np.testing.assert_array_equal(
                answer.reshape(-1, 5), values[nearest(keys, query, 70)], str(finalized)
            )
        wire.ok("ATTEND.FINALIZE", ns, 0)


def test_several_stores_append_and_a_key_finds_its_own_row(wire: Wire, ns: str) -> None:
    wire.ask("ATTEND.CREATE", ns, 16, 3, "VQUANT", "fp32")
    keys, values = rows(6, 100, 16), rows(7, 100, 3)
    for count, at in ((1, 0), (60, 1), (39, 61)):
        part = slice(at, at + count)
        wire.ok("ATTEND.STORE", ns, 1, count, keys[part].tobytes(), values[part].tobytes())
    for n in range(100):
        best = floats(wire.ask("ATTEND.QUERY", ns, 1, 1, keys[n].tobytes()))
        np.testing.assert_array_equal(best, values[n])
    everything = wire.ask("ATTEND.QUERY", ns, 1, 150, keys[0].tobytes())
    assert len(everything) == 100 * 3 * 4
    for k in (1, 7, 99, 100):
        assert everything.startswith(wire.ask("ATTEND.QUERY", ns, 1, k, keys[0].tobytes()))
    assert wire.ask("ATTEND.QUERY", ns, 1, 4096, keys[0].tobytes()) == everything


def test_withdist_appends_the_distances_and_leaves_the_rows_as_they_are(
    wire: Wire, index: str
) -> None:
    keys, query = rows(1, 10, 8), rows(8, 1, 8)
    plain = wire.ask("ATTEND.QUERY", index, 3, 6, query.tobytes())
    more = wire.ask("ATTEND.QUERY", index, 3, 6, query.tobytes(), "withdist")
    assert more.startswith(plain) and len(more) == len(plain) + 6 * 4
    order = nearest(keys, query[0], 6)
    exact = np.linalg.norm(keys[order].astype("f8") - query.astype("f8"), axis=1)
    np.testing.assert_array_equal(floats(more[len(plain) :]), exact.astype("f4"))


def test_values_come_back_as_their_format_keeps_them(wire: Wire, ns: str) -> None:
    keys, values = rows(9, 20, 4), rows(10, 20, 64)
    for name, most in (
        *(("int8", 0.02), ("fp16", 1e-3), ("bf16", 0.02), ("fp8", 0.2), ("mlx4g32", 0.4)),
        *(("turbo4", 0.5), ("turbo3", 1.0), ("turbo2", 2.0), ("fp32", 0.0)),
    ):
        sid = f"{ns}.{name}"
        wire.ask("ATTEND.CREATE", sid, 4, 64, "vquant", name.upper())
        wire.ok("ATTEND.STORE", sid, 0, 20, keys.tobytes(), values.tobytes())
        answer = floats(wire.ask("ATTEND.QUERY", sid, 0, 20, keys[0].tobytes()))
        error = np.abs(answer.reshape(20, 64) - values[nearest(keys, keys[0], 20)]).max()
        assert error <= most and (error > 0) == (name != "fp32")
        assert lines(wire, sid)["vquant"] == name


@pytest.mark.parametrize(
    ("width", "options", "reported"),
    [
        (64, (), "int8"),
        (64, ("KQUANT", "fp16"), "int8"),
        (64, ("VQUANT", "mlx4g32"), "mlx4g32"),
        (48, ("VQUANT", "mlx4g32"), "int8"),
        (64, ("VQUANT", "bf16_rope_fp8_body", "ROPE", 32), "bf16_rope_fp8_body"),
        (64, ("VQUANT", "bf16_rope_fp8_body"), "int8"),
        (64, ("VQUANT", "bf16_rope_fp8_body", "ROPE", 64), "int8"),
        (64, ("VQUANT", "bf16_rope_fp8_body", "ROPE", 33), "int8"),
    ],
)
def test_a_format_that_does_not_fit_falls_back_to_int8(
    wire: Wire, ns: str, width: int, options: tuple[Word, ...], reported: str
) -> None:
    assert isinstance(wire.ask("ATTEND.CREATE", ns, 8, width, *options), int)
    seen = lines(wire, ns)
    assert (seen["vquant"], seen["kquant"]) == (reported, "int8")
    assert (seen["key_dim"], seen["value_dim"], seen["boundary"]) == ("8", str(width), "0")


def test_the_outer_layers_keep_their_values_in_the_boundary_format(wire: Wire, ns: str) -> None:
    options = ("VQUANT", "mlx4g32", "BOUNDARY", 2, "BOUNDARY_VQUANT", "fp32")
    wire.ask("ATTEND.CREATE", ns, 4, 32, *options)
    keys, values = rows(11, 8, 4), rows(12, 8, 32)
    for layer in range(7):
        wire.ok("ATTEND.STORE", ns, layer, 8, keys.tobytes(), values.tobytes())
        answer = floats(wire.ask("ATTEND.QUERY", ns, layer, 1, keys[5].tobytes()))
        np.testing.assert_array_equal(answer, values[5])
    exact = [
        np.array_equal(floats(wire.ask("ATTEND.QUERY", ns, layer, 1, keys[5].tobytes())), values[5])
        for layer in range(7)
    ]
    assert exact == [True, True, False, False, False, True, True]
    wire.ok("ATTEND.STORE", ns, 5, 8, (keys + 100).tobytes(), values.tobytes())
    answer = floats(wire.ask("ATTEND.QUERY", ns, 5, 1, (keys[5] + np.float32(100)).tobytes()))
    np.testing.assert_array_equal(answer, values[5])


def test_values_that_a_format_cannot_hold_stay_in_the_one_they_came_in(wire: Wire, ns: str) -> None:
    wire.ask("ATTEND.CREATE", ns, 2, 2, "BOUNDARY", 1, "BOUNDARY_VQUANT", "fp32")
    keys = rows(13, 1, 2).tobytes()
    odd = np.array([np.inf, np.nan], "<f4").tobytes()
    for layer in range(3):
        values = odd if layer == 1 else keys
        wire.ok("ATTEND.STORE", ns, layer, 1, keys, values)
    assert wire.ask("ATTEND.QUERY", ns, 1, 1, keys) == odd
    wire.ok("ATTEND.STORE", ns, 1, 1, keys, keys)
    assert len(wire.ask("ATTEND.QUERY", ns, 1, 2, keys)) == 16


def test_a_refused_store_leaves_no_layer_behind(wire: Wire, ns: str) -> None:
    wire.ask("ATTEND.CREATE", ns, 2, 2)
    nan = np.array([np.nan, 0], "<f4").tobytes()
    refused(wire, "finite", "ATTEND.STORE", ns, 9, 1, bytes(8), nan)
    refused(wire, "layer not found", "ATTEND.QUERY", ns, 9, 1, bytes(8))


def test_creating_again_keeps_what_is_there_and_another_shape_is_refused(
    wire: Wire, index: str
) -> None:
    before = wire.info("ATTEND.INFO")
    slot = wire.ask("ATTEND.CREATE", index, 8, 4, "VQUANT", "FP32")
    assert before[f"session[{slot}].id"] == index
    assert len(wire.ask("ATTEND.QUERY", index, 3, 99, bytes(32))) == 10 * 16
    refused(wire, "already exists", "ATTEND.CREATE", index, 8, 5, "VQUANT", "fp32")
    refused(wire, "already exists", "ATTEND.CREATE", index, 8, 4)
    wire.ask("ATTEND.CREATE", index + "empty", 8, 4)
    assert isinstance(wire.ask("ATTEND.CREATE", index + "empty", 9, 5), int)
    assert lines(wire, index + "empty")["key_dim"] == "9"


def test_info_counts_tokens_and_queries(wire: Wire, index: str) -> None:
    before = wire.info("ATTEND.INFO")
    wire.ok("ATTEND.STORE", index, 0, 2, bytes(64), bytes(32))
    wire.ask("ATTEND.QUERY", index, 0, 1, bytes(32))
    after = wire.info("ATTEND.INFO")
    assert int(after["total_tokens"]) - int(before["total_tokens"]) == 2
    assert int(after["total_queries"]) - int(before["total_queries"]) == 1
    assert after["enabled"] == "1"


def test_the_257th_session_takes_the_place_of_the_least_recently_used(wire: Wire, ns: str) -> None:
    for n in range(256):
        wire.ask("ATTEND.CREATE", f"{ns}.{n}", 1, 1)
    wire.ok("ATTEND.STORE", f"{ns}.0", 0, 1, bytes(4), bytes(4))
    slot = wire.ask("ATTEND.CREATE", f"{ns}.256", 1, 1)
    assert 0 <= slot < 256
    assert wire.info("ATTEND.INFO")["sessions"] == "256"
    refused(wire, "session not found", "ATTEND.QUERY", f"{ns}.1", 0, 1, bytes(4))
    assert wire.ask("ATTEND.QUERY", f"{ns}.0", 0, 1, bytes(4)) == bytes(4)


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ("key_dim", ("ATTEND.CREATE", "new", 0, 4)),
        ("value_dim", ("ATTEND.CREATE", "new", 4, 0)),
        ("key_dim", ("ATTEND.CREATE", "new", "abc", 4)),
        ("key_dim", ("ATTEND.CREATE", "new", 65536, 4)),
        ("value_dim", ("ATTEND.CREATE", "new", 4, "1e3")),
        ("unknown format", ("ATTEND.CREATE", "new", 4, 4, "VQUANT", "fp12")),
        ("unknown format", ("ATTEND.CREATE", "new", 4, 4, "KQUANT", "nothing")),
        ("unknown format", ("ATTEND.CREATE", "new", 4, 4, "BOUNDARY_VQUANT", "raw:16")),
        ("BOUNDARY", ("ATTEND.CREATE", "new", 4, 4, "BOUNDARY", -1)),
        ("ROPE", ("ATTEND.CREATE", "new", 4, 4, "ROPE", "x")),
        ("unknown option", ("ATTEND.CREATE", "new", 4, 4, "QUANT", "int8")),
        ("lacks its value", ("ATTEND.CREATE", "new", 4, 4, "VQUANT")),
        ("wrong number of arguments", ("ATTEND.CREATE", "new", 4)),
        ("session id", ("ATTEND.CREATE", "", 4, 4)),
        ("session not found", ("ATTEND.STORE", "nobody", 0, 1, bytes(32), bytes(16))),
        ("count", ("ATTEND.STORE", "INDEX", 0, 0, b"", b"")),
        ("count", ("ATTEND.STORE", "INDEX", 0, -1, bytes(32), bytes(16))),
        ("keys must be", ("ATTEND.STORE", "INDEX", 0, 1, bytes(31), bytes(16))),
        ("keys must be", ("ATTEND.STORE", "INDEX", 0, 1, bytes(64), bytes(16))),
        ("keys must be", ("ATTEND.STORE", "INDEX", 0, 2, bytes(300_000), bytes(32))),
        ("finite", ("ATTEND.STORE", "INDEX", 3, 1, b"\0\0\xc0\x7f" + bytes(28), bytes(16))),
        ("finite", ("ATTEND.STORE", "INDEX", 0, 1, bytes(28) + b"\0\0\x80\xff", bytes(16))),
        ("values must be", ("ATTEND.STORE", "INDEX", 0, 1, bytes(32), bytes(20))),
        ("values must be", ("ATTEND.STORE", "INDEX", 0, 2, bytes(64), bytes(16))),
        ("layer", ("ATTEND.STORE", "INDEX", 9999999999, 1, bytes(32), bytes(16))),
        ("layer", ("ATTEND.STORE", "INDEX", -1, 1, bytes(32), bytes(16))),
        ("layer", ("ATTEND.STORE", "INDEX", "x", 1, bytes(32), bytes(16))),
        ("wrong number of arguments", ("ATTEND.STORE", "INDEX", 0, 1, bytes(32))),
        ("session not found", ("ATTEND.FINALIZE", "nobody", 0)),
        ("layer", ("ATTEND.FINALIZE", "INDEX", 65536)),
        ("wrong number of arguments", ("ATTEND.FINALIZE", "INDEX")),
        ("session not found", ("ATTEND.QUERY", "nobody", 3, 1, bytes(32))),
        ("layer not found", ("ATTEND.QUERY", "INDEX", 4, 1, bytes(32))),
        ("layer", ("ATTEND.QUERY", "INDEX", 9999999999, 1, bytes(32))),
        ("layer", ("ATTEND.QUERY", "INDEX", -1, 1, bytes(32))),
        ("layer", ("ATTEND.QUERY", "INDEX", "x", 1, bytes(32))),
        ("k must be", ("ATTEND.QUERY", "INDEX", 3, 0, bytes(32))),
        ("k must be", ("ATTEND.QUERY", "INDEX", 3, 4097, bytes(32))),
        ("k is not", ("ATTEND.QUERY", "INDEX", 3, -1, bytes(32))),
        ("query must be", ("ATTEND.QUERY", "INDEX", 3, 1, bytes(28))),
        ("query must be", ("ATTEND.QUERY", "INDEX", 3, 1, bytes(36))),
        ("query must be", ("ATTEND.QUERY", "INDEX", 3, 1, b"")),
        ("query must be", ("ATTEND.QUERY", "INDEX", 3, 1, bytes(100_000))),
        ("unknown option", ("ATTEND.QUERY", "INDEX", 3, 1, bytes(32), "WITHSCORES")),
        ("wrong number of arguments", ("ATTEND.QUERY", "INDEX", 3, 1)),
        ("wrong number of arguments", ("ATTEND.INFO", "INDEX")),
        ("blob size", ("ATTEND.QUERYBATCH", 1, 2, 2, 1, bytes(8), bytes(16), bytes(12))),
        ("blob size", ("ATTEND.QUERYBATCH", 1, 2, 2, 1, bytes(9), bytes(16), bytes(16))),
        ("blob size", ("ATTEND.QUERYBATCH", 2, 2, 2, 1, bytes(16), bytes(16), bytes(32))),
        ("top_k", ("ATTEND.QUERYBATCH", 1, 2, 2, 0, bytes(8), bytes(16), bytes(16))),
        ("H ", ("ATTEND.QUERYBATCH", 0, 2, 2, 1, b"", b"", b"")),
        ("wrong number of arguments", ("ATTEND.QUERYBATCH", 1, 2, 2, 1, bytes(8), bytes(16))),
    ],
)
def test_what_is_refused_changes_nothing(
    wire: Wire, index: str, fragment: str, words: tuple[Word, ...]
) -> None:
    refused(wire, fragment, *(index if word == "INDEX" else word for word in words))
    assert len(wire.ask("ATTEND.QUERY", index, 3, 99, bytes(32))) == 10 * 16


@pytest.mark.parametrize("top_k", [1, 3, 16, 17, 1000])
def test_a_batch_is_softmax_attention_over_the_best_keys(wire: Wire, top_k: int) -> None:
    q, k, v = rows(14, 3, 8), rows(15, 3 * 16, 8), rows(16, 3 * 16, 8)
    words = (3, 16, 8, top_k, q.tobytes(), k.tobytes(), v.tobytes())
    answer = floats(wire.ask("ATTEND.QUERYBATCH", *words)).reshape(3, 8)
    for head in range(3):
        part = slice(16 * head, 16 * head + 16)
        scores = k[part].astype("f8") @ q[head].astype("f8") / np.sqrt(8)
        best = np.argsort(-scores)[:top_k]
        weights = np.exp(scores[best] - scores.max())
        expected = weights @ v[part][best] / weights.sum()
        np.testing.assert_allclose(answer[head], expected, rtol=1e-5, atol=1e-6)


def test_batches_of_many_megabytes_pass_in_and_out(wire: Wire, ns: str) -> None:
    keys, values = rows(17, 20_000, 64), rows(18, 20_000, 32)
    wire.ask("ATTEND.CREATE", ns, 64, 32, "VQUANT", "fp32")
    wire.ok("ATTEND.STORE", ns, 0, 20_000, keys.tobytes(), values.tobytes())
    answer = floats(wire.ask("ATTEND.QUERY", ns, 0, 4096, keys[77].tobytes())).reshape(-1, 32)
    np.testing.assert_array_equal(answer, values[nearest(keys, keys[77], 4096)])
    settle(wire)
