"""KV.PREFIX.WARM with CHAIN: rows of several namespaces, and what prefixes have in common once."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.formats import get_format
from tests.conftest import RunningServer
from tests.server.attention import oracle
from tests.server.attention.asking import Asking, Floats, connected, flagged, floats, normal
from tests.server.attention.test_warming import by_head, decoded, register, rows_of, store
from tests.server.wire import Wire, Word, refuse

HEADS, DIM = 2, 64
BLOCK = 64
#: bytes of a block in float32, and of a token
BLOCK_BYTES, TOKEN_BYTES = 2 * HEADS * BLOCK * DIM * 4, 2 * HEADS * DIM * 4
Q = normal(1, HEADS, 2, DIM)
NONE = normal(0, HEADS, 0, DIM)


@dataclass(frozen=True)
class Segment:
    """Rows of one layer under a namespace; it continues ``parent`` after so many of its rows."""

    name: str
    keys: Floats
    values: Floats
    parent: Segment | None = None
    at: int = 0

    @property
    def chain(self) -> list[tuple[Segment, int]]:
        """Its ancestors, root first, and how many rows of each count."""
        return [*self.parent.chain, (self.parent, self.at)] if self.parent else []

    @property
    def tokens(self) -> int:
        return sum(rows for _, rows in self.chain) + len(self.keys)

    def whole(self, side: str) -> Floats:
        parts = [getattr(one, side)[:rows] for one, rows in self.chain]
        return np.concatenate([*parts, getattr(self, side)])

    def words(self, sid: str, *more: Word, tokens: int | None = None) -> tuple[Word, ...]:
        """The command that warms it."""
        ancestors = [w for one, rows in self.chain for w in (one.name, rows, "-")]
        head = ("KV.PREFIX.WARM", self.name, HEADS, DIM, sid)
        total = self.tokens if tokens is None else tokens
        return (*head, "TOKENS", total, *more, "CHAIN", len(self.chain), *ancestors)


def segment(  # noqa: PLR0913 - what there is to say of one
    wire: Wire,
    name: str,
    seed: int,
    count: int,
    parent: Segment | None = None,
    at: int = 0,
    fmt: str = "fp32",
    layers: int = 1,
) -> Segment:
    """A segment with its rows at the server, the same in each layer."""
    made = Segment(name, rows_of(seed, count), rows_of(seed + 500, count), parent, at)
    register(wire, name, fmt)
    for layer in range(layers):
        store(wire, name, layer, made.keys, made.values)
    return made


def family(wire: Wire, ns: str, fmt: str = "fp32", layers: int = 1) -> tuple[Segment, ...]:
    """A root of 300 tokens, and two conversations that leave it at 200 and at 150."""
    root = segment(wire, f"{ns}root", 10, 300, fmt=fmt, layers=layers)
    first = segment(wire, f"{ns}first", 20, 70, root, 200, fmt, layers)
    return root, first, segment(wire, f"{ns}second", 30, 150, root, 150, fmt, layers)


def check(  # noqa: PLR0913 - what there is to say of it
    asking: Asking, sid: str, one: Segment, fmt: str = "fp32", layer: int = 0, *, alone: bool = True
) -> None:
    """What is attended under a session is the segment with all before it; both lanes agree.

    To the byte when nobody else warms: else its rows may move into blocks that are shared between
    the two queries, and are then added up in other parts.
    """
    at = asking.at(sid, layer)
    keys, values = (decoded(fmt, one.whole(side)) for side in ("keys", "values"))
    for window in ((), (100,)):
        wanted, lse = oracle.dense(Q, keys, values, window=window[0] if window else 0)
        answer = at.query(Q, *window)
        assert isinstance(answer, bytes), answer
        cut = 4 * Q.size
        np.testing.assert_allclose(floats(answer[:cut], *Q.shape), wanted, rtol=0, atol=1e-5)
        np.testing.assert_allclose(floats(answer[cut:], HEADS, 2), lse, rtol=0, atol=1e-5)
        for rows in (1, 2):
            q, suffix = Q[:, :rows], (normal(3, HEADS, 5, DIM), normal(4, HEADS, 5, DIM))
            over_resp = at.fused(q, *suffix, b"", *window)
            framed = at.framed_ok(q, suffix, bytes(range(HEADS)), *window)
            assert over_resp == framed or not alone
            alike = oracle.fused(q, (keys, values), suffix, window=window[0] if window else 0)
            for answer in (over_resp, framed):
                np.testing.assert_allclose(floats(answer, *q.shape), alike, rtol=0, atol=1e-5)


def sparse(asking: Asking, sid: str, tokens: int) -> list[Any]:
    """Answers of sparse queries, by blocks and by tokens that are named."""
    at, q = asking.at(sid, 0), Q[:, :1].tobytes()
    rows = np.array([[0, 70, tokens - 1], [63, 64, 140]], "<i4").tobytes()
    return [
        at.command("QUERY_SPARSE_AUTO", HEADS, DIM, 16, 4, HEADS, q, b""),
        at.command("QUERY_SPARSE", HEADS, DIM, 3, q, rows, np.array([3, 3], "<u4").tobytes()),
    ]


def settled(asking: Asking, wanted: int) -> int:
    """Bytes that are resident, once blocks that nobody uses any more are gone."""
    ends_at = time.monotonic() + 20
    while asking.info()["sdpa_bytes"] != wanted and time.monotonic() < ends_at:
        time.sleep(0.02)
    return asking.info()["sdpa_bytes"]


@pytest.fixture
def own(pion_server: RunningServer) -> Iterator[Asking]:
    """Both lanes of a server that nobody else uses."""
    with connected(pion_server) as asking:
        yield asking


def test_two_conversations_hold_what_they_have_in_common_once(own: Asking) -> None:
    wire = own.wire
    _, first, second = family(wire, "")
    assert wire.ask(*first.words("a")) == "1"
    assert own.info()["sdpa_bytes"] == 270 * TOKEN_BYTES
    alone = [own.at("a", 0).query(Q), *sparse(own, "a", 270)]
    check(own, "a", first)
    assert wire.ask(*second.words("b")) == "1"
    # five blocks each, of which the two before token 150 are the same, and the means of 16 tokens
    assert own.info()["sdpa_bytes"] == 8 * BLOCK_BYTES + 270 // 16 * HEADS * DIM * 4
    check(own, "a", first)
    check(own, "b", second)
    register(wire, "plain", "fp32")
    store(wire, "plain", 0, second.whole("keys"), second.whole("values"))
    assert wire.ask("KV.PREFIX.WARM", "plain", HEADS, DIM) == "1"
    for mine, theirs in zip(sparse(own, "b", 300), sparse(own, "plain", 300), strict=True):
        np.testing.assert_allclose(floats(mine, HEADS, DIM), floats(theirs, HEADS, DIM), atol=1e-5)
    shared = [own.at("a", 0).query(Q), *sparse(own, "a", 270)]
    for mine, theirs in zip(shared, alone, strict=True):
        np.testing.assert_allclose(floats(mine, -1), floats(theirs, -1), atol=1e-5)
    assert wire.ask("KV.PREFIX.DROP", "plain") == 1
    assert own.info() | {"sdpa_queries": 0, "sdpa_shared_passes": 0, "sdpa_bytes": 0} == {
        "sdpa_warm": 2,
        "sdpa_cold": 0,
        "sdpa_demotions": 0,
        "sdpa_rehydrates": 0,
        "sdpa_bytes": 0,
        "sdpa_queries": 0,
        "sdpa_shared_passes": 0,
    }


def test_who_leaves_takes_nothing_that_another_uses(own: Asking) -> None:
    wire = own.wire
    root, first, second = family(wire, "")
    third = segment(wire, "third", 40, 10, second, 140)
    for sid, one in (("a", first), ("b", second), ("c", third)):
        assert wire.ask(*one.words(sid)) == "1"
    # c has b's first four blocks, all full, and a last one of its own
    assert own.info()["sdpa_bytes"] == 9 * BLOCK_BYTES
    for sid, one in (("a", first), ("b", second), ("c", third)):
        check(own, sid, one)
    assert wire.ask("KV.PREFIX.DROP", "third") == 1
    assert own.at("c", 0).lookup() == "MISS"
    assert settled(own, 8 * BLOCK_BYTES) == 8 * BLOCK_BYTES
    check(own, "a", first)
    check(own, "b", second)
    own.at("b", 0).store(normal(50, HEADS, 3, DIM), normal(51, HEADS, 3, DIM))
    assert settled(own, (270 + 3) * TOKEN_BYTES) == (270 + 3) * TOKEN_BYTES
    check(own, "a", first)
    # what was made of the rows of an ancestor goes with it
    assert wire.ask("KV.PREFIX.DROP", root.name) == 1
    assert [own.at(sid, 0).lookup() for sid in "ab"] == ["MISS", "HIT"]


def test_the_same_prefix_under_two_names_is_there_once(own: Asking) -> None:
    wire = own.wire
    root, first, _ = family(wire, "")
    for sid in ("a", "b", "a"):
        assert wire.ask(*first.words(sid)) == "1"
    assert own.info()["sdpa_bytes"] == 5 * BLOCK_BYTES
    assert own.info()["sdpa_demotions"] == 0
    check(own, "a", first)
    check(own, "b", first)
    # the beginning of a namespace alone, as far as TOKENS says
    assert wire.ask(*root.words("c", tokens=130)) == "1"
    assert own.info()["sdpa_bytes"] == 6 * BLOCK_BYTES
    part = Segment("x", root.keys[:130], root.values[:130])
    check(own, "c", part)


@pytest.mark.parametrize("fmt", ["fp32", "fp16", "bf16", "mlx4g32", "int8"])
def test_every_format_may_be_shared(as_stored: RunningServer, fmt: str) -> None:
    with connected(as_stored) as asking:
        _, first, second = family(asking.wire, fmt, fmt)
        before = asking.info()["sdpa_bytes"]
        for one in (first, second):
            assert asking.wire.ask(*one.words(one.name)) == "1"
        kept = fmt if fmt != "int8" else "fp32"
        row_bytes = get_format(kept).row_bytes(HEADS * DIM)
        assert asking.info()["sdpa_bytes"] - before == 8 * BLOCK * 2 * row_bytes
        check(asking, first.name, first, fmt)
        check(asking, second.name, second, fmt)


@pytest.fixture(scope="module")
def as_stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that keeps rows in their own format."""
    folder = tmp_path_factory.mktemp("stored") / "data"
    with flagged(folder, "--attend-dtype", "stored") as server:
        yield server


