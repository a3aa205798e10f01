"""A small engine over the lineage store, which counts the tokens it runs through a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from pion_vllm_mlx.cache.layers import cache_arrays
from pion_vllm_mlx.cache.lineage import LineageOptions, LineageStore, Match
from tests.conftest import RunningServer
from tests.models import token_ids

CHUNK = 64

STATEFUL = ("qwen3_next", "qwen3_5", "mamba", "rwkv7", "falcon_h1")
"""Families whose caches restore at checkpoints only."""

#: families, and the two kinds of cache that are an engine's setting, as (family, kv_bits)
KINDS = {
    "plain": ("llama", None),
    "window": ("gemma3_text", None),
    "gated delta": ("qwen3_next", None),
    "mamba": ("mamba", None),
    "rwkv": ("rwkv7", None),
    "quantized": ("llama", 8),
    "latent": ("deepseek_v3", None),
    "list": ("falcon_h1", None),
}


def url_of(server: RunningServer) -> str:
    return f"tcp://127.0.0.1:{server.port}"


def fresh_cache(model: Any, kv_bits: int | None = None) -> list[Any]:
    """What an engine begins with."""
    cache: list[Any] = make_prompt_cache(model)
    if kv_bits is None:
        return cache
    return [
        c.to_quantized(group_size=32, bits=kv_bits) if type(c).__name__ == "KVCache" else c
        for c in cache
    ]


@dataclass
class Turn:
    """What became of one request."""

    match: Match
    reused: int
    computed: int
    reply: list[int]
    logits: list[bytes]
    kept: list[bool] = field(default_factory=list)
    lane: str = ""


class Engine:
    """Runs prompts the way an engine does; ``store`` None is the one without a cache."""

    def __init__(self, model: Any, store: LineageStore | None, kv_bits: int | None = None) -> None:
        self.model = model
        self.chunk = CHUNK
        self.store = store
        self.kv_bits = kv_bits
        self.forwarded = 0

    def forward(self, ids: list[int], cache: list[Any]) -> mx.array:
        """The logits of the last token; counts."""
        self.forwarded += len(ids)
        logits = self.model(mx.array(ids)[None], cache=cache)[:, -1].astype(mx.float32)
        mx.eval(logits, cache_arrays(cache))
        return logits

    def prefill(self, ids: list[int], start: int, end: int, cache: list[Any]) -> None:
        for at in range(start, end, self.chunk):
            self.forward(ids[at : min(at + self.chunk, end)], cache)

    def turn(self, ids: list[int], reply: int = 4, anchor: int | None = None) -> Turn:
        """One request: match, restore, prefill with cuts, keep, generate, keep."""
        before = self.forwarded
        match, cache, at, lane = Match(np.zeros(0, "<u4")), None, 0, ""
        cuts: list[tuple[int, Any]] = []
        kept: list[bool] = []
        if self.store is not None:
            match = self.store.match(ids)
            restored = self.store.restore(match)
            if restored is not None:
                cache, at, lane = restored.caches, restored.length, restored.lane
            cuts = [(c.position, c.kind) for c in self.store.cuts(ids, match, anchor)]
        reused = at
        cache = cache or fresh_cache(self.model, self.kv_bits)
        for position, kind in [*cuts, (len(ids) - 1, "final")]:
            if position < at:
                continue
            self.prefill(ids, at, position, cache)
            at = position
            if self.store is not None:
                kept.append(self.store.keep(ids[:at], cache, kind))
        tokens, logits = self.generate(ids[-1:], reply, cache)
        done = [*ids, *tokens[:-1]]
        if self.store is not None and reply > 1:
            kept.append(self.store.keep(done, cache))
        computed = self.forwarded - before - (reply - 1)
        return Turn(match, reused, computed, tokens, logits, kept, lane)

    def generate(
        self, ids: list[int], count: int, cache: list[Any]
    ) -> tuple[list[int], list[bytes]]:
        """Greedy tokens after ``ids``, and the logits they came from."""
        tokens: list[int] = []
        seen: list[bytes] = []
        for _ in range(count):
            logits = self.forward(ids, cache)
            seen.append(bytes(memoryview(logits)))
            ids = [int(mx.argmax(logits, axis=-1).item())]
            tokens += ids
        return tokens, seen


def open_store(model: Any, server: RunningServer, **options: Any) -> LineageStore:
    return LineageStore(model, LineageOptions(url=url_of(server), **options))


def kind_options(kv_bits: int | None) -> dict[str, Any]:
    return {} if kv_bits is None else {"kv_bits": kv_bits, "kv_group_size": 32}


def prompt(count: int, seed: int) -> list[int]:
    """Token ids that share next to nothing with those of another seed."""
    return token_ids(count, seed * 7919 + 1)


class Oracle:
    """What may be reused: kept prompts, and the points at which a state was handed over."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.stateful = KINDS[kind][0] in STATEFUL
        self.exact = kind != "window"
        self.kept: list[list[int]] = []
        self.points: list[list[int]] = []

    def common(self, ids: list[int]) -> int:
        return max((shared(ids, one) for one in self.kept), default=0)

    def expected(self, ids: list[int]) -> int:
        """The tokens of ``ids`` that need not be computed again, by what was kept before."""
        if self.stateful or not self.exact:
            fits = [len(p) for p in self.points if len(p) < len(ids) and ids[: len(p)] == p]
            best = max(fits, default=0)
        else:
            best = min(self.common(ids), len(ids) - 1)
        return best if best >= 16 else 0

    def keep(self, ids: list[int], points: list[int]) -> None:
        self.kept.append(ids)
        self.points += [ids[:point] for point in points]


