"""What the store may do on the thread that generates, in counts: arrays a step, rows never."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from tests.conftest import RunningServer, running_server

pytest.importorskip("mlx_lm")

import mlx.core as mx  # noqa: E402
from mlx_lm.generate import BatchGenerator  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402

from pion_vllm_mlx.cache import evaluation  # noqa: E402
from pion_vllm_mlx.cache.beside import Beside, Blocking  # noqa: E402
from pion_vllm_mlx.cache.handles import owned  # noqa: E402
from pion_vllm_mlx.cache.layers import cache_arrays  # noqa: E402
from pion_vllm_mlx.cache.lineage import LineageOptions, bringing, kept  # noqa: E402
from pion_vllm_mlx.cache.lineage.capture import Since, capture, captured_of  # noqa: E402
from pion_vllm_mlx.cache.lineage.lending import (  # noqa: E402
    bytes_of,
    done_now,
    lend,
    lend_copies,
)
from pion_vllm_mlx.cache.lineage.shape import Shape  # noqa: E402
from pion_vllm_mlx.cache.spread import MOST_ARRAYS, SHORT_SECONDS, Spread  # noqa: E402
from pion_vllm_mlx.serve.engine_mlx_lm_prepare import Ends  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache import BUSY, CacheLimits, LineageCache  # noqa: E402
from pion_vllm_mlx.serve.lineage_cache_plan import Plan, PlannedPrompt, Seen  # noqa: E402
from tests.models import tiny_model, token_ids  # noqa: E402

FAMILIES = ["llama", "gemma3_text", "qwen3_5", "mamba", "deepseek_v3", "falcon_h1"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(tmp_path_factory.mktemp("server") / "data") as running:
        yield running


def opened(server: RunningServer, model: Any, **key: str) -> LineageCache:
    """A cache over the server's store, for ``model``."""
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", key_parts=key)
    cache = LineageCache(options, CacheLimits(64))
    cache.attach(model, None)
    return cache


def filled(model: Any, tokens: list[int]) -> list[Any]:
    """Caches that hold ``tokens``."""
    caches: list[Any] = make_prompt_cache(model)
    model(mx.array(tokens)[None], cache=caches)
    mx.eval(cache_arrays(caches))
    return caches


def nothing() -> None:
    """What a connection does while the store is asked."""


def planned(cache: LineageCache, tokens: list[int]) -> Plan:
    """A request as it is planned: looked up by its connection, completed where it is served."""
    plan = Plan(tokens)
    cache.look_up(plan, nothing)
    return cache.plan(plan, None)