def test_rows_of_several_formats_are_attended_as_they_decode(as_stored: RunningServer) -> None:
    with connected(as_stored) as asking:
        root = segment(asking.wire, "mixed root", 10, 100, fmt="fp16")
        leaf = segment(asking.wire, "mixed leaf", 20, 30, root, 90, fmt="mlx4g32")
        assert asking.wire.ask(*leaf.words("mixed")) == "1"
        sides = []
        for side in ("keys", "values"):
            parts = (
                decoded("fp16", getattr(root, side)[:90]),
                decoded("mlx4g32", getattr(leaf, side)),
            )
            sides.append(np.concatenate(parts, axis=1))
        wanted, _ = oracle.dense(Q, sides[0], sides[1])
        answer = asking.at("mixed", 0).query(Q)
        found = floats(answer[: 4 * Q.size], *Q.shape)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


def test_the_budget_counts_shared_blocks_once(tmp_path: Path) -> None:
    budget = 9 * BLOCK_BYTES
    with (
        flagged(tmp_path / "data", "--attend-budget", str(budget)) as server,
        connected(server) as own,
    ):
        wire = own.wire
        _, first, second = family(wire, "")
        for sid, one in (("a", first), ("b", second)):
            assert wire.ask(*one.words(sid)) == "1"
        assert own.info()["sdpa_bytes"] == 8 * BLOCK_BYTES
        assert own.info()["sdpa_demotions"] == 0
        # two blocks more: the least recently queried one goes, with the three that only it has
        check(own, "b", second)
        small = normal(60, HEADS, 2 * BLOCK, DIM)
        own.at("c", 0).store(small, small)
        assert [own.at(sid, 0).lookup() for sid in "abc"] == ["COLD", "HIT", "HIT"]
        seen = own.info()
        assert (seen["sdpa_warm"], seen["sdpa_cold"], seen["sdpa_demotions"]) == (2, 1, 1)
        left = 300 * TOKEN_BYTES + 2 * BLOCK_BYTES
        assert settled(own, left) == left
        answer = own.at("a", 0).query(Q)
        assert answer.startswith("COLDMISS ")
        status, _ = own.at("a", 0).framed(Q, (NONE, NONE), bytes(range(HEADS)))
        assert status == 3
        assert wire.ask("KV.PREFIX.DROP", "nothing") == 0
        # it comes back beside the one it has blocks in common with, and pushes out the other
        check(own, "b", second)
        assert wire.ask(*first.words("a")) == "1"
        assert [own.at(sid, 0).lookup() for sid in "abc"] == ["HIT", "HIT", "COLD"]
        seen = own.info()
        assert (seen["sdpa_demotions"], seen["sdpa_rehydrates"]) == (2, 1)
        assert seen["sdpa_bytes"] == 8 * BLOCK_BYTES
        check(own, "a", first)
        check(own, "b", second)
        big = segment(wire, "big", 70, 64 * 10)
        refuse(wire, "do not fit --attend-budget", *big.words("d"))


