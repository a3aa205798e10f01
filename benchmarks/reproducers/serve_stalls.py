"""How long the store holds up the generation thread of serve between two tokens.

Two engines of one model take the same work in turn: one with a store, one with ``--no-pion``.
Four conversations stream at the same time, turn after turn, each a little behind the one before
and with replies of another length, so that nearly always somebody decodes while prompts of others
are looked up, restored, cut and kept; before it is measured the engine with the store was ended
and started again, so that first turns come out of the store. *Held up*: per gap between two steps
of the batch in which somebody was decoding, the milliseconds that our calls took on the generation
thread, all of them together (tokenizing and planning, fetching caches, handing them over, what is
done of what waits). *Decode*: steps a second where only decoding went on, for steps of as many
sequences. The bars: no call over 2 ms of ours where somebody decodes, decode with the store at
least 0.98 of without. *Slowest* names the longest calls with their parts and with what other
threads did meanwhile, *decode beside* how long steps take while those write, read or ask.

``--seeded``: requests with a seed, which mlx-lm's server does not batch; a step is a token there.
``--engine vllm-mlx``: with ``--python`` of an environment that has it.
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
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
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
from .serve_stalls_engine import ENGINES, MLX_LM
from .serve_stalls_slow import Call, by_work, read, slowest

ENGINE = "benchmarks.reproducers.serve_stalls_engine"
BLOCKED_BAR_MS, DECODE_BAR = 2.0, 0.98
START_SECONDS, STORED_SECONDS = 300.0, 120.0
REAL = "real"
BUSY_MS = 0.05
#: the lengths of replies, over that of the middle; a client has another one each turn.
LENGTHS = (0.75, 1.0, 1.375, 0.625, 1.25)
Json = dict[str, Any]


class Engine:
    """An engine process without a front, traced."""

    def __init__(self, place: Place, name: str, flags: Sequence[str]) -> None:
        self.trace, self.warm_at = place.folder / f"{name}.trace", 0.0
        log, (ready, ready_write) = place.folder / f"{name}.log", os.pipe()
        words = ["-m", ENGINE, place.engine, str(self.trace), "--ready-fd", str(ready_write)]
        words += ["--model", str(place.model), *flags]
        if place.engine == MLX_LM:
            words += ["--prompt-cache-size", "64"]
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                [place.python, *words],
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
        told = json.loads(line)
        self.port, self.model = int(told["port"]), str(told.get("model") or "default_model")
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

    def chat(self, body: Json, begun: Callable[[int], None]) -> str:
        """One streamed, greedy chat completion; ``begun`` is told how many pieces have come."""
        body = {"model": self.model, **body, "stream": True, "temperature": 0.0}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        words, pieces = [], 0
        for line in answer:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                for choice in event.get("choices", []):
                    words.append(choice.get("delta", {}).get("content") or "")
                    pieces += 1
                    begun(pieces)
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

    def steps(self) -> list[Step]:
        """The steps of the trace of one that has ended, from ``warm_at`` on.

        Code and kernels are met for the first time before.
        """
        found = [Step(*json.loads(line)) for line in self.trace.read_text().splitlines()[1:]]
        return [step for step in found if step.began >= self.warm_at]

    def calls(self) -> list[Call]:
        """What its threads were doing, of one that has ended."""
        return read(self.trace.with_suffix(".calls"))

    def stop(self) -> None:
        """End it; it writes its trace."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


@dataclass(frozen=True)
class Place:
    """What the engines are, and where: which one, its Python, the model, a folder for traces."""

    engine: str
    python: str
    model: Path
    folder: Path


@contextmanager
def engine(place: Place, name: str, *flags: str) -> Iterator[Engine]:
    """An engine that is ended at the end."""
    running = Engine(place, name, flags)
    try:
        yield running
    finally:
        running.stop()


