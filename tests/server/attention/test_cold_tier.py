"""256 slots, a registry behind them, and exact counters, as clients see them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import RunningServer
from tests.server.attention import oracle
from tests.server.attention.asking import Asking, Floats, connected, flagged, floats, normal
from tests.server.memory.lane import OK
from tests.server.wire import Refusal, Wire, Word, refuse

COLDMISS = 3
NONE = normal(0, 1, 0, 32)
Q = normal(1, 1, 1, 32)


@pytest.fixture
def own(pion_server: RunningServer) -> Iterator[Asking]:
    """Both lanes of a server that nobody else uses."""
    with connected(pion_server) as asking:
        yield asking


def one(seed: int, tokens: int = 4) -> tuple[Floats, Floats]:
    return normal(seed, 1, tokens, 32), normal(seed + 1, 1, tokens, 32)


def test_the_257th_store_makes_the_first_cold_and_warm_brings_it_back(own: Asking) -> None:
    wire = own.wire
    wire.ok("KV.PREFIX.REGISTER", "s", 32, "fp16")
    keys, values = one(7, 9)
    for side, rows in (("pk", keys), ("pv", values)):
        wire.ok("V.STOREBATCH", f"s_{side}", 0, 0, 9, rows.astype("<f4").tobytes())
    for layer in range(257):
        own.at(layer=layer).store(*one(layer))
    assert own.info() | {"sdpa_bytes": 0, "sdpa_queries": 0} == {
        "sdpa_warm": 256,
        "sdpa_cold": 1,
        "sdpa_demotions": 1,
        "sdpa_rehydrates": 0,
        "sdpa_bytes": 0,
        "sdpa_queries": 0,
        "sdpa_shared_passes": 0,
    }
    assert [own.at(layer=n).lookup() for n in (0, 1, 256, 257)] == ["COLD", "HIT", "HIT", "MISS"]
    answers = [own.query(Q), own.fused(Q, NONE, NONE)]
    assert all(isinstance(one, Refusal) and one.startswith("COLDMISS ") for one in answers)
    status, _ = own.framed(Q, (NONE, NONE), bytes(1))
    assert status == COLDMISS

    assert wire.ask("KV.PREFIX.WARM", "s", 1, 32) == "1"
    assert own.lookup() == "HIT" and own.at(layer=1).lookup() == "COLD"
    half = [part.astype("f2").astype("f4") for part in (keys, values)]
    wanted, _ = oracle.dense(Q, *half)
    answer = own.query(Q)
    np.testing.assert_allclose(floats(answer, 1, 1, 32), wanted, rtol=0, atol=1e-5)
    assert own.framed(Q, (NONE, NONE), bytes(1)) == (OK, answer)
    seen = own.info()
    assert (seen["sdpa_warm"], seen["sdpa_cold"]) == (256, 1)
    assert (seen["sdpa_demotions"], seen["sdpa_rehydrates"]) == (2, 1)


def test_a_store_over_a_cold_key_is_no_rehydrate(own: Asking) -> None:
    for layer in range(257):
        own.at(layer=layer).store(*one(layer))
    own.store(*one(3))
    seen = own.info()
    assert own.lookup() == "HIT"
    assert (seen["sdpa_warm"], seen["sdpa_cold"]) == (256, 1)
    assert (seen["sdpa_demotions"], seen["sdpa_rehydrates"]) == (2, 0)


def test_only_an_answered_query_is_an_access(own: Asking) -> None:
    for layer in range(256):
        own.at(layer=layer).store(*one(layer))
    own.query(Q)
    own.at(layer=1).lookup()
    assert isinstance(own.at(layer=1).query(normal(2, 2, 1, 32)), Refusal)
    for layer in (256, 257):
        own.at(layer=layer).store(*one(layer))
    assert [own.at(layer=n).lookup() for n in range(4)] == ["HIT", "COLD", "COLD", "HIT"]


def test_the_registry_holds_1024_and_forgets_the_oldest(own: Asking) -> None:
    for layer in range(256 + 1024):
        own.at(layer=layer).store(*one(0, 1))
    assert own.lookup() == "COLD"
    own.at(layer=2000).store(*one(0, 1))
    assert [own.at(layer=n).lookup() for n in (0, 1)] == ["MISS", "COLD"]
    seen = own.info()
    assert (seen["sdpa_warm"], seen["sdpa_cold"], seen["sdpa_demotions"]) == (256, 1024, 1025)
    assert own.query(Q) == "ERR session not found"


def test_a_cold_session_whose_rows_were_never_stored_cannot_be_warmed(own: Asking) -> None:
    for layer in range(257):
        own.at(layer=layer).store(*one(layer))
    refuse(own.wire, "KV.PREFIX.WARM session not found", "KV.PREFIX.WARM", "s", 1, 32)
    assert own.lookup() == "COLD"


def test_a_restart_leaves_nothing(pion_server: RunningServer) -> None:
    with connected(pion_server) as asking:
        asking.store(*one(1))
    pion_server.restart()
    with connected(pion_server) as asking:
        assert asking.lookup() == "MISS"
        assert asking.query(Q) == "ERR session not found"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose attention cache holds three slots of 1,000 tokens."""
    budget = 3 * 2 * 4 * 32 * 1000
    folder = tmp_path_factory.mktemp("narrow") / "data"
    with flagged(folder, "--attend-budget", str(budget)) as server:
        yield server


