"""``pion-vllm-mlx demo``: a prefix prefilled by one process and reused by others.

1. Set-up: the model, converted once; the server, on a data folder of its own.
2. Process A prefills the prefix and stores it.
3. Process B, a fresh interpreter, answers questions over it warm and cold.
4. The server's receipt (PION.STATS); then SIGKILL, start again, and process C still hits.
5. One stored byte is turned over in a copy of the data folder: process D must miss.

This process imports no MLX: it starts the others, and compares what they report.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.cache.embedded import EmbeddedServer, attach
from pion_vllm_mlx.config import module_command
from pion_vllm_mlx.demo import blas, report
from pion_vllm_mlx.demo.flip import FlippedByte, flip_stored_byte
from pion_vllm_mlx.demo.model import ensure_model
from pion_vllm_mlx.demo.text import QUESTIONS
from pion_vllm_mlx.errors import ConfigError, PionError

SERVER_END_SECONDS = 10.0
WORKER_SECONDS = 3600.0
# What belongs to a running server and not to its data.
NOT_DATA = ("pion.lock", "pion.status", "pion.log")


@dataclass(frozen=True)
class Amounts:
    """How much is computed: tokens of prefix, questions, tokens of each answer."""

    prefix_tokens: int
    num_questions: int
    num_tokens: int


FULL = Amounts(prefix_tokens=512, num_questions=5, num_tokens=16)
SHORT = Amounts(prefix_tokens=96, num_questions=2, num_tokens=4)


@dataclass(frozen=True)
class Options:
    """The command line; an amount that is None is chosen by what the machine can do."""

    prefix_tokens: int | None
    questions: int | None
    tokens: int | None
    model: str | None
    json: bool
    keep_data: bool

    def amounts(self, fast: bool) -> Amounts:
        """The amounts asked for, the rest as ``fast`` allows."""
        default = FULL if fast else SHORT
        return Amounts(
            self.prefix_tokens or default.prefix_tokens,
            self.questions or default.num_questions,
            self.tokens or default.num_tokens,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; 0 if all was as promised, 1 if not."""
    options = parse_options(arguments)
    result = report.DemoResult()
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        _run(options, result)
    if options.json:
        print(json.dumps(report.as_json(result), indent=1))
    return 1 if result.problems else 0


def parse_options(arguments: Sequence[str] | None) -> Options:
    """The options in ``arguments`` (default: the process's); ends the process on nonsense."""
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx demo",
        description="A prefix prefilled by one process, reused by others: timed and compared.",
    )
    number = _number_between
    parser.add_argument(
        "--prefix-tokens", type=number(16, 100_000), metavar="N", help="16 to 100000, default 512"
    )
    parser.add_argument(
        "--questions",
        type=number(1, len(QUESTIONS)),
        metavar="N",
        help=f"1 to {len(QUESTIONS)}, default 5",
    )
    parser.add_argument(
        "--tokens", type=number(1, 1024), metavar="N", help="compared a question, default 16"
    )
    parser.add_argument(
        "--model",
        metavar="PATH_OR_HUB_NAME",
        help="instead of the demo's own, which takes 1.1 GB in the user's cache folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--keep-data", action="store_true", help="keep the data folder")
    return Options(**vars(parser.parse_args(arguments)))


def _number_between(low: int, high: int) -> Any:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return parse