def shared(left: list[int], right: list[int]) -> int:
    for at, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return at
    return min(len(left), len(right))


class Pair:
    """An engine with a store beside one without: same replies, and as few tokens computed."""

    def __init__(self, kind: str, store: LineageStore, model: Any, oracle: Oracle) -> None:
        name, kv_bits = KINDS[kind]
        del name
        self.with_store = Engine(model, store, kv_bits)
        self.without = Engine(model, None, kv_bits)
        self.store, self.oracle = store, oracle

    def ask(self, ids: list[int], anchor: int | None = None) -> Turn:
        """One request on both; checks the reuse against the oracle's, and the replies."""
        expected, common = self.oracle.expected(ids), self.oracle.common(ids)
        turn = self.with_store.turn(ids, anchor=anchor)
        assert self.store.flush(60), self.store.stats()
        if self.oracle.exact:
            assert turn.reused == expected, (turn.match.why, turn.match.common, common)
        else:
            assert expected <= turn.reused <= common, turn.match.why
        assert turn.computed == len(ids) - turn.reused
        if common >= 16:
            assert turn.match.common == common
        plain = self.without.turn(ids)
        assert plain.computed == len(ids)
        same_reply(turn, plain)
        cuts = [c.position for c in self.store.cuts(ids, turn.match, anchor)]
        done = [*ids, *turn.reply[:-1]]
        self.oracle.keep(done, [*cuts, len(ids) - 1, len(done)])
        return turn


def same_reply(turn: Turn, plain: Turn, tolerance: float = 1e-3) -> None:
    """The same tokens from the same logits, up to what other splits of a prefill change.

    Where tokens differ at first, the logits hardly tell the two apart: by how much is printed.
    Caches that are quantized here are so from their first row on: other splits change no more.
    """
    at = shared(turn.reply, plain.reply)
    for ours, theirs in zip(turn.logits[: at + 1], plain.logits[: at + 1], strict=False):
        difference = np.abs(np.frombuffer(ours, "f4") - np.frombuffer(theirs, "f4"))
        assert difference.max() <= tolerance, difference.max()
    if turn.reply != plain.reply:
        logits = np.sort(np.frombuffer(plain.logits[at], "f4"))
        gap = float(logits[-1] - logits[-2])
        assert gap < tolerance, (at, turn.reply, plain.reply)
        print(f"token {at} differs: the next best is {gap:.2g} behind")