def test_the_budget_is_kept_and_shown(narrow: RunningServer) -> None:
    with connected(narrow, "budget") as asking:
        size = 2 * 4 * 32 * 1000
        for layer in range(5):
            asking.at(layer=layer).store(*one(layer, 1000))
        found = [asking.at(layer=n).lookup() for n in range(5)]
        assert found == ["COLD", "COLD", "HIT", "HIT", "HIT"]
        memory = asking.wire.info("INFO", "memory")
        assert int(memory["attend_bytes"]) == int(memory["attend_budget_bytes"]) == 3 * size
        assert asking.info()["sdpa_bytes"] == 3 * size
        # what the selector derives counts, too
        q = normal(3, 1, 1, 32)
        words = (1, 32, 8, 2, 1, q.tobytes(), b"", -1, 1)
        floats(asking.at(layer=4).command("QUERY_SPARSE_AUTO", *words), 32)
        found = [asking.at(layer=n).lookup() for n in range(5)]
        assert found == ["COLD", "COLD", "COLD", "HIT", "HIT"]
        assert 2 * size < asking.info()["sdpa_bytes"] < 3 * size


def auto_words(q: Floats, block: int, window: int = -1, selector: int = 0) -> tuple[Word, ...]:
    """QUERY_SPARSE_AUTO of one head, the best two blocks."""
    return (1, 32, block, 2, 1, q.tobytes(), b"", window, selector)


@pytest.mark.parametrize("quota", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "stored"])
def test_no_query_overruns_the_budget_or_the_quota(tmp_path: Path, dtype: str, quota: bool) -> None:
    tokens, size = 1000, 2 * (2 if dtype == "fp16" else 4) * 32 * 1000
    limit = size + size // 10
    flags = ["--requirepass", "boss", "--tenant", "a=pa", "--tenant-quota", f"a={limit}"]
    flags = flags if quota else ["--attend-budget", str(limit)]
    with flagged(tmp_path / "data", *flags, "--attend-dtype", dtype) as server:
        with connected(server) as asking, Wire.tcp(server.port) as operator:
            if quota:
                operator.ok("AUTH", "boss")
                asking.wire.ok("AUTH", "a", "pa")
            asking.store(*one(4, tokens))
            seen = set()
            for block, windows in ((1, (0, 999, 998)), (64, (0, 999)), (7, (0, 500)), (64, (0,))):
                for window in windows:
                    for selector in (0, 1):
                        words = auto_words(Q[:, 0], block, window, selector)
                        found = floats(asking.command("QUERY_SPARSE_AUTO", *words), 1, 32)
                        assert np.isfinite(found).all()
                        held = int(operator.info("INFO", "memory")["attend_bytes"])
                        assert held <= limit, (block, window, selector)
                        seen.add(held)
            assert asking.lookup() == "HIT"
            assert max(seen) > size  # what fits is kept


def test_statistics_that_fit_nowhere_are_used_once_and_change_no_answer(tmp_path: Path) -> None:
    size = 2 * 4 * 32 * 1000
    keys, values = one(4, 1000)
    answers = []
    for budget in (size, 100 * size):
        with flagged(tmp_path / str(budget), "--attend-budget", str(budget)) as server:
            with connected(server) as asking:
                asking.store(keys, values)
                for _ in range(2):
                    words = auto_words(Q[:, 0], 16, 0, 1)
                    answers.append(asking.command("QUERY_SPARSE_AUTO", *words))
                assert (asking.info()["sdpa_bytes"] == size) == (budget == size)
    assert len(set(answers)) == 1 and isinstance(answers[0], bytes)