def _require(options: Options) -> None:
    """Raises ConfigError where a part or the model is missing, before anything starts."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise ConfigError("the Python module mlx_lm is missing: pip install 'pion-vllm-mlx[demo]'")
    model = options.model
    if model and (model[0] in "/.~" or model.count("/") > 1) and not Path(model).exists():
        raise ConfigError(f"--model: there is no folder {model}")


def _run(options: Options, result: report.DemoResult) -> None:
    _require(options)
    library = blas.matrix_library()
    amounts = options.amounts(library.fast)
    result.shortened = not library.fast and amounts != options.amounts(fast=True)
    if not library.fast:
        print(blas.ADVICE)
    if result.shortened:
        print(
            f"Shortened to {amounts.prefix_tokens} tokens of prefix, {amounts.num_questions} "
            f"questions and {amounts.num_tokens} tokens an answer; the options ask for more."
        )
    started = time.monotonic()
    model = options.model or str(ensure_model(quiet=False))
    result.set_up_seconds = time.monotonic() - started
    print(f"Set-up took {result.set_up_seconds:.1f} s.")
    started = time.monotonic()
    with _data_folder(options.keep_data) as folder:
        Demo(folder, model, amounts, library.environment, result).run()
    result.seconds = time.monotonic() - started
    print(f"\nThat took {result.seconds:.0f} s without the set-up.")
    for problem in result.problems:
        print(f"NOT AS PROMISED: {problem}")
    if not result.problems:
        print("Everything was as promised.")


@contextlib.contextmanager
def _data_folder(keep: bool) -> Iterator[Path]:
    """A folder for the demo's data alone, removed at the end unless ``keep``."""
    folder = Path(tempfile.mkdtemp(prefix="pion-demo-"))
    try:
        yield folder
    finally:
        if keep:
            print(f"The data is kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Demo:
    """The steps; what they find goes to ``result``."""

    folder: Path
    model: str
    amounts: Amounts
    environment: dict[str, str]
    result: report.DemoResult

    @property
    def data(self) -> Path:
        """The server's data folder."""
        return self.folder / "data"

    @property
    def copy(self) -> Path:
        """The copy in which a byte is turned over."""
        return self.folder / "flipped"

    def run(self) -> None:
        """All steps in order."""
        server = attach(self.data)
        try:
            self._store()
            tokens = self._ask()
            self._receipt(server)
            self._kill(server, tokens)
        finally:
            _stop(server)
        flipped = self._copy_and_flip()
        server = attach(self.copy)
        try:
            self._miss(flipped, tokens)
        finally:
            _stop(server)

    def _store(self) -> None:
        print(f"\nProcess A prefills {self.amounts.prefix_tokens} tokens and stores them ...")
        done = self._process(self.data, 0)
        stats = done["stats"]
        self.result.stored = {
            "key_ms": done["key_ms"],
            "prefill_ms": done["prefill_ms"],
            "store_ms": float(stats["store_ms_total"]),
        }
        self.result.expect(stats["hits"] == 0, "A: a hit in an empty store")
        self.result.expect(stats["store_failures"] == 0, "A: the prefix was not stored")
        times = self.result.stored
        print(
            "  prefilled in {prefill_ms:.0f} ms, stored in {store_ms:.0f} ms; the weights were "
            "hashed for the key in {key_ms:.0f} ms, once a process".format(**times)
        )

    def _ask(self) -> list[int]:
        """Process B; the tokens of its first answer."""
        number = self.amounts.num_questions
        print(f"\nProcess B, a fresh interpreter, asks {number} questions warm and cold ...\n")
        # Each question fetches anew, as the first one of a process does.
        done = self._process(self.data, number, compare=True, PION_PROMPT_CACHE_NO_INPROC="1")
        self.result.take_questions(done)
        print(report.table(self.result.rows))
        print(report.where_the_time_went(self.result.rows))
        tokens: list[int] = done["questions"][0]["tokens"]
        return tokens

    def _receipt(self, server: EmbeddedServer) -> None:
        with RespConnection(server.address) as connection:
            reply = connection.command("PION.STATS")
        self.result.receipt = _fields(reply)
        hits = int(self.result.receipt.get("kvprefix_hits", 0))
        self.result.expect(
            hits >= self.amounts.num_questions, f"the receipt counts only {hits} hits"
        )
        print(f"\nThe server's receipt:\n{report.receipt_text(self.result.receipt)}")

    def _kill(self, server: EmbeddedServer, tokens: list[int]) -> None:
        print("\nThe server gets SIGKILL and is started again; process C asks ...")
        killed = server.pid
        os.kill(killed, signal.SIGKILL)
        _wait_for_end(killed)
        server.ensure()
        self.result.expect(server.pid != killed, "the server was not started again")
        self.result.take_after_kill(self._process(self.data, 1), tokens)
        print(f"  {self.result.after_kill}, first token after {self.result.after_kill_ms:.0f} ms")

    def _copy_and_flip(self) -> FlippedByte:
        shutil.copytree(self.data, self.copy, ignore=shutil.ignore_patterns(*NOT_DATA))
        return flip_stored_byte(self.copy)

    def _miss(self, flipped: FlippedByte, tokens: list[int]) -> None:
        print(f"\nByte {flipped.offset} of a copy of {flipped.file} is changed; process D asks ...")
        self.result.take_flipped(self._process(self.copy, 1), flipped, tokens)
        print(f"  {self.result.flipped_byte}: {self.result.flipped_byte_reason}")

    def _process(
        self, data: Path, num_questions: int, compare: bool = False, **switches: str
    ) -> report.WorkerReport:
        """Run a worker in a fresh interpreter and read its report."""
        job = {
            "model": self.model,
            "url": f"embedded://{quote(str(data))}",
            "prefix_tokens": self.amounts.prefix_tokens,
            "num_tokens": self.amounts.num_tokens,
            "questions": list(QUESTIONS[:num_questions]),
            "compare": compare,
        }
        done = subprocess.run(
            module_command("pion_vllm_mlx.demo.worker"),
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            env={**self.environment, **switches},
            text=True,
            timeout=WORKER_SECONDS,
        )
        if done.returncode != 0:
            raise PionError(f"a process of the demo ended with exit code {done.returncode}")
        found: report.WorkerReport = json.loads(done.stdout.splitlines()[-1])
        return found


def _stop(server: EmbeddedServer) -> None:
    """Let go of the server and wait until it has ended: nobody else holds it."""
    pid = server.pid
    server.close()
    _wait_for_end(pid)


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + SERVER_END_SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise PionError(f"the server (pid {pid}) did not end within {SERVER_END_SECONDS:.0f} s")


def _fields(reply: Any) -> dict[str, Any]:
    """A flat array of names and values as a dict of text and numbers."""
    words = [item.decode() if isinstance(item, bytes) else item for item in reply]
    return dict(zip(words[::2], words[1::2], strict=True))
