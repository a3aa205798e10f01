"""How long the store holds up the generation thread of serve between two tokens.

Two engines of one model take the same work in turn: one with a store, one with ``--no-pion``.
Four conversations stream at the same time, turn after turn, so that prompts are looked up,
restored, cut and kept while others decode; before it is measured the engine with the store was
ended and started again, so that first turns come out of the store. *Held up*: per gap between
two steps of the batch in which somebody was decoding, the milliseconds that our calls took on
the generation thread, all of them together (tokenizing and planning, fetching caches, handing
them over). *Decode*: steps a second where only decoding went on, for steps of as many sequences.
The bars: no gap over 2 ms of ours, decode with the store at least 0.98 of without.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .common import (
    Process,
    arguments,
    check,
    environment,
    fresh_folder,
    percentile,
    pion_server,
    report,
)
from .model_folder import write_model
from .models import SHAPES

ENGINE = "benchmarks.reproducers.serve_stalls_engine"
BLOCKED_BAR_MS, DECODE_BAR = 2.0, 0.98
START_SECONDS, STORED_SECONDS = 300.0, 120.0
REAL = "real"
Json = dict[str, Any]


class Engine:
    """An engine process without a front, traced."""

    def __init__(self, model: Path, folder: Path, name: str, flags: Sequence[str]) -> None:
        self.trace = folder / f"{name}.trace"
        log, (ready, ready_write) = folder / f"{name}.log", os.pipe()
        words = ["-m", ENGINE, "--trace", str(self.trace), "--ready-fd", str(ready_write)]
        words += ["--model", str(model), "--prompt-cache-size", "64", *flags]
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                [sys.executable, *words],
                env={**environment(), "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_write,),
            )
        os.close(ready_write)
        with os.fdopen(ready) as pipe:
            line = pipe.readline()
        if not line:
            raise SystemExit(log.read_text(errors="replace"))
        self.port = int(json.loads(line)["port"])
        ends_at = time.monotonic() + START_SECONDS
        while self.ask("/health")[0] != 200:
            if self.child.poll() is not None or time.monotonic() > ends_at:
                raise SystemExit(log.read_text(errors="replace"))
            time.sleep(0.05)

    def ask(self, path: str) -> tuple[int, Json]:
        """A request without a body: status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        finally:
            connection.close()

    def chat(self, messages: Sequence[Json], tokens: int) -> str:
        """One streamed, greedy chat completion."""
        body = {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0.0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        words = []
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in event.get("choices", []):
                    words.append(choice.get("delta", {}).get("content") or "")
        connection.close()
        if answer.status != 200 or not words:
            raise SystemExit("a request failed")
        return "".join(words)

    def until_stored(self) -> Json:
        """Waits until everything that was kept is written; the statistics."""
        ends_at = time.monotonic() + STORED_SECONDS
        while (stats := self.ask("/v1/pion/stats")[1]).get("waiting", 0):
            if time.monotonic() > ends_at:
                raise SystemExit("not everything was stored")
            time.sleep(0.05)
        return stats

    def stop(self) -> None:
        """End it; it writes its trace."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@contextmanager
def engine(model: Path, folder: Path, name: str, *flags: str) -> Iterator[Engine]:
    """An engine that is ended at the end."""
    running = Engine(model, folder, name, flags)
    try:
        yield running
    finally:
        running.stop()


@dataclass(frozen=True)
class Work:
    """What clients ask for: ``clients`` conversations at once, of ``turns`` turns each."""

    clients: int
    turns: int
    prompt: int
    decode: int

    def first(self, round_: int, client: int) -> list[Json]:
        """The first turn of a conversation, about ``prompt`` bytes of text."""
        text = f"Round {round_}, conversation {client}. "
        text = text + "The harbour is open from six to nine. " * (self.prompt // 30)
        system = {"role": "system", "content": text[: self.prompt]}
        return [system, {"role": "user", "content": "When?"}]

    def converse(self, running: Engine, round_: int, client: int) -> None:
        """All turns of a conversation, one after the other."""
        messages = self.first(round_, client)
        for turn in range(self.turns):
            said = running.chat(messages, self.decode)
            more = "And on Sundays, and in winter, when the ice is thick? " * 4
            messages += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"{turn}. {more}"},
            ]

    def run(self, running: Engine, round_: int) -> None:
        """All conversations of a round, at once."""
        threads = [
            threading.Thread(target=self.converse, args=(running, round_, client))
            for client in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@dataclass(frozen=True)
class Step:
    """One step of the batch, as the engine notes it."""

    began: float
    ended: float
    decoded: int
    prefilled: int
    waiting: int
    ours_ms: float
    longest_call_ms: float
    cpu_ms: float


def steps_of(path: Path) -> list[Step]:
    """The steps of a trace."""
    return [Step(*json.loads(line)) for line in path.read_text().splitlines()[1:]]


def held_up(steps: Sequence[Step]) -> Json:
    """How long our calls took between steps while somebody was decoding."""
    gaps = [step.ours_ms for step in steps if step.waiting]
    busy = [gap for gap in gaps if gap > 0.05] or [0.0]
    cpu = [step.cpu_ms for step in steps if step.waiting]
    return {
        "gaps": len(gaps),
        "gaps_with_calls": len(busy),
        "median_ms": round(statistics.median(gaps), 4),
        "median_with_calls_ms": round(statistics.median(busy), 3),
        "p99_ms": round(percentile(gaps, 0.99), 3),
        "p99_with_calls_ms": round(percentile(busy, 0.99), 3),
        "max_ms": round(max(gaps), 3),
        "longest_call_ms": round(max(step.longest_call_ms for step in steps if step.waiting), 3),
        "over_2_ms": sum(gap > BLOCKED_BAR_MS for gap in gaps),
        "cpu_p99_with_calls_ms": round(percentile([c for c in cpu if c > 0.05] or [0.0], 0.99), 3),
        "cpu_max_ms": round(max(cpu), 3),
        "cpu_over_2_ms": sum(value > BLOCKED_BAR_MS for value in cpu),
    }


def decode_seconds(steps: Sequence[Step]) -> dict[int, list[float]]:
    """Per number of sequences the seconds from one step to the next where only they decoded."""
    found = defaultdict(list)
    for step, after in zip(steps, steps[1:], strict=False):
        alone = not step.prefilled and not after.prefilled
        if alone and step.decoded == after.decoded == after.waiting > 0:
            found[step.decoded].append(after.began - step.began)
    return found


def decode_ratio(ours: Sequence[Step], without: Sequence[Step]) -> Json:
    """Decoded steps a second with a store over without, by steps of as many sequences."""
    ours_by, without_by = decode_seconds(ours), decode_seconds(without)
    told: Json = {}
    spent, expected = 0.0, 0.0
    for count in sorted(ours_by.keys() & without_by.keys()):
        mine, theirs = ours_by[count], without_by[count]
        told[str(count)] = {
            "steps": [len(mine), len(theirs)],
            "median_ms": [round(statistics.median(side) * 1e3, 3) for side in (mine, theirs)],
            "mean_ms": [round(statistics.mean(side) * 1e3, 3) for side in (mine, theirs)],
        }
        spent += sum(mine)
        expected += len(mine) * statistics.mean(theirs)
    ratio = expected / spent if spent else 0.0
    return {"by_sequences": told, **check(ratio, DECODE_BAR, at_least=True)}


def measure(options: argparse.Namespace, folder: Path, server: Process) -> Json:
    """Fill the store, start again, and let both engines work in turn."""
    model = model_folder(options, folder)
    where = ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))
    store = (*where, "--pion-budget-gb", "0", "--pion-preload-gb", "0")
    work = Work(options.clients, options.turns, options.prompt, options.decode)
    first = Work(options.clients, 1, options.prompt, 2)
    with engine(model, folder, "before", *store) as filling:
        for round_ in range(-1, options.pairs):
            first.run(filling, round_)
        filling.until_stored()
    with (
        engine(model, folder, "ours", *store) as ours,
        engine(model, folder, "without", "--no-pion") as without,
    ):
        for round_ in range(-1, options.pairs):
            for side in (ours, without) if round_ % 2 else (without, ours):
                work.run(side, round_)
                if side is ours:
                    stats = ours.until_stored()
    warm = Work(options.clients, 1, options.prompt, options.decode)
    traced = [without_warm_up(steps_of(side.trace), warm) for side in (ours, without)]
    blocked = held_up(traced[0])
    return {
        "held_up": {**blocked, **check(blocked["max_ms"], BLOCKED_BAR_MS, at_least=False)},
        "held_up_without": held_up(traced[1]),
        "decode": decode_ratio(*traced),
        "generation_thread": stats["generation_thread"],
        "restores": stats["restores"],
        "reused": [stats["tokens_reused"], stats["tokens_prompt"]],
    }


def without_warm_up(steps: list[Step], work: Work) -> list[Step]:
    """The steps behind the first ones, in which code and kernels are met for the first time."""
    return steps[work.decode :]


def model_folder(options: argparse.Namespace, folder: Path) -> Path:
    """The model that is served."""
    if options.shape == REAL:
        from pion_vllm_mlx.demo.model import ensure_model

        return ensure_model(quiet=True)
    dtype = mx.float16 if options.bits else mx.float32
    return write_model(folder / "model", options.shape, dtype, options.bits or None)


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.set_defaults(pairs=5)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), REAL], default="small")
    parser.add_argument("--bits", type=int, default=0, help="of the weights; 0: float32")
    parser.add_argument("--clients", type=int, default=4, help="conversations at once")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation")
    parser.add_argument("--prompt", type=int, default=2_000, help="bytes of a first prompt")
    parser.add_argument("--decode", type=int, default=64, help="tokens of a reply")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder, pion_server(folder) as server:
        figures = measure(options, folder, server)
    settings = {name: vars(options)[name] for name in ("shape", "bits", "clients", "turns")}
    settings |= {name: vars(options)[name] for name in ("prompt", "decode")}
    report("serve_stalls", options, {**settings, **figures}, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
