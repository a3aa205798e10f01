"""KV.STORE, KV.FETCH, KV.INFO: blobs found by the cosine of an embedding."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.server.memory.semantic_cache import CAPACITY, SemanticCache
from tests.server.wire import Wire, Word, refuse, settle

Vector = NDArray[np.float32]


def vector(seed: int) -> Vector:
    """Directions that are far from each other."""
    return np.random.default_rng(seed).standard_normal(768).astype("<f4")


def near(base: Vector, cosine: float) -> Vector:
    """A vector at that cosine of ``base``, of another length."""
    exact = base.astype(np.float64)
    other = vector(987_654).astype(np.float64)
    other -= (other @ exact) / (exact @ exact) * exact
    unit = exact / np.linalg.norm(exact)
    across = other / np.linalg.norm(other)
    mixed = cosine * unit + np.sqrt(1 - cosine**2) * across
    return np.asarray(3.5 * mixed, "<f4")


def refused(wire: Wire, fragment: str, *words: Word) -> None:
    before = wire.ask("KV.INFO")
    refuse(wire, fragment, *words)
    assert wire.ask("KV.INFO") == before


def test_the_nearest_blob_is_found_at_or_above_the_threshold(wire: Wire) -> None:
    one, two = vector(1), vector(2)
    wire.ok("KV.STORE", "one", one.tobytes(), b"\x00first\xff")
    wire.ok("KV.STORE", "two", two.tobytes(), b"second")
    assert wire.ask("KV.FETCH", one.tobytes()) == b"\x00first\xff"
    assert wire.ask("KV.FETCH", (7 * two).tobytes(), "THRESHOLD", 1) == b"second"
    assert wire.ask("KV.FETCH", near(one, 0.96).tobytes()) == b"\x00first\xff"
    assert wire.ask("KV.FETCH", near(one, 0.94).tobytes()) is None
    assert wire.ask("KV.FETCH", near(one, 0.94).tobytes(), "threshold", "0.93") == b"\x00first\xff"
    assert wire.ask("KV.FETCH", near(one, 0.94).tobytes(), "THRESHOLD", "0.9401") is None
    assert wire.ask("KV.FETCH", (-one).tobytes(), "THRESHOLD", "0.5") is None
    assert wire.ask("KV.FETCH", vector(3).tobytes(), "THRESHOLD", "-1") is not None


def test_a_model_finds_only_its_own_tag_and_no_model_finds_any(wire: Wire) -> None:
    here = vector(10)
    wire.ok("KV.STORE", "a", here.tobytes(), b"of a", "MODEL", "llama")
    wire.ok("KV.STORE", "b", near(here, 0.99).tobytes(), b"of b", "model", b"qwen\x00")
    wire.ok("KV.STORE", "c", near(here, 0.98).tobytes(), b"of none")
    ask = here.tobytes()
    assert wire.ask("KV.FETCH", ask) == b"of a"
    assert wire.ask("KV.FETCH", ask, "MODEL", "llama") == b"of a"
    assert wire.ask("KV.FETCH", ask, "MODEL", b"qwen\x00", "THRESHOLD", "0.9") == b"of b"
    assert wire.ask("KV.FETCH", ask, "MODEL", "Llama") is None
    assert wire.ask("KV.FETCH", ask, "MODEL", "llama2") is None
    assert wire.ask("KV.FETCH", ask, "MODEL", "") == b"of none"


def test_the_same_id_overwrites_and_the_counters_add_up(wire: Wire) -> None:
    before = wire.info("KV.INFO")
    old, new = vector(20), vector(21)
    wire.ok("KV.STORE", "same", old.tobytes(), b"12345")
    wire.ok("KV.STORE", "same", new.tobytes(), b"123")
    assert wire.ask("KV.FETCH", old.tobytes()) is None
    assert wire.ask("KV.FETCH", new.tobytes()) == b"123"
    after = wire.info("KV.INFO")
    gained = {k: int(after[k]) - int(before[k]) for k in ("entries", "hits", "misses")}
    assert gained == {"entries": 1, "hits": 1, "misses": 1}
    assert int(after["total_blob_bytes"]) - int(before["total_blob_bytes"]) == 3
    rate = int(after["hits"]) / (int(after["hits"]) + int(after["misses"]))
    assert "." in after["hit_rate"] and float(after["hit_rate"]) == pytest.approx(rate, abs=1e-3)
    assert (after["capacity"], after["dimensions"], after["enabled"]) == ("1000", "768", "1")


def test_an_entry_past_its_time_is_counted_and_gone(wire: Wire) -> None:
    here = vector(30).tobytes()
    wire.ok("KV.STORE", "short", here, b"x", "TTL", 1)
    assert wire.ask("KV.FETCH", here) == b"x"
    before = wire.info("KV.INFO")
    while wire.info("KV.INFO")["expired"] == before["expired"]:
        time.sleep(0.01)
    assert wire.ask("KV.FETCH", here) is None
    assert int(wire.info("KV.INFO")["entries"]) == int(before["entries"]) - 1


def test_a_blob_of_many_megabytes_comes_back(wire: Wire) -> None:
    here = vector(40).tobytes()
    blob = np.random.default_rng(0).bytes(20 << 20)
    wire.ok("KV.STORE", "long", here, blob, "TTL", 600, "MODEL", "m")
    assert wire.ask("KV.FETCH", here) == blob
    wire.ok("KV.STORE", "long", here, b"")
    assert wire.ask("KV.FETCH", here) == b""
    settle(wire)


GOOD = vector(50).tobytes()


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ("embedding", ("KV.STORE", "x", GOOD[:-4], b"blob")),
        ("embedding", ("KV.STORE", "x", GOOD + bytes(4), b"blob")),
        ("embedding", ("KV.STORE", "x", b"", b"blob")),
        ("embedding", ("KV.STORE", "x", bytes(200_000), b"blob")),
        ("finite", ("KV.STORE", "x", GOOD[:-4] + b"\0\0\xc0\x7f", b"blob")),
        ("finite", ("KV.STORE", "x", GOOD[:-4] + b"\0\0\x80\x7f", b"blob")),
        ("TTL", ("KV.STORE", "x", GOOD, b"blob", "TTL", -1)),
        ("TTL", ("KV.STORE", "x", GOOD, b"blob", "TTL", "1e3")),
        ("TTL", ("KV.STORE", "x", GOOD, b"blob", "TTL")),
        ("MODEL", ("KV.STORE", "x", GOOD, b"blob", "MODEL")),
        ("unknown option", ("KV.STORE", "x", GOOD, b"blob", "NX")),
        ("given twice", ("KV.STORE", "x", GOOD, b"blob", "TTL", 5, "TTL", 6)),
        ("session id", ("KV.STORE", "", GOOD, b"blob")),
        ("wrong number of arguments", ("KV.STORE", "x", GOOD)),
        ("embedding", ("KV.FETCH", GOOD[:-1])),
        ("embedding", ("KV.FETCH", bytes(100_000))),
        ("finite", ("KV.FETCH", GOOD[:-4] + b"\0\0\x80\xff")),
        ("THRESHOLD", ("KV.FETCH", GOOD, "THRESHOLD", "1.5")),
        ("THRESHOLD", ("KV.FETCH", GOOD, "THRESHOLD", "nan")),
        ("THRESHOLD", ("KV.FETCH", GOOD, "THRESHOLD", "9e-1")),
        ("THRESHOLD", ("KV.FETCH", GOOD, "THRESHOLD", "")),
        ("THRESHOLD", ("KV.FETCH", GOOD, "THRESHOLD")),
        ("unknown option", ("KV.FETCH", GOOD, "TTL", 5)),
        ("wrong number of arguments", ("KV.FETCH",)),
        ("wrong number of arguments", ("KV.INFO", "x")),
        ("unknown command", ("KV.EVICT", "x")),
    ],
)
def test_what_is_refused_changes_nothing(
    wire: Wire, fragment: str, words: tuple[Word, ...]
) -> None:
    refused(wire, fragment, *words)


# -- the data half: what would take long over the wire ---------------------------------


def test_a_full_cache_evicts_the_least_recently_accessed_and_never_refuses() -> None:
    cache = SemanticCache()
    vectors = np.random.default_rng(5).standard_normal((CAPACITY + 2, 768)).astype("f4")
    for n in range(CAPACITY):
        cache.store(b"%d" % n, vectors[n], b"%d" % n, 0, b"")
    assert cache.fetch(vectors[0], 0.9, None) == b"0"
    cache.store(b"new", vectors[CAPACITY], b"new", 0, b"")
    cache.store(b"2", vectors[2], b"again", 0, b"")
    cache.store(b"newer", vectors[CAPACITY + 1], b"newer", 0, b"")
    assert len(cache.entries) == CAPACITY and cache.evictions == 2
    assert cache.fetch(vectors[1], 0.9, None) is None
    assert cache.fetch(vectors[3], 0.9, None) is None
    assert cache.fetch(vectors[0], 0.9, None) == b"0"
    assert cache.fetch(vectors[2], 0.9, None) == b"again"
    assert cache.stored_bytes == sum(len(entry.blob) for entry in cache.entries.values())


def test_expiry_follows_the_clock_and_overwriting_takes_the_old_deadline_away() -> None:
    now = [100.0]
    cache = SemanticCache(lambda: now[0])
    for name, ttl in ((b"a", 10), (b"b", 5), (b"c", 0), (b"d", 5)):
        cache.store(name, vector(name[0]), name, ttl, b"")
    cache.store(b"d", vector(ord("d")), b"d", 0, b"")
    now[0] = 105.0
    assert cache.fetch(vector(ord("b")), 0.9, None) is None
    assert set(cache.entries) == {b"a", b"c", b"d"} and cache.expired == 1
    now[0] = 109.999
    assert cache.fetch(vector(ord("a")), 0.9, None) == b"a"
    now[0] = 1e9
    cache.expire()
    assert set(cache.entries) == {b"c", b"d"} and cache.expired == 2


def test_of_equally_near_blobs_the_latest_wins_and_no_direction_finds_nothing() -> None:
    cache = SemanticCache()
    for name in (b"old", b"new"):
        cache.store(name, vector(1), name, 0, b"")
    cache.store(b"zero", np.zeros(768, np.float32), b"zero", 0, b"")
    assert cache.fetch(vector(1), 1.0, None) == b"new"
    assert cache.fetch(np.zeros(768, np.float32), -1.0, None) is None
    assert SemanticCache().fetch(vector(1), -1.0, None) is None


def test_extreme_lengths_have_directions_too() -> None:
    cache = SemanticCache()
    tiny, huge = vector(1) * np.float32(1e-30), vector(1) * np.float32(1e37)
    cache.store(b"t", tiny, b"t", 0, b"")
    assert cache.fetch(huge, 1.0, None) == b"t"


def test_the_best_is_that_of_a_full_search_in_float64() -> None:
    cache = SemanticCache()
    rng = np.random.default_rng(9)
    base = rng.standard_normal(768)
    vectors = (base + 0.3 * rng.standard_normal((300, 768))).astype("f4")
    for n, row in enumerate(vectors):
        cache.store(b"%d" % n, row, b"%d" % n, 0, b"")
    for _ in range(20):
        ask = (base + 0.3 * rng.standard_normal(768)).astype("f4")
        exact = vectors.astype("f8") @ ask / np.linalg.norm(vectors.astype("f8"), axis=1)
        assert cache.fetch(ask, 0.0, None) == b"%d" % exact.argmax()
