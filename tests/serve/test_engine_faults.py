"""An engine whose store dies, is full or too small, or that is killed itself: replies are right."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.cache.resp_client import RespClient
from tests.conftest import RunningServer
from tests.serve.engines import Engine, running_engine
from tests.serve.front import until
from tests.small_disk import fill, small_disk

pytest.importorskip("mlx_lm")

TEXT = "A quick brown fox jumps over a lazy dog and naps. " * 11
NO_END = {"logit_bias": {"0": -100.0}}  # a random model would end its reply somewhere
XTC = {"xtc_probability": 0.5, "xtc_threshold": 0.4}  # takes another key a token
DISK_BYTES = 24 << 20


def flags_of(server: RunningServer) -> tuple[str, ...]:
    return ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of the module, by family."""
    from tests.serve.tiny_folder import make_folder

    folder = tmp_path_factory.mktemp("models")
    for family in ("llama", "qwen3_5"):
        make_folder(folder / family, family)
    return folder


@pytest.fixture
def engine(tmp_path: Path, folders: Path, pion_server: RunningServer) -> Iterator[Engine]:
    """An engine of one test, over a server of its own."""
    with running_engine(tmp_path, folders / "llama", *flags_of(pion_server)) as running:
        yield running


def streamed(engine: Engine, limit: int, leave_after: int = 0, **more: Any) -> tuple[str, Any]:
    """The text of a streamed completion, and its receipt; left after so many chunks."""
    body = {"prompt": TEXT, "max_tokens": limit, "temperature": 0, "stream": True}
    usage = {"stream_options": {"include_usage": True}}
    texts: list[str] = []
    receipt = None
    with engine.open("/v1/completions", {**body, **usage, **NO_END, **more}) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            receipt = chunk.get("pion", receipt)
            texts += [choice["text"] for choice in chunk["choices"]]
            if leave_after and len(texts) >= leave_after:
                break
    return "".join(texts), receipt


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_reply_that_was_cut_off_by_a_kill_is_continued(
    tmp_path: Path, folders: Path, pion_server: RunningServer, family: str
) -> None:
    with running_engine(tmp_path, folders / family, *flags_of(pion_server)) as engine:
        limit = 160
        whole, _ = streamed(engine, limit, seed=2)
        streamed(engine, limit, leave_after=40, seed=1)  # a client that leaves ends its journal
        engine.until_stored()
        engine.restart()
        began, _ = streamed(engine, limit, leave_after=100, seed=1)
        engine.restart(signal.SIGKILL)
        before = engine.forward
        again, receipt = streamed(engine, limit, seed=1)
        assert again == whole
        assert again.startswith(began[:40])
        assert receipt["reused_tokens"] == len(TEXT) - 1
        if receipt["resumed_tokens"]:  # what was noted was written before the kill
            assert engine.forward - before == limit - receipt["resumed_tokens"] + 1
            assert engine.stats()["resumes"] == 1