def test_256_slots_that_share_are_256_slots(own: Asking) -> None:
    wire = own.wire
    _, first, second = family(wire, "", layers=129)
    assert wire.ask(*first.words("a")) == "129"
    assert wire.ask(*second.words("b")) == "129"
    seen = own.info()
    assert (seen["sdpa_warm"], seen["sdpa_cold"], seen["sdpa_demotions"]) == (256, 2, 2)
    assert [own.at("a", n).lookup() for n in range(4)] == ["COLD", "COLD", "HIT", "HIT"]
    assert settled(own, 127 * 8 * BLOCK_BYTES + 2 * 300 * TOKEN_BYTES)
    assert wire.ask(*first.words("a", "LAYER", 1)) == "1"
    seen = own.info()
    assert (seen["sdpa_warm"], seen["sdpa_cold"], seen["sdpa_demotions"]) == (256, 2, 3)
    assert seen["sdpa_rehydrates"] == 1
    for sid, one, layer in (("a", first, 1), ("b", second, 1), ("b", second, 128)):
        check(own, sid, one, layer=layer)
    assert wire.ask("KV.PREFIX.DROP", second.name) == 1
    lone = own.info()["sdpa_warm"] * 270 * TOKEN_BYTES
    assert settled(own, lone) == lone


def test_layers_with_a_gap_are_attended_behind_it(own: Asking) -> None:
    wire = own.wire
    root = segment(wire, "root", 10, 300)
    register(wire, "slide", "fp32")
    sides = rows_of(80, 120), rows_of(81, 120)
    store(wire, "slide", 0, *(rows[30:] for rows in sides), start=30)
    store(wire, "slide", 5, *sides)  # of this layer the root has nothing
    words = ("KV.PREFIX.WARM", "slide", HEADS, DIM, "s", "TOKENS", 320, "CHAIN", 1, root.name, 200)
    assert wire.ask(*words, "-") == "2"
    assert own.info()["sdpa_bytes"] == (90 + 120) * TOKEN_BYTES
    for layer, there in ((0, 90), (5, 120)):
        at, (keys, values) = own.at("s", layer), (by_head(rows[-there:]) for rows in sides)
        answer = at.query(Q, there)
        wanted, _ = oracle.dense(Q, keys, values)
        found = floats(answer[: 4 * Q.size], *Q.shape)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
        assert f"the first {320 - there} of 320 tokens are not stored" in at.query(Q)