def test_what_does_not_fit_the_budget_at_all_is_refused(narrow: RunningServer) -> None:
    with connected(narrow, "large") as asking:
        asking.store(*one(1, 10))
        keys, values = one(2, 3001)
        before = asking.info()
        answer = asking.command("STORE", 1, 3001, 32, keys.tobytes(), values.tobytes())
        assert isinstance(answer, Refusal) and answer.startswith("OOM ")
        assert "--attend-budget" in answer
        wire = asking.wire
        wire.ok("KV.PREFIX.REGISTER", "large", 32, "fp16")
        for layer in range(2):
            for side, rows in zip(("pk", "pv"), one(layer, 1600), strict=True):
                wire.ok("V.STOREBATCH", f"large_{side}", layer, 0, 1600, rows.tobytes())
        for side, rows in zip(("pk", "pv"), one(3, 3001), strict=True):
            wire.ok("V.STOREBATCH", f"large_{side}", 2, 0, 3001, rows.tobytes())
        answer = wire.ask("KV.PREFIX.WARM", "large", 1, 32, "elsewhere")
        assert isinstance(answer, Refusal) and answer.startswith("OOM ")
        assert asking.info() == before and asking.lookup() == "HIT"


def test_warm_past_the_budget_demotes_until_it_fits(narrow: RunningServer) -> None:
    with connected(narrow, "many") as asking:
        wire = asking.wire
        wire.ok("KV.PREFIX.REGISTER", "many", 32, "fp16")
        stored = [one(2 * layer, 1200) for layer in range(4)]
        for layer, sides in enumerate(stored):
            for side, rows in zip(("pk", "pv"), sides, strict=True):
                wire.ok("V.STOREBATCH", f"many_{side}", layer, 0, 1200, rows.tobytes())
        assert wire.ask("KV.PREFIX.WARM", "many", 1, 32) == "4"
        found = [asking.at(layer=n).lookup() for n in range(4)]
        assert found == ["COLD", "COLD", "HIT", "HIT"]
        half = [part.astype("f2").astype("f4") for part in stored[3]]
        answer = floats(asking.at(layer=3).query(Q), 1, 1, 32)
        np.testing.assert_allclose(answer, oracle.dense(Q, *half)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "item_bytes"),
    [
        ((), 4),
        (("--attend-dtype", "fp32"), 4),
        (("--attend-dtype", "fp16"), 2),
        (("--attend-dtype", "bf16"), 2),
        (("--metal-attention-fp16",), 2),
        (("--metal-attention",), 4),
        (("--cuda-attention",), 4),
    ],
)
def test_k_and_v_are_kept_in_the_type_that_a_flag_names(
    tmp_path: Path, flags: tuple[str, ...], item_bytes: int
) -> None:
    with flagged(tmp_path / "data", *flags) as server:
        with connected(server) as asking:
            keys, values = one(5, 300)
            asking.store(keys, values)
            assert asking.info()["sdpa_bytes"] == 2 * item_bytes * 32 * 300
            wanted, _ = oracle.dense(Q, keys, values)
            error = {4: 1e-5, 2: 2e-2}[item_bytes]
            answer = floats(asking.query(Q), 1, 1, 32)
            np.testing.assert_allclose(answer, wanted, rtol=0, atol=error)
            assert (item_bytes == 4) == bool(np.abs(answer - wanted).max() < 1e-5)


def test_the_servers_window_is_the_default_and_zero_still_means_all(tmp_path: Path) -> None:
    with flagged(tmp_path / "data", "--fa-window", "20") as server:
        with connected(server) as asking:
            asking.store(*one(6, 50))
            whole, cut = asking.query(Q, 0), asking.query(Q, 20)
            assert whole != cut
            assert asking.query(Q) == asking.query(Q, -1) == cut
            assert asking.framed(Q, (NONE, NONE), bytes(1)) == (OK, cut)
            assert asking.framed(Q, (NONE, NONE), bytes(1), 0) == (OK, whole)