def test_a_killed_engine_continues_a_reply_from_its_journal(engine: Engine) -> None:
    whole, _ = streamed(engine, 120, seed=2)
    body = {"prompt": TEXT, "max_tokens": 120, "temperature": 0, "stream": True, "seed": 1}
    with engine.open("/v1/completions", {**body, **NO_END}) as answer:
        seen = 0
        while seen < 60:
            seen += answer.readline().startswith(b"data: {")
        until(lambda: engine.stats().get("waiting") is not None, "the engine answers")
        engine.end(signal.SIGKILL)
    engine.start()
    before = engine.forward
    again, receipt = streamed(engine, 120, seed=1)
    assert again == whole
    assert receipt["resumed_tokens"] >= 16
    assert engine.forward - before == 120 - receipt["resumed_tokens"] + 1
    assert "reply resumed at token" in engine.output()
    # Over, it begins anew: another sample would be another reply.
    assert streamed(engine, 120, seed=1)[1]["resumed_tokens"] == 0


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9, "min_p": 0.01}, XTC])
def test_a_sampled_reply_is_continued_as_its_seed_has_it(
    engine: Engine, pion_server: RunningServer, more: Any
) -> None:
    if more is XTC and version("mlx_lm").startswith("0.31."):
        pytest.skip("mlx-lm 0.31 nests the tokens that XTC spares, and fails on them")
    limit, sampling = 400, {"temperature": 0.9, "seed": 3, **more}
    whole, told = streamed(engine, limit, **sampling)
    assert told["resumed_tokens"] == 0
    client = RespClient("127.0.0.1", pion_server.port)

    def noted() -> int:
        journals = [client.cmd("GET", key) for key in client.cmd("KEYS", "pps:*:jr:*")]
        return max((len(raw or b"") // 4 for raw in journals), default=0)

    body = {"prompt": TEXT, "max_tokens": limit, "stream": True, **NO_END, **sampling}
    with engine.open("/v1/completions", body) as answer:
        answer.readline()
        until(lambda: noted() >= 16, "the journal")
        engine.end(signal.SIGKILL)
    client.close()
    engine.start()
    again, told = streamed(engine, limit, **sampling)
    assert told["resumed_tokens"] >= 16
    assert again == whole


@pytest.mark.parametrize("way", ["length", "stop"])
def test_a_reply_whose_end_was_told_is_never_replayed(
    engine: Engine, pion_server: RunningServer, way: str
) -> None:
    """Killed as soon as the client hears of the end: no journal is left behind."""
    whole, _ = streamed(engine, 90, seed=2)
    body = {"prompt": TEXT, "max_tokens": 90, "temperature": 0, "stream": True, "seed": 1}
    if way == "stop":
        body["stop"] = [whole[50:58]]
    with engine.open("/v1/completions", {**body, **NO_END}) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["finish_reason"] is not None:
                    break
        engine.end(signal.SIGKILL)
    assert choice["finish_reason"] == way
    client = RespClient("127.0.0.1", pion_server.port)
    assert client.cmd("KEYS", "pps:*:jr:*") == [], engine.output()[-3000:]
    client.close()
    engine.start()
    assert streamed(engine, 90, seed=1)[1]["resumed_tokens"] == 0


def test_without_resume_nothing_is_noted(
    tmp_path: Path, folders: Path, pion_server: RunningServer
) -> None:
    flags = ("--no-resume",)
    with running_engine(tmp_path, folders / "llama", *flags_of(pion_server), flags=flags) as engine:
        body = {"prompt": TEXT, "max_tokens": 120, "temperature": 0, "stream": True, "seed": 1}
        with engine.open("/v1/completions", {**body, **NO_END}) as answer:
            for _ in range(120):
                answer.readline()
            engine.restart(signal.SIGKILL)
        _, receipt = streamed(engine, 120, seed=1)
        assert receipt["resumed_tokens"] == 0
        assert receipt["reused_tokens"] == len(TEXT) - 1


def test_a_batched_reply_cut_off_by_a_kill_is_the_same_again(engine: Engine) -> None:
    whole, _ = streamed(engine, 60, seed=1)
    other = "Other. " + TEXT
    streamed(engine, 60, leave_after=5, prompt=other)
    engine.until_stored()
    engine.restart(signal.SIGKILL)
    again, receipt = streamed(engine, 60)
    assert again == whole
    assert receipt["reused_tokens"] == len(TEXT) - 1
    assert streamed(engine, 60, prompt=other)[1]["reused_tokens"] == len(other) - 1


def test_the_server_may_die_and_come_back(engine: Engine, pion_server: RunningServer) -> None:
    first = engine.complete(TEXT)
    engine.until_stored()
    pion_server.kill()
    for text in (TEXT, TEXT + "On.", "New. " + TEXT):
        reply = engine.complete(text)
        assert reply.forward == reply.prompt - reply.cached + reply.usage["completion_tokens"]
    assert engine.complete(TEXT).tokens == first.tokens
    engine.restart()  # without a server
    again = engine.complete(TEXT)
    assert (again.tokens, again.cached) == (first.tokens, 0)
    assert "no store" in again.receipt["why"]
    pion_server.start()
    engine.restart()
    found = engine.complete(TEXT)
    assert (found.tokens, found.cached) == (first.tokens, len(TEXT) - 1)


@pytest.mark.parametrize("way", ["named", "embedded"])
def test_a_store_that_is_silent_at_the_start_is_told_as_that_and_used_when_it_answers(
    tmp_path: Path,
    folders: Path,
    pion_server: RunningServer,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    monkeypatch.setenv("PION_DATA_DIR", str(pion_server.dir))
    flags = flags_of(pion_server) if way == "named" else ()
    os.kill(pion_server.pid, signal.SIGSTOP)
    try:
        with running_engine(tmp_path, folders / "llama", *flags) as engine:
            first = engine.complete(TEXT)
            assert "no reply before the deadline" in first.receipt["why"], engine.output()
            assert "no prefix store: " in engine.output()
            assert engine.complete(TEXT).tokens == first.tokens
            os.kill(pion_server.pid, signal.SIGCONT)
            replies = []

            def stored() -> int:
                replies.append(engine.complete(f"{len(replies)}. {TEXT}"))
                return int(engine.until_stored().get("written", 0))

            until(stored, "the store is used", seconds=60)
            engine.restart()
            found = engine.complete(f"{len(replies) - 1}. {TEXT}")
            assert (found.tokens, found.cached) == (replies[-1].tokens, found.prompt - 1)
    finally:
        os.kill(pion_server.pid, signal.SIGCONT)


def test_server_and_engine_may_die_together(engine: Engine, pion_server: RunningServer) -> None:
    first = engine.complete(TEXT)
    engine.until_stored()
    engine.end(signal.SIGKILL)
    pion_server.restart()
    engine.start()
    found = engine.complete(TEXT)
    assert (found.tokens, found.cached) == (first.tokens, len(TEXT) - 1)


def test_a_budget_below_one_conversation_costs_the_store_and_nothing_else(
    tmp_path: Path, folders: Path, pion_server: RunningServer
) -> None:
    flags = ("--pion-budget-gb", "0.0001")
    with running_engine(tmp_path, folders / "llama", *flags_of(pion_server), flags=flags) as engine:
        first = engine.complete(TEXT)
        assert engine.complete(TEXT).tokens == first.tokens
        assert engine.until_stored()["over_budget"] >= 1
        engine.restart()
        again = engine.complete(TEXT)
        assert (again.tokens, again.cached) == (first.tokens, 0)


def sizes_of(server: RunningServer) -> dict[str, int]:
    """What each segment of the lineages holds, by its number."""
    client = RespClient("127.0.0.1", server.port)
    found = client.cmd("HGETALL", "pps:sizes")
    client.close()
    pairs = zip(found[0::2], found[1::2], strict=True)
    return {name.decode().partition(":")[2]: int(size) for name, size in pairs}


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_a_budget_for_little_more_than_a_conversation_holds_the_latest(
    tmp_path: Path, folders: Path, pion_server: RunningServer, family: str
) -> None:
    system = {"role": "system", "content": "You answer in one short sentence. " * 12}
    store = flags_of(pion_server)

    def said(number: int, turn: int) -> dict[str, str]:
        asks = f"and what is prefix {turn} of {number}? " * 20
        return {"role": "user", "content": f"Client {number} asks: {asks}"}

    with running_engine(tmp_path, folders / family, *store) as engine:
        engine.chat([system, said(0, 0)])
        engine.until_stored()
    anchor, talk = sizes_of(pion_server)["1"], sizes_of(pion_server)["2"]
    budget = anchor + 3 * talk  # one of two turns, and half of another
    flags = ("--pion-budget-gb", str(budget / 1e9))
    with running_engine(tmp_path, folders / family, *store, flags=flags) as engine:
        for number in range(1, 4):
            messages = [system, said(number, 0)]
            answer = engine.chat(messages).text
            engine.until_stored()
            messages += [{"role": "assistant", "content": answer}, said(number, 1)]
            reply = engine.chat(messages)
            stats = engine.until_stored()
            assert sum(sizes_of(pion_server).values()) <= budget
        assert stats["evicted"] >= 2 and "over_budget" not in stats, stats
        assert "not stored" not in engine.output()
        engine.restart()
        found = engine.chat(messages)
        assert (found.tokens, found.cached) == (reply.tokens, reply.prompt - 1)


def test_a_full_disk_costs_the_store_and_nothing_else(
    tmp_path: Path, folders: Path, pion_server: RunningServer
) -> None:
    pion_server.stop()
    with small_disk(tmp_path / "small", DISK_BYTES) as disk:
        (disk / "data").mkdir(mode=0o700)
        full = RunningServer(pion_server.port, disk / "data").start()
        try:
            with running_engine(tmp_path, folders / "llama", *flags_of(full)) as engine:
                fill(disk / "filler")
                first = engine.complete(TEXT)
                assert engine.complete(TEXT).tokens == first.tokens
                assert engine.until_stored().get("failed", 0) >= 1
                missed = engine.complete("Without room. " + TEXT).receipt
                assert missed["why"].partition("the last store failed: ")[2], missed
                assert engine.until_stored()["failed"] >= 2
                told = [line for line in engine.output().splitlines() if "WARNING" in line]
                assert len(told) == 1 and "a prefix was not stored: " in told[0], told
                (disk / "filler").unlink()
                other = engine.complete("With room. " + TEXT)
                engine.until_stored()
                missed = engine.complete("And more. " + TEXT).receipt
                assert "failed" not in missed["why"]
                engine.restart()
                found = engine.complete("With room. " + TEXT)
                assert found.tokens == other.tokens
                assert found.cached == found.prompt - 1
                assert engine.complete(TEXT).tokens == first.tokens
        finally:
            full.stop()


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_eight_clients_at_once_get_what_each_would_get_alone(
    tmp_path: Path, folders: Path, pion_server: RunningServer, family: str
) -> None:
    texts = [f"{TEXT}Client {number} asks. " + "So it is. " * number for number in range(8)]
    with running_engine(tmp_path, folders / family, *flags_of(pion_server)) as engine:
        alone = [engine.complete(text).tokens for text in texts]
        with ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                at_once = list(pool.map(engine.complete, texts))
                assert [reply.tokens for reply in at_once] == alone
                assert all(reply.cached == reply.prompt - 1 for reply in at_once)
        engine.until_stored()
        engine.restart()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(engine.complete, texts))
        assert [reply.tokens for reply in found] == alone
        assert sum(reply.cached for reply in found) >= 0.9 * sum(map(len, texts))


def test_a_full_cache_under_load_neither_stops_nor_throws_out_the_system_prompt(
    tmp_path: Path, folders: Path, pion_server: RunningServer
) -> None:
    """Room for two of eight conversations in memory, and for a few in the store."""
    system = {"role": "system", "content": "You answer in one short sentence. " * 6}
    flags = ("--pion-budget-gb", "0.0026", "--prompt-cache-size", "2")

    def chat(number: int) -> list[dict[str, str]]:
        said = f"Client {number} asks: " + "and what is a prefix? " * 20
        return [system, {"role": "user", "content": said}]

    with running_engine(tmp_path, folders / "llama", *flags_of(pion_server), flags=flags) as engine:
        alone = [engine.chat(chat(number)).tokens for number in range(8)]
        with ThreadPoolExecutor(8) as pool:
            for _ in range(4):
                at_once = list(pool.map(lambda number: engine.chat(chat(number)), range(8)))
                assert [reply.tokens for reply in at_once] == alone
        stats = engine.until_stored()
        assert stats["evicted"] >= 1 and stats["live_evictions"] >= 1
        engine.restart()
        found = engine.chat(chat(99))
        assert found.cached >= len(system["content"])


def test_the_engine_ends_with_its_front(engine: Engine) -> None:
    child = engine.running
    os.close(child.lifeline)
    child.lifeline = -1
    until(lambda: child.process.poll() is not None, "the engine ends")


def test_sigterm_ends_the_engine_with_everything_stored(engine: Engine) -> None:
    first = engine.complete(TEXT)
    began = time.monotonic()
    assert engine.end() == 0
    assert time.monotonic() - began < 30
    engine.start()
    found = engine.complete(TEXT)
    assert (found.tokens, found.cached) == (first.tokens, len(TEXT) - 1)
