"""From which prefix length on attending at the server beats restoring rows from it.

Time to the first token after a suffix of 16 tokens, by prefix length, nothing of the prefix in
this process:

* ``stored``: stage 1, the rows cross a socket and are attended here,
* ``mapped``: stage 1, the server's files are mapped (same host only),
* ``attended``: stage 2, queries and suffix cross the socket (``ATTEND.PREFIX.QUERY_FUSED``),
  the slots being resident.

And the time of each further token, restored and attended. A way wins from a length on if its
median is lower there and at all longer ones of the list. The model computes next to nothing but
has the caches of a 1B model (16 layers, 8 x 64, float32 here): what is measured is the prefix.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import mlx.core as mx

from pion_vllm_mlx import (
    PionPromptCache,
    install_pion_attention_patch,
    make_pion_prompt_cache,
    uninstall_pion_attention_patch,
)

from .common import alternate, arguments, fresh_folder, milliseconds, pion_server, report
from .models import SHAPES, SUFFIX_TOKENS, first_token, random_ids, random_llama

STORED, MAPPED, ATTENDED = "stored", "mapped", "attended"
LENGTHS = (256, 512, 1024, 2048, 4096)
STEPS = 4
VOCABULARY = SHAPES["thin"]["vocab_size"]
DEADLINE_SECONDS = 60.0

Run = Callable[[], Any]


def options() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    return parser.parse_args()


class Ways:
    """Every way to the first token behind one prefix."""

    def __init__(self, model: Any, ids: list[int], clients: dict[str, PionPromptCache]) -> None:
        self.model, self.ids, self.clients = model, ids, clients
        self.name = f"prefix {len(ids)}"
        self.suffix = random_ids(SUFFIX_TOKENS, VOCABULARY, 2)

    def cache(self, way: str) -> list[Any]:
        """The prefix as a cache, gone for by one way."""
        pc = self.clients[way]
        if way == ATTENDED:
            return make_pion_prompt_cache(self.model, self.name, pc, len(self.ids))
        cache = pc.get_or_prefill(self.ids, self.name)
        if pc.stats()["lane"] != way:
            raise SystemExit(f"{pc.stats()['lane']} instead of {way}: {pc.last_miss_reason}")
        return cache

    def first(self, way: str) -> int:
        return first_token(self.model, self.suffix, self.cache(way))

    def further(self, way: str) -> Run:
        """Single tokens after the suffix, taken back again."""
        cache = self.cache(way)
        mx.eval(self.model(mx.array([self.suffix]), cache=cache))

        def run() -> None:
            for _ in range(STEPS):
                mx.eval(self.model(mx.array([[1]]), cache=cache))
            for entry in cache:
                entry.trim(STEPS)

        return run


def clients(model: Any, port: int, stack: ExitStack) -> dict[str, PionPromptCache]:
    """A prompt cache for each way; none keeps a prefix in this process."""
    made = {}
    for way in (STORED, MAPPED, ATTENDED):
        os.environ["PION_PROMPT_CACHE_NO_INPROC"] = "1"
        os.environ["PION_PROMPT_CACHE_NO_EXPORT"] = "1" if way == STORED else ""
        pc = PionPromptCache(model, port=port, deadline_seconds=DEADLINE_SECONDS)
        made[way] = stack.enter_context(pc)
    return made


def measured(ways: Ways, given: argparse.Namespace) -> dict[str, Any]:
    """First and further tokens at one length."""
    ways.clients[MAPPED].get_or_prefill(ways.ids, ways.name)
    tokens = {way: ways.first(way) for way in ways.clients}
    if len(set(tokens.values())) > 1:
        raise SystemExit(f"other first tokens: {tokens}")
    sides: dict[str, Run] = {way: partial(ways.first, way) for way in ways.clients}
    first = alternate(sides, given.pairs, given.patience)
    steps = {way: ways.further(way) for way in (STORED, ATTENDED)}
    further = alternate(steps, given.pairs, given.patience)
    return {
        "tokens": len(ways.ids),
        "first_token_ms": {way: milliseconds(values) for way, values in first.items()},
        "further_token_ms": {
            way: milliseconds([value / STEPS for value in values])
            for way, values in further.items()
        },
        "medians": {way: statistics.median(values) for way, values in first.items()},
    }


def wins_from(lines: list[dict[str, Any]], other: str) -> int | None:
    """The least length from which attending is faster at all lengths; None for none."""
    found = None
    for line in sorted(lines, key=lambda line: -int(line["tokens"])):
        if line["medians"][ATTENDED] >= line["medians"][other]:
            break
        found = int(line["tokens"])
    return found


def main() -> None:
    given = options()
    model = random_llama("thin", mx.float32)
    with ExitStack() as stack:
        server = stack.enter_context(pion_server(stack.enter_context(fresh_folder(given.dir))))
        install_pion_attention_patch()
        stack.callback(uninstall_pion_attention_patch)
        made = clients(model, server.port, stack)
        lines = [
            measured(Ways(model, random_ids(length, VOCABULARY, length), made), given)
            for length in given.lengths
        ]
    crossover = {f"attended beats {way} from": wins_from(lines, way) for way in (STORED, MAPPED)}
    shown = [{k: v for k, v in line.items() if k != "medians"} for line in lines]
    figures = {"shape": "thin", "by_length": shown, **crossover}
    report("stage1_vs_stage2_crossover", given, figures, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