def test_only_what_is_proved_is_warmed(own: Asking) -> None:
    wire = own.wire
    root, first, _ = family(wire, "")
    records = {one.name: f"record of {one.name}".encode() for one in (root, first)}
    digests = {name: hashlib.sha256(blob).hexdigest() for name, blob in records.items()}

    def words(mine: str, parents: str) -> tuple[Word, ...]:
        head = ("KV.PREFIX.WARM", "first", HEADS, DIM, "a", "TOKENS", 270, "RECORD", mine)
        return (*head, "CHAIN", 1, "root", 200, parents)

    refuse(wire, "no completion record", *words(digests["first"], "-"))
    wire.ok("SSM.PREFIX.STORE", "first", 65535, records["first"])
    refuse(wire, "no completion record", *words(digests["first"], digests["root"]))
    wire.ok("SSM.PREFIX.STORE", "root", 65535, records["root"])
    refuse(wire, "another completion record", *words(digests["root"], digests["root"]))
    refuse(wire, "another completion record", *words(digests["first"], digests["first"]))
    assert own.at("a", 0).lookup() == "MISS"
    assert wire.ask(*words(digests["first"], digests["root"])) == "1"
    check(own, "a", first)


def test_what_is_no_chain_is_refused(own: Asking) -> None:
    wire = own.wire
    root, first, _ = family(wire, "")
    head = ("KV.PREFIX.WARM", "first", HEADS, DIM, "a")
    whole = (*head, "TOKENS", 270)
    refuse(wire, "CHAIN lacks its value", *whole, "CHAIN")
    refuse(wire, "CHAIN needs TOKENS", *head, "CHAIN", 0)
    refuse(wire, "more than the 270", *whole, "CHAIN", 1, "root", 270, "-")
    refuse(wire, "CHAIN 2 is followed by", *whole, "CHAIN", 2, "root", 200, "-")
    refuse(wire, "CHAIN 0 is followed by", *whole, "CHAIN", 0, "LAYER", 0)
    refuse(wire, "unknown option", *head, "ROWS", 5, "CHAIN", 0)
    refuse(wire, "rows must be", *whole, "CHAIN", 1, "root", 0, "-")
    refuse(wire, "1 to 65535 bytes", *whole, "CHAIN", 1, "", 200, "-")
    refuse(wire, "session not found: no", *whole, "CHAIN", 1, "no", 200, "-")
    refuse(wire, "CHAIN must be 0 to 256", *whole, "CHAIN", 5000)
    refuse(wire, "layer 0 holds 270 tokens, not 271", *first.words("a", tokens=271))
    # an ancestor that has fewer rows than are said to count leaves a gap
    longer = (*head, "TOKENS", 400, "CHAIN", 1, "root", 330, "-")
    assert wire.ask(*longer) == "1"
    assert "the first 330 of 400 tokens are not stored" in own.at("a", 0).query(Q)
    assert wire.ask(*root.words("r", tokens=64)) == "1"


