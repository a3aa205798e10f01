"""Conversations under serve after a restart, against the same engine that still has them in RAM.

Two serves of one model: ours with a store, and one with ``--no-pion``, whose engine keeps its
prompt caches in memory. Both read the same conversations, one for every pair; then ours is ended
and started again, twice: once it reads the conversations ahead, as it does by itself, and once
it reads none (``--pion-preload-gb 0``), so that each is read when it is asked for. Every pair
sends one conversation's next turn to both, in turn, streaming: the time to the first token.
*Bare read*: as many bytes as the prefix's rows have, read from a file
into memory that was touched before; the same from a file of safetensors into evaluated arrays,
whose memory is used again by the next such read; and into arrays that are kept, in fresh memory,
as the rows of a conversation are that somebody continues. Then decoding: the same request to both,
tokens a second between the first and the last. Both engines decode the same greedy tokens, or it
stops.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .common import (
    Process,
    arguments,
    check,
    environment,
    fresh_folder,
    milliseconds,
    paired_ratio,
    pion_server,
    report,
    spread,
)
from .model_folder import write_model
from .models import SHAPES

TTFT_BAR, DECODE_BAR = 1.15, 0.98
START_SECONDS = 300.0
#: as many conversations as there are, as the embedded server has it
SERVER = ("--max-sessions", "65536")
STORED_SECONDS = 120.0
Json = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """Seconds to the first token, seconds from the first to the last, and what was said."""

    first: float
    rest: float
    steps: list[float]
    text: str
    cached: int
    prompt: int


class Serve:
    """A serve process, on a port that the system chose."""

    def __init__(self, model: Path, log: Path, flags: Sequence[str]) -> None:
        words = ["-m", "pion_vllm_mlx", "serve", "--model", str(model), "--port", "0"]
        with log.open("wb") as output:
            self.child = subprocess.Popen(
                [sys.executable, *words, "--prompt-cache-size", "64", *flags],
                env={**environment(), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        ends_at = time.monotonic() + START_SECONDS
        self.port = 0
        while not self.port or self.ask("GET", "/health")[0] != 200:
            if self.child.poll() is not None or time.monotonic() > ends_at:
                self.stop()
                raise SystemExit(log.read_text(errors="replace"))
            time.sleep(0.1)
            found = re.search(r"serve on http://[^ ]*:(\d+)", log.read_text(errors="replace"))
            self.port = int(found.group(1)) if found else 0

    def ask(self, method: str, path: str) -> tuple[int, Json]:
        """A request without a body: status and JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read() or b"{}")
        except OSError:
            return 0, {}
        finally:
            connection.close()

    def chat(self, messages: Sequence[Json], tokens: int) -> Reply:
        """One streamed, greedy chat completion. Raises SystemExit when it fails."""
        body = {"messages": messages, "max_tokens": tokens, "stream": True, "temperature": 0.0}
        body["stream_options"] = {"include_usage": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        payload = json.dumps(body).encode()
        connection.connect()
        started = time.perf_counter()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", payload, headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(answer.read().decode(errors="replace"))
        arrivals: list[float] = []
        words: list[str] = []
        usage: Json = {}
        for event in _events(answer):
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                if said := choice.get("delta", {}).get("content"):
                    arrivals.append(time.perf_counter())
                    words.append(said)
        connection.close()
        if not arrivals:
            raise SystemExit("no token arrived")
        details = usage.get("prompt_tokens_details") or {}
        return Reply(
            arrivals[0] - started,
            arrivals[-1] - arrivals[0],
            list(np.diff(arrivals)),
            "".join(words),
            int(details.get("cached_tokens") or 0),
            int(usage["prompt_tokens"]),
        )

    def stop(self) -> None:
        """End it as Ctrl-C does, and wait."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)
        try:
            self.child.wait(60)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


def _events(answer: http.client.HTTPResponse) -> Iterator[Json]:
    for line in answer:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event: Json = json.loads(line[6:])
            if "error" in event:
                raise SystemExit(str(event))
            yield event


@contextmanager
def serving(model: Path, log: Path, *flags: str) -> Iterator[Serve]:
    """A serve that is ended at the end."""
    serve = Serve(model, log, flags)
    try:
        yield serve
    finally:
        serve.stop()


def conversation(number: int, tokens: int) -> list[Json]:
    """A system prompt of its own and a question, about ``tokens`` tokens when rendered."""
    start = f"Conversation {number}. "
    text = (start + "The harbour is open from six to nine. " * (tokens // 30))[: tokens - 60]
    return [{"role": "system", "content": text}, {"role": "user", "content": "When?"}]


def next_turn(messages: Sequence[Json], said: str) -> list[Json]:
    """The conversation one turn on."""
    more = [{"role": "assistant", "content": said}, {"role": "user", "content": "And on Sundays?"}]
    return [*messages, *more]


@dataclass(frozen=True)
class Reads:
    """Seconds of reads of as many bytes: into touched memory, into arrays, into kept ones."""

    memory: list[float]
    arrays: list[float]
    kept_arrays: list[float]


def bare_reads(folder: Path, nbytes: int, turns: int) -> Reads:
    """The reads of ``nbytes``, each ``turns`` times after one that does not count."""
    raw, arrays = folder / "raw", folder / "arrays.safetensors"
    layer = nbytes // 32
    tensors = {f"{n}": mx.random.randint(0, 255, (layer,)).astype(mx.uint8) for n in range(32)}
    mx.save_safetensors(str(arrays), tensors)
    del tensors
    raw.write_bytes(os.urandom(1 << 20) * (nbytes >> 20))
    buffer = bytearray(raw.stat().st_size)
    plain, evaluated = [], []
    for _ in range(turns + 1):
        started = time.perf_counter()
        with raw.open("rb", buffering=0) as file:
            file.readinto(buffer)
        plain.append(time.perf_counter() - started)
        evaluated.append(array_read(arrays)[0])
    held = [array_read(arrays) for _ in range(turns + 1)]  # all at once: no memory twice
    kept = [seconds for seconds, _ in held]
    return Reads(plain[1:], evaluated[1:], kept[1:])


def array_read(path: Path) -> tuple[float, list[mx.array]]:
    """Seconds of a file's reading into evaluated arrays, and these."""
    started = time.perf_counter()
    read = list(cast(dict[str, mx.array], mx.load(str(path))).values())
    mx.eval(read)
    return time.perf_counter() - started, read


def row_bytes(shape: str, tokens: int) -> int:
    """Bytes of K and V of ``tokens`` tokens in 16 bits."""
    words = SHAPES[shape]
    layer = int(words["num_key_value_heads"]) * int(words["head_dim"]) * 2 * 2
    return layer * int(words["num_hidden_layers"]) * tokens


def until_stored(serve: Serve) -> None:
    """Wait until everything that was kept is written."""
    ends_at = time.monotonic() + STORED_SECONDS
    while serve.ask("GET", "/v1/pion/stats")[1].get("waiting", 0):
        if time.monotonic() > ends_at:
            raise SystemExit("not everything was stored")
        time.sleep(0.1)


def warm(serve: Serve, tokens: int, said: str) -> None:
    """Make the kernels of every length that is measured, by two conversations of their own."""
    for number in (-2, -1):
        serve.chat(next_turn(conversation(number, tokens), said), 8)


def compared(
    ours: Serve, ram: Serve, options: argparse.Namespace, said: dict[int, str]
) -> tuple[list[Reply], list[Reply]]:
    """The next turn of every conversation that is numbered in ``said``, from both in turn."""
    found: tuple[list[Reply], list[Reply]] = ([], [])
    for number, reply in said.items():
        asked = next_turn(conversation(number, options.tokens), reply)
        order = [(ours, found[0]), (ram, found[1])]
        for serve, replies in order if number % 2 else reversed(order):
            replies.append(serve.chat(asked, options.decode))
        if found[0][-1].text != found[1][-1].text:
            raise SystemExit(f"other tokens: {found[0][-1].text!r}, {found[1][-1].text!r}")
    return found


def figures_of(
    ours: Sequence[Reply], ram: Sequence[Reply], reads: Reads, limit: int
) -> Json:
    """The figures and their bars."""
    ttft = [reply.first for reply in ours], [reply.first for reply in ram]
    allowed = TTFT_BAR * statistics.median(ttft[1])
    median = statistics.median(ttft[0])
    rate = [(limit - 1) / reply.rest for reply in ours], [(limit - 1) / reply.rest for reply in ram]
    decode = paired_ratio(*rate)
    return {
        "prompt_tokens": ours[0].prompt,
        "reused": spread([reply.cached for reply in ours], 0),
        "reused_ram": spread([reply.cached for reply in ram], 0),
        "ttft_restarted_ms": milliseconds(ttft[0]),
        "ttft_ram_ms": milliseconds(ttft[1]),
        "read_into_memory_ms": milliseconds(reads.memory),
        "read_into_arrays_ms": milliseconds(reads.arrays),
        "read_into_kept_arrays_ms": milliseconds(reads.kept_arrays),
        **{
            f"ttft_over_allowed_with_{name}_read": check(
                median / (allowed + statistics.median(times)), 1, at_least=False
            )
            for name, times in (
                ("memory", reads.memory),
                ("array", reads.arrays),
                ("kept_array", reads.kept_arrays),
            )
        },
        "decode_tokens_s": spread(rate[0], 1),
        "decode_ram_tokens_s": spread(rate[1], 1),
        "decode_step_ms": {"ours": step_medians(ours), "ram": step_medians(ram)},
        "decode_ratio": {**decode, **check(decode["median"], DECODE_BAR, at_least=True)},
    }


def step_medians(replies: Sequence[Reply]) -> Json:
    """Milliseconds between two tokens: the median of all; the mean of the first and of the last
    16 of a reply, in the median of the replies; and their 99th percentile."""
    steps = [np.array(reply.steps) * 1e3 for reply in replies]
    together = np.concatenate(steps)
    return {
        "median": round(float(np.median(together)), 3),
        "first_16": round(float(np.median([one[:16].mean() for one in steps])), 3),
        "last_16": round(float(np.median([one[-16:].mean() for one in steps])), 3),
        "p99": round(float(np.percentile(together, 99)), 3),
    }


def fill(
    first: Serve, ram: Serve, options: argparse.Namespace, numbers: Sequence[int]
) -> dict[int, str]:
    """What both say to the first turn of conversations."""
    said = {}
    for number in numbers:
        asked = conversation(number, options.tokens)
        said[number] = first.chat(asked, 4).text
        ram.chat(asked, 4)
        until_stored(first)
    return said


def steps_told(log: Path) -> Json:
    """Of the engine's line a request: the parts of the time to its first token."""
    told = log.read_text(errors="replace")
    return {
        name: milliseconds([float(ms) / 1e3 for ms in re.findall(rf" {name}=([0-9.]+)", told)])
        for name in ("restore_ms", "first_token_ms")
    }


def measure(options: argparse.Namespace, folder: Path, server: Process) -> Json:
    """Fill both, restart ours two times, compare."""
    dtype = mx.float16 if options.bits else mx.float32
    model = write_model(folder / "model", options.shape, dtype, options.bits or None)
    store = ("--pion-host", "127.0.0.1", "--pion-port", str(server.port), "--pion-budget-gb", "0")
    num_bytes = row_bytes(options.shape, options.tokens)
    figures: Json = {}
    with ExitStack() as stack:
        ram = stack.enter_context(serving(model, folder / "ram.log", "--no-pion"))
        with serving(model, folder / "first.log", *store) as first:
            warmed = fill(first, ram, options, range(-2, 0))
            asked_for = fill(first, ram, options, range(options.asked_for))
            numbers = range(options.asked_for, options.asked_for + options.pairs)
            ahead = fill(first, ram, options, numbers)
        reads = bare_reads(folder, num_bytes, options.pairs)
        words: tuple[str, ...]
        for name, said, words in (
            ("read_ahead", ahead, ()),
            ("read_when_asked_for", asked_for, ("--pion-preload-gb", "0")),
        ):
            log = folder / f"{name}.log"
            with serving(model, log, *store, *words) as ours:
                while ours.ask("GET", "/v1/pion/stats")[1].get("reading_ahead"):
                    time.sleep(0.1)
                for serve in (ours, ram):
                    warm(serve, options.tokens, warmed[-2])
                pair = compared(ours, ram, options, said)
                stats = ours.ask("GET", "/v1/pion/stats")[1]
            figures[name] = {
                **figures_of(*pair, reads, options.decode),
                **steps_told(log),
                "stats": stats,
            }
    return figures


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.set_defaults(pairs=20)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--bits", type=int, default=4, help="of the weights; 0: float32")
    parser.add_argument("--asked-for", type=int, default=20, help="pairs that were not read ahead")
    parser.add_argument("--tokens", type=int, default=8_192, help="of a conversation")
    parser.add_argument("--decode", type=int, default=256, help="tokens of a reply")
    options = parser.parse_args()
    with fresh_folder(options.dir) as folder, pion_server(folder, *SERVER) as server:
        figures = measure(options, folder, server)
    report("serve_restart", options, {"shape": options.shape, **figures}, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