class Watched(Spread):
    """Notes what each step carries, in arrays and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[tuple[int, int]] = []

    def _piece(self) -> list[mx.array]:
        piece = super()._piece()
        if piece:
            self.pieces.append((len(piece), sum(array.nbytes for array in piece)))
        return piece


def test_a_step_carries_a_few_arrays_and_bytes_whatever_waits() -> None:
    spread = Watched()
    spread.least_bytes = 1000
    done: list[str] = []
    arrays = [mx.zeros((size,), mx.uint8) + 1 for size in [10] * 40 + [400] * 9 + [5000, 1]]
    spread.add(arrays, lambda: done.append("first"))
    spread.add([mx.ones((7,))], lambda: done.append("second"))
    steps = 0
    while spread.waiting_bytes:
        tokens = spread.carried(mx.array([steps]))
        assert spread.carried(mx.array([9])).tolist() == [9]  # one piece a step
        mx.async_eval(tokens)
        assert not done or steps > 3
        spread.stepped()
        assert tokens.tolist() == [steps]
        steps += 1
    assert done == ["first", "second"]
    assert all(count <= MOST_ARRAYS for count, _ in spread.pieces)
    assert all(size <= 1000 or count == 1 for count, size in spread.pieces)
    assert sum(count for count, _ in spread.pieces) == len(arrays) + 1
    assert steps == len(spread.pieces) > 5


def test_what_a_step_carries_is_computed_with_it() -> None:
    spread = Spread()
    late = mx.arange(64).reshape(8, 8) * 2
    called: list[int] = []
    spread.add([late], lambda: called.append(1))
    tokens = spread.carried(mx.array([3]))
    assert not called
    mx.eval(tokens)
    spread.stepped()
    assert called == [1]
    found: list[int] = []
    # another thread has no stream that could compute it
    thread = threading.Thread(target=lambda: found.append(int(memoryview(late)[7, 7])))
    thread.start()
    thread.join()
    assert found == [126]


@pytest.mark.parametrize("family", FAMILIES)
def test_handing_caches_over_computes_nothing_and_takes_as_many_calls_for_more_rows(
    family: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    cache = opened(server, model, test="handing over")
    prompts = [token_ids(size, size) for size in (100, 300)]
    held = [filled(model, prompt) for prompt in prompts]
    evaluated: list[int] = []
    for name in ("eval", "async_eval"):
        monkeypatch.setattr(mx, name, lambda *args: evaluated.append(len(args)))
    counts = []
    for prompt, caches in zip(prompts, held, strict=True):
        seen, cache.spread = Seen(prompt, Plan([*prompt, 1])), Spread()
        cache.insert_cache("m", seen, caches, cache_type="final")
        while cache.spread._has_next(begun=False):
            job = cache.spread._next_job()
            job()
        counts.append(sum(len(part.arrays) for part in cache.spread._parts))
    assert not evaluated
    assert counts[0] == counts[1] > 0
    monkeypatch.undo()
    cache.close()


@pytest.mark.parametrize("copied", [False, True], ids=["as they are", "as copies"])
@pytest.mark.parametrize("family", FAMILIES)
def test_caches_that_were_lent_are_stored_as_they_were(
    family: str, copied: bool, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(family)
    prompt = token_ids(150, 3)
    monkeypatch.setattr(kept, "can_be_lent", lambda: not copied)
    first = opened(server, model, test=f"lent {copied}")
    assert first.store is not None
    caches = filled(model, prompt[:149])
    logits = model(mx.array(prompt[149:])[None], cache=owned(caches))
    plan = planned(first, prompt)
    first.insert_cache("m", Seen(prompt[:149], plan), caches, cache_type="final")
    assert first.store.stats().get("written", 0) == 0  # no step has carried it yet
    first.spread.finish()
    assert first.store.flush(30)
    again = opened(server, model, test=f"lent {copied}")
    found = planned(again, prompt)
    assert found.restored is not None
    restored, rest = again.fetch_nearest_cache("m", PlannedPrompt(found))
    assert restored is not None and list(rest) == prompt[149:]
    assert found.tier in ("mapped", "stored", "range")
    same = model(mx.array(prompt[149:])[None], cache=restored)
    assert bytes(memoryview(same.astype(mx.float32))) == bytes(
        memoryview(logits.astype(mx.float32))
    )
    first.close()
    again.close()


@pytest.mark.parametrize("since", [Since(), Since(64, 64), Since(100, 90), Since(150, 150)])
@pytest.mark.parametrize("family", [*FAMILIES, "quantized"])
def test_copies_of_what_is_new_are_what_capture_takes(family: str, since: Since) -> None:
    quantized = family == "quantized"
    model = tiny_model("llama" if quantized else family)
    caches = filled(model, token_ids(150, 3))
    shape = Shape.of(model, None, 8 if quantized else None, 32)
    if quantized:
        caches = [cache.to_quantized(group_size=32, bits=8) for cache in caches]
    lent = done_now(lend_copies(caches, since.rows))
    mx.eval(lent.raw)
    found = captured_of(lent, 150, since, shape, None)
    wanted = capture(caches, 150, since, shape, None)
    mx.eval(wanted.arrays)
    assert found.leaves == wanted.leaves and found.slots == wanted.slots
    leaves = {leaf.layer: leaf for leaf in wanted.leaves}

    def rows(held: Any) -> dict[tuple[Any, ...], bytes]:
        return {
            (one.layer, one.side, one.start, one.end): one.encoded(
                one.start, one.end, leaves[one.layer]
            ).tobytes()
            for one in held.rows
        }

    assert rows(found) == rows(wanted)
    assert dict(found.state_blobs()) == dict(wanted.state_blobs())


@pytest.mark.parametrize("piece_bytes", [1, 4096, 20_000, 1 << 20])
def test_rows_in_pieces_are_the_rows(piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bringing, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(evaluation, "on_cuda", lambda: True)
    raw = mx.random.randint(0, 255, (1, 6, 100, 32)).astype(mx.uint8)
    mx.eval(raw)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(bringing.rows_of(raw, slice(2, 5), 7, 90))
    )
    thread.start()
    thread.join()
    assert found[0].tobytes() == bringing.shared(raw)[0, 2:5, 7:90].tobytes()


def test_the_store_is_asked_and_read_beside_the_thread_that_generates(
    server: RunningServer,
) -> None:
    model, prompt = tiny_model("llama"), token_ids(200, 5)
    first = opened(server, model, test="beside")
    first.insert_cache("m", prompt[:199], filled(model, prompt[:199]), cache_type="final")
    assert first.store is not None and first.store.flush(30)
    again = opened(server, model, test="beside")
    assert again.store is not None
    threads: set[str] = set()
    match, restore = again.store.match, again.store.restore

    def noted(call: Any) -> Any:
        def calling(*args: Any) -> Any:
            threads.add(threading.current_thread().name)
            return call(*args)

        return calling

    again.store.match = noted(match)  # type: ignore[method-assign]
    again.store.restore = noted(restore)  # type: ignore[method-assign]
    plan = planned(again, prompt)
    assert plan.restored is not None and plan.restored.length == 199
    assert threads == {"pion-beside"}
    # what it read is live for the next request too, which asks nobody
    threads.clear()
    other = planned(again, [*prompt[:150], 1, 2, 3])
    assert (other.restored, other.hit and other.hit.length) == (None, 150)
    first.close()
    again.close()


def test_a_request_does_not_wait_for_ever_for_others_to_be_looked_up(
    server: RunningServer,
) -> None:
    model, prompt = tiny_model("llama"), token_ids(100, 6)
    options = LineageOptions(url=f"tcp://127.0.0.1:{server.port}", deadline_seconds=0.01)
    cache = LineageCache(options, CacheLimits(64))
    cache.attach(model, None)
    gate = threading.Event()
    waiting = threading.Thread(target=lambda: cache.beside(gate.wait))
    waiting.start()
    plan = Plan(prompt)
    cache.look_up(plan, nothing)
    assert plan.why == BUSY
    gate.set()
    waiting.join()
    completed = cache.plan(plan, None)
    assert (completed.match, completed.restored) == (None, None)
    cache.close()


def test_what_a_model_saw_for_a_request_leads_to_its_plan_and_no_other(
    server: RunningServer,
) -> None:
    cache = opened(server, tiny_model("llama"), test="plans")
    prompt = token_ids(60, 7)
    one, two = planned(cache, prompt), planned(cache, prompt)
    assert cache.pending(PlannedPrompt(one)) is None
    assert cache.pending(PlannedPrompt(two)) is two
    seen = PlannedPrompt(two)[:40]
    seen += prompt[40:]
    assert (seen[:].plan, list(seen[:])) == (two, prompt)
    assert type(PlannedPrompt(two)[40:]) is list
    cache.close()


def test_batches_keep_whose_tokens_they_hold() -> None:
    model, prompt = tiny_model("llama"), token_ids(40, 8)
    plan = Plan(prompt)
    batch = BatchGenerator(model, prefill_step_size=16)
    batch.insert_segments(
        segments=[[prompt[:20], prompt[20:]]], max_tokens=[3], all_tokens=[PlannedPrompt(plan)[:0]]
    )
    seen: list[Any] = []
    for _ in range(20):
        prompts, replies = batch.next()
        cut = [one.uid for one in prompts if one.end_of_segment and not one.end_of_prompt]
        seen += [tokens[:] for _, tokens in batch.extract_cache(cut).values()]
        seen += [one.all_tokens[:] for one in replies if one.finish_reason]
    assert [len(tokens) for tokens in seen] == [20, 39, 43]
    assert all(isinstance(tokens, Seen) and tokens.plan is plan for tokens in seen)
    assert list(seen[-1][:40]) == prompt


def test_a_reply_ends_for_its_client_when_its_caches_are_kept() -> None:
    from queue import SimpleQueue

    told: SimpleQueue[Any] = SimpleQueue()
    steps: list[int] = []
    ends = Ends(lambda: steps.append(1))
    held = ends.behind(told)
    for item in ("one", "two", None):
        held.put(item)
    assert (told.get(), told.get(), told.empty(), len(steps)) == ("one", "two", True, 3)
    ends.tell()
    assert told.get() is None


def test_what_is_discarded_is_freed_beside_the_thread_that_generates() -> None:
    """One thing after the other: between two of them that thread may go on."""
    freed: list[tuple[str, int]] = []

    class Thing:
        def __del__(self) -> None:
            freed.append((threading.current_thread().name, len(things)))

    beside, things = Beside(), [Thing(), Thing(), Thing()]
    beside.drop(things)
    assert beside.ask(lambda: 1).result(10) == 1
    assert freed == [("pion-beside", 2), ("pion-beside", 1), ("pion-beside", 0)]
    beside.close()


@pytest.mark.parametrize(
    "array",
    [
        mx.arange(6).astype(mx.uint8),
        mx.array([True, False]),
        mx.array(2.5),
        mx.arange(24).reshape(1, 4, 6).astype(mx.bfloat16)[:, 1:, :],
        mx.arange(24).reshape(1, 4, 6).astype(mx.float32).transpose(0, 2, 1),
        mx.zeros((1, 2, 5, 0)),
    ],
)
def test_lent_bytes_are_those_of_the_array_and_another_object(array: mx.array) -> None:
    raw = bytes_of(array)
    mx.eval(raw, array)
    assert raw is not array
    if array.size:
        flat = mx.contiguous(array).reshape(-1).view(mx.uint8)
        assert raw.flatten().tolist() == flat.tolist()


def test_a_lent_cache_stays_as_it_was_when_its_owner_cuts_it() -> None:
    model = tiny_model("llama")
    caches = filled(model, token_ids(50, 9))
    lent = lend(caches)
    for one in caches:
        one.trim(20)
    assert [one.offset for one in lent.caches] == [50] * len(caches)


def numbered(spread: Spread, done: list[int], count: int) -> None:
    """Jobs of as many requests."""
    for number in range(count):
        spread.soon(partial(done.append, number), of=object(), ending=False)


def long(done: list[int], number: int) -> None:
    """A job after which no other one is done in the same step."""
    done.append(number)
    time.sleep(2 * SHORT_SECONDS)


def test_of_several_replies_that_end_at_once_one_a_step_is_seen_to() -> None:
    spread = Spread()
    done: list[int] = []
    for number in range(3):
        spread.soon(partial(long, done, number), of=object(), ending=True)
    spread.work(begun=False)
    assert done == [0]
    spread.stepped()  # a client is told something, before there is a step
    assert done == [0]
    spread.carried(mx.array([1]))
    spread.stepped()
    spread.stepped()  # a second client is told something in the same step
    assert done == [0]
    spread.work(begun=False)  # a step that only prefilled
    assert done == [0, 1]
    spread.finish()
    assert done == [0, 1, 2]


def test_what_waits_for_a_step_does_not_come_on_top_of_a_request_that_begins() -> None:
    spread = Spread()
    done: list[int] = []
    numbered(spread, done, 2)
    spread.store(iter([None] * 2), Blocking(), lambda call, otherwise: call())
    for _ in range(3):
        spread.work(begun=True)
        spread.carried(mx.array([1]))
        spread.stepped()
    assert done == []
    spread.work(begun=False)
    assert done == [0]


def test_the_end_of_a_reply_waits_for_nothing_of_other_requests_or_for_the_store() -> None:
    spread = Spread()
    done: list[int] = []
    mine = object()
    spread.store(iter([None] * 5), Blocking(), lambda call, otherwise: call())
    numbered(spread, done, 3)
    spread.soon(partial(long, done, 10), of=mine, ending=False)
    spread.soon(partial(long, done, 11), of=mine, ending=True)
    spread.work(begun=True)
    assert done == [10]
    spread.work(begun=True)
    assert done == [10, 11]
    spread.work(begun=False)
    assert done == [10, 11, 0]
    spread.finish()
    assert spread.idle


def test_where_no_request_is_asked_for_between_two_steps_what_waits_is_done_all_the_same() -> None:
    spread = Spread()
    done: list[int] = []
    numbered(spread, done, 2)
    for expected in ([0], [0, 1]):
        spread.carried(mx.array([1]))
        spread.stepped()
        assert done == expected


def test_an_end_is_told_with_its_own_caches_and_not_before() -> None:
    from queue import SimpleQueue

    ends = Ends(lambda: None)
    one: SimpleQueue[Any] = SimpleQueue()
    two: SimpleQueue[Any] = SimpleQueue()
    ends.behind(one).put(None)
    first = ends.taken()
    ends.behind(two).put(None)
    second = ends.taken()
    ends.tell()
    assert one.empty() and two.empty()
    first()
    assert (one.get(), two.empty()) == (None, True)
    second()
    assert two.get() is None


def test_caches_of_a_model_never_reach_the_tiers_of_the_next(server: RunningServer) -> None:
    """What is still to be kept when the model is changed."""
    model, other = tiny_model("llama"), tiny_model("llama", rope_theta=77.0)
    cache = opened(server, model, test="changed")
    prompts = [token_ids(80, seed) for seed in (21, 22)]
    for prompt in prompts:
        seen = Seen(prompt, Plan([*prompt, 1]))
        cache.insert_cache("m", seen, filled(model, prompt), cache_type="final")
    cache.spread.work(begun=False)
    assert len(cache) == 1  # the second waits for a step
    cache.attach(other, None)
    cache.spread.finish()
    assert len(cache) == 0
    for prompt in prompts:
        plan = planned(cache, [*prompt, 1])
        assert (plan.hit, plan.restored, plan.match) == (None, None, None)
    cache.close()
    again = opened(server, model, test="changed")
    assert [planned(again, [*prompt, 1]).stored_common for prompt in prompts] == [80, 80]
    again.close()