def test_names_of_a_chain_are_guarded_as_the_first_one(tmp_path: Path) -> None:
    flags = ("--requirepass", "all", "--tenant", "one=first", "--tenant", "two=second")
    with flagged(tmp_path / "data", *flags) as server:
        for user, password in (("one", "first"), ("two", "second")):
            with Wire.tcp(server.port) as wire:
                wire.ok("AUTH", user, password)
                _, first, second = family(wire, "")
                for sid, one in (("a", first), ("b", second)):
                    assert wire.ask(*one.words(sid)) == "1"
                stranger = (*first.words("a")[:8], 1, "one:root", 200, "-")
                assert "session not found: one:root" in wire.ask(*stranger)
                assert wire.ask("KV.PREFIX.DROP", "root") == 1
                assert wire.ask(*first.words("a")).endswith("session not found: root")
    with flagged(tmp_path / "prefixed", "--ns-prefix", "my") as server, connected(server) as own:
        segment(own.wire, "myleaf", 1, 70)
        words = ("KV.PREFIX.WARM", "myleaf", HEADS, DIM, "my", "TOKENS", 200, "CHAIN", 1, "root")
        refuse(own.wire, "required prefix", *words, 130, "-")


def test_tenants_share_nothing(tmp_path: Path) -> None:
    flags = ("--requirepass", "all", "--tenant", "one=first", "--tenant", "two=second")
    with flagged(tmp_path / "data", *flags) as server:
        for user, password in (("one", "first"), ("two", "second")):
            with Wire.tcp(server.port) as wire:
                wire.ok("AUTH", user, password)
                _, first, _ = family(wire, "")
                assert wire.ask(*first.words("a")) == "1"
        with Wire.tcp(server.port) as wire:
            wire.ok("AUTH", "all")
            assert int(wire.info("KV.PREFIX.INFO")["sdpa_bytes"]) == 2 * 270 * TOKEN_BYTES


