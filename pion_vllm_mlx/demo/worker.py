"""One process of the demo: reads a job from standard input, writes a report to standard output.

Both are JSON. Every job gets the prefix through ``PionPromptCache``, then answers its questions
behind it. A job that compares also answers each question in the two ways that use no store:
prefix and question in one go, as mlx-lm does it by itself, which is what a user waits for
today; and behind an unstored cache cut at the same place, whose logits must be bit-equal.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from mlx_lm import load

from pion_vllm_mlx.cache.completion import token_ids
from pion_vllm_mlx.cache.prefill import prefill
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.demo.answers import Answer, answer, first_difference, same_bits
from pion_vllm_mlx.demo.text import prefix_ids, question_text
from pion_vllm_mlx.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """What a process is to do; ``compare`` asks for the answers that use no store as well."""

    model: str
    url: str
    prefix_tokens: int
    num_tokens: int
    questions: list[str]
    compare: bool = False


@dataclass
class QuestionReport:
    """One question behind the prefix of ``PionPromptCache``; cold fields only when compared.

    ``same_bits``: logits equal to those behind an unstored cache cut at the same place.
    ``difference``: token index and top-2 gap where it parts from mlx-lm's answer in one go.
    """

    question: str
    tokens: list[int]
    text: str
    warm_ms: float
    restore_ms: float
    hit: bool
    lane: str
    bytes: int
    miss_reason: str | None
    cold_ms: float | None = None
    same_bits: bool | None = None
    difference: tuple[int, float] | None = None


@dataclass
class WorkerReport:
    """What a process did; times in milliseconds.

    ``key_ms``: reading the weights for the key, as the prompt cache is built. Like
    ``load_ms`` it comes once a process and is no part of another time.
    """

    load_ms: float
    key_ms: float
    prefix_tokens: int
    prefix_ms: float
    prefill_ms: float
    stats: dict[str, Any]
    questions: list[QuestionReport] = field(default_factory=list)


class Worker:
    """The model, the prefix and the prompt cache of one process."""

    def __init__(self, job: Job) -> None:
        started = time.perf_counter()
        self.job = job
        try:
            self.model, self.tokenizer = load(job.model)[:2]
        except (OSError, ValueError) as error:
            raise ConfigError(f"the model {job.model} cannot be loaded: {error}") from error
        self.prefix = prefix_ids(self.tokenizer.encode, job.prefix_tokens)
        self.namespace = PionPromptCache.make_namespace("demo", str(job.prefix_tokens))
        # The first call of a process allocates and starts threads: no answer shall be timed by it.
        answer(self.model, self.prefix[:8], 1)
        self.load_ms = _ms_since(started)
        started = time.perf_counter()
        self.prompt_cache = PionPromptCache(self.model, url=job.url)
        self.key_ms = _ms_since(started)
        self._unstored: Any = None

    def run(self) -> WorkerReport:
        """Do the job."""
        questions = [self._ask(question) for question in self.job.questions]
        prefix_ms = 0.0
        if not questions:
            started = time.perf_counter()
            self.prompt_cache.get_or_prefill(self.prefix, self.namespace)
            prefix_ms = _ms_since(started)
        stats = self.prompt_cache.stats()
        return WorkerReport(
            load_ms=self.load_ms,
            key_ms=self.key_ms,
            prefix_tokens=len(self.prefix),
            prefix_ms=prefix_ms,
            prefill_ms=float(stats["last_prefill_ms"]),
            stats=stats,
            questions=questions,
        )

    def _ask(self, question: str) -> QuestionReport:
        ids = self.tokenizer.encode(question_text(question), add_special_tokens=False)
        cold = None
        if self.job.compare:
            cold = answer(self.model, [*self.prefix, *ids], self.job.num_tokens)
        hits = self.prompt_cache.hits
        started = time.perf_counter()
        cache = self.prompt_cache.get_or_prefill(self.prefix, self.namespace)
        restore_ms = _ms_since(started)
        warm = answer(self.model, ids, self.job.num_tokens, cache, started)
        stats = self.prompt_cache.stats()
        report = QuestionReport(
            question=question,
            tokens=warm.tokens,
            text=self.tokenizer.decode(warm.tokens),
            warm_ms=warm.first_token_ms,
            restore_ms=restore_ms,
            hit=self.prompt_cache.hits > hits,
            lane=str(stats["last_lane"]),
            bytes=int(stats["last_bytes"]),
            miss_reason=self.prompt_cache.last_miss_reason,
        )
        if cold is not None:
            report.cold_ms = cold.first_token_ms
            report.difference = first_difference(warm, cold)
            report.same_bits = same_bits(warm, self._answer_unstored(ids))
        return report

    def _answer_unstored(self, ids: list[int]) -> Answer:
        """The answer behind a cache that was never stored, cut where the stored one is cut."""
        if self._unstored is None:
            self._unstored = prefill(self.model, token_ids(self.prefix)).cache
        return answer(self.model, ids, self.job.num_tokens, copy.deepcopy(self._unstored))


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000


def main() -> int:
    """Run the job on standard input; the report is the last line of standard output."""
    job = Job(**json.load(sys.stdin))
    try:
        worker = Worker(job)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(asdict(worker.run()), default=str))
    return 0


if __name__ == "__main__":
    sys.exit(main())