@dataclass(frozen=True)
class Work:
    """What clients ask for: ``clients`` conversations at once, of ``turns`` turns each.

    ``decode`` is the length of a reply in the middle; ``seeded`` ones are not batched.
    """

    clients: int
    turns: int
    prompt: int
    decode: int
    seeded: bool = False

    def first(self, round_: int, client: int) -> list[Json]:
        """The first turn of a conversation, about ``prompt`` bytes of text."""
        text = f"Round {round_}, conversation {client}. "
        text = text + "The harbour is open from six to nine. " * (self.prompt // 30)
        system = {"role": "system", "content": text[: self.prompt]}
        return [system, {"role": "user", "content": "When?"}]

    def length(self, client: int, turn: int) -> int:
        """How many tokens a reply has: clients of equal ones would go on in step."""
        return max(2, round(self.decode * LENGTHS[(client + 2 * turn) % len(LENGTHS)]))

    def converse(self, running: Engine, round_: int, client: int, clock: Clock) -> None:
        """All turns of a conversation, one after the other, behind the client before."""
        messages = self.first(round_, client)
        clock.wait(client)
        try:
            for turn in range(self.turns):
                body: Json = {"messages": messages, "max_tokens": self.length(client, turn)}
                if self.seeded:
                    body["seed"] = 1 + client
                said = running.chat(body, lambda pieces: clock.begun(client, pieces))
                more = "And on Sundays, and in winter, when the ice is thick? " * 4
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": f"{turn}. {more}"},
                ]
        finally:
            clock.begun(client, self.decode)  # nobody waits for one that failed

    def run(self, running: Engine, round_: int) -> None:
        """All conversations of a round, at once."""
        clock = Clock(self.clients, 1 if self.seeded else max(1, self.decode // self.clients))
        threads = [
            threading.Thread(target=self.converse, args=(running, round_, client, clock))
            for client in range(self.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class Clock:
    """When each client begins: when the one before it has got so many pieces of its reply."""

    def __init__(self, clients: int, pieces: int) -> None:
        self._pieces = pieces
        self._events = [threading.Event() for _ in range(clients)]

    def wait(self, client: int) -> None:
        """Until the client before has come so far."""
        if client:
            self._events[client - 1].wait(START_SECONDS)

    def begun(self, client: int, pieces: int) -> None:
        """A client has got so many pieces."""
        if pieces >= self._pieces:
            self._events[client].set()


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
    longest_call: str


def held_up(steps: Sequence[Step]) -> Json:
    """How long our calls took between steps while somebody was decoding."""
    decoding = [step for step in steps if step.waiting]
    gaps = [step.ours_ms for step in decoding]
    busy = [gap for gap in gaps if gap > BUSY_MS] or [0.0]
    cpu = [step.cpu_ms for step in decoding]
    longest = max(decoding, key=lambda step: step.longest_call_ms)
    over = [step.longest_call for step in decoding if step.longest_call_ms > BLOCKED_BAR_MS]
    return {
        "gaps": len(gaps),
        "gaps_with_calls": len(busy),
        "share_with_calls": round(len(busy) / len(gaps), 3),
        "median_ms": round(statistics.median(gaps), 4),
        "median_with_calls_ms": round(statistics.median(busy), 3),
        "p99_ms": round(percentile(gaps, 0.99), 3),
        "p99_with_calls_ms": round(percentile(busy, 0.99), 3),
        "max_ms": round(max(gaps), 3),
        "longest_call_ms": round(longest.longest_call_ms, 3),
        "longest_call": longest.longest_call,
        "calls_over_2_ms": dict(Counter(over)),
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
    place = Place(options.engine, options.python, model_folder(options, folder), folder)
    where = ("--pion-host", "127.0.0.1", "--pion-port", str(server.port))
    store = (*where, "--pion-budget-gb", "0", "--pion-preload-gb", "0")
    asked = (options.clients, options.turns, options.prompt, options.decode, options.seeded)
    work, first = Work(*asked), Work(options.clients, 1, options.prompt, 2)
    with engine(place, "before", *store) as filling:
        for round_ in range(-1, options.pairs):
            first.run(filling, round_)
        filling.until_stored()
    with (
        engine(place, "ours", *store) as ours,
        engine(place, "without", "--no-pion") as without,
    ):
        for round_ in range(-1, options.pairs):
            for side in (ours, without) if round_ % 2 else (without, ours):
                if round_ == 0:
                    side.warm_at = time.perf_counter()
                work.run(side, round_)
                if side is ours:
                    stats = ours.until_stored()
    traced = [side.steps() for side in (ours, without)]
    blocked, longest = held_up(traced[0]), "longest_call_ms"
    return {
        "held_up": {**blocked, **check(blocked[longest], BLOCKED_BAR_MS, at_least=False)},
        "held_up_without": held_up(traced[1]),
        "decode": decode_ratio(*traced),
        "decode_beside": by_work(ours.calls(), *traced),
        "slowest": slowest(ours.calls(), traced[0]),
        "generation_thread": stats["generation_thread"],
        "restores": stats["restores"],
        "reused": [stats["tokens_reused"], stats["tokens_prompt"]],
    }


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
    parser.add_argument("--decode", type=int, default=64, help="tokens of a reply in the middle")
    parser.add_argument("--seeded", action="store_true", help="replies that are not batched")
    parser.add_argument("--engine", choices=ENGINES, default=MLX_LM)
    parser.add_argument("--python", default=sys.executable, help="that runs the engines")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder, pion_server(folder) as server:
        figures = measure(options, folder, server)
    settings = {name: vars(options)[name] for name in ("shape", "bits", "clients", "turns")}
    settings |= {name: vars(options)[name] for name in ("prompt", "decode", "engine", "seeded")}
    report("serve_stalls", options, {**settings, **figures}, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