@contextmanager
def asked_all_along(server: RunningServer, sid: str, one: Segment) -> Iterator[list[str]]:
    """Has a session queried by other connections; what went wrong."""
    keys, values = by_head(one.whole("keys")), by_head(one.whole("values"))
    wanted = oracle.dense(Q, keys, values)[0]
    wrong: list[str] = []
    over = threading.Event()
    asked = threading.Semaphore(0)

    def ask() -> None:
        with connected(server, sid) as asking:
            while not over.is_set():
                answer = asking.query(Q)
                asked.release()
                if not isinstance(answer, bytes):
                    wrong.append(repr(answer))
                elif not np.allclose(floats(answer[: 4 * Q.size], *Q.shape), wanted, atol=1e-5):
                    wrong.append("another answer")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert asked.acquire(timeout=20)
        yield wrong
        assert asked.acquire(timeout=20)
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_queries_under_way_see_the_same_rows_however_they_are_laid_out(
    pion_server: RunningServer,
) -> None:
    with connected(pion_server) as own:
        wire = own.wire
        _, first, second = family(wire, "")
        assert wire.ask(*first.words("a")) == "1"
        with asked_all_along(pion_server, "a", first) as wrong:
            for round_ in range(15):
                assert wire.ask(*second.words(f"b{round_}")) == "1"
                check(own, f"b{round_}", second)
                own.at(f"b{round_}", 0).store(normal(1, 1, 1, 32), normal(1, 1, 1, 32))
        assert not wrong
        check(own, "a", first)
        wanted = 270 * TOKEN_BYTES + 15 * 256
        assert settled(own, wanted) == wanted


def test_many_clients_warm_and_drop_at_once_and_all_is_counted(pion_server: RunningServer) -> None:
    failures: list[str] = []

    def work(number: int) -> None:
        with connected(pion_server) as own:
            mine = segment(own.wire, f"leaf{number}", 100 + number, 40 + 9 * number, root, 200)
            for round_ in range(6):
                sid = f"s{number}"
                answer = own.wire.ask(*mine.words(sid))
                if answer != "1":
                    failures.append(repr(answer))
                check(own, sid, mine, alone=False)
                if round_ % 2:
                    tiny = normal(1, 1, 1, 32)
                    own.at(sid, 0).store(tiny, tiny)

    with connected(pion_server) as own:
        root = segment(own.wire, "root", 10, 300)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert settled(own, 6 * 256) == 6 * 256
        seen = own.info()
        assert (seen["sdpa_warm"], seen["sdpa_cold"], seen["sdpa_demotions"]) == (6, 0, 0)
