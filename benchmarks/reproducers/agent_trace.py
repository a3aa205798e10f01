"""An agent's trace replayed over HTTP, with a restart in the middle: what was reused, and TTFT.

``agent_trace_script`` says what the trace is, ``agent_trace_shares`` what counts as reusable.
The same requests go to ``pion-vllm-mlx serve`` with either engine, as Anthropic Messages, and to
stock ``mlx_lm.server`` and ``vllm-mlx serve``, as the chat requests that serve's front makes of
them: the same tokens, without the billing header, which is checked by their number.  All on the
same tiny models of random weights, in turn.  What the models saw is counted in their processes.

``--servers`` and ``--models`` choose (a single model is kept in a file of its own); vllm-mlx runs
with ``--vllm-python``.  The bars: of the reusable tokens at least 95 % reused, by hybrids 90 %;
of no request that was alone may the model have seen other tokens than it says (``told_wrong``).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .agent_trace_client import Answer, ask_lanes
from .agent_trace_model import FAMILIES, Renderer, make_folder
from .agent_trace_script import SHORT, Phase, Size, count_requests, make_trace
from .agent_trace_servers import KINDS, Place, Server, python_of, running
from .agent_trace_shares import Ids, Share, shares, total_share
from .common import REPOSITORY, arguments, check, fresh_folder, percentile, report

BARS = {"plain": 0.95, "sliding-window": 0.95, "hybrid": 0.90}
_VLLM_PYTHON = REPOSITORY / ".venvs" / "vllm-mlx" / "bin" / "python"


@dataclass(frozen=True)
class Run:
    """The trace against one server: its answers, which of them came after the restart."""

    server: str
    answers: list[Answer]
    after_restart: frozenset[str]
    totals: Mapping[str, int]
    seconds: float


def replay(name: str, phases: Sequence[Phase], place: Place) -> Run:
    """Runs the whole trace against a server of its own."""
    answers: list[Answer] = []
    after: set[str] = set()
    restarted = False
    with running(KINDS[name], place) as server:
        began = time.perf_counter()
        for phase in phases:
            if phase.restart:
                server.restart()
                restarted = True
            found = _phase(server, phase)
            answers += found
            after |= {one.name for one in found if restarted}
        took = time.perf_counter() - began
    return Run(name, answers, frozenset(after), server.totals, took)


def _phase(server: Server, phase: Phase) -> list[Answer]:
    one = server.ask_alone if len(phase.lanes) == 1 else server.ask
    return ask_lanes(phase.lanes, one)


def prompts_of(phases: Sequence[Phase], model: Path) -> dict[str, Ids]:
    """The tokens of every request by its name."""
    renderer = Renderer(model)
    return {
        request.name: np.array(renderer.tokens(request.body), np.uint32)
        for phase in phases
        for lane in phase.lanes
        for request in lane
    }


def same_prompts(run: Run, prompts: Mapping[str, Ids]) -> bool:
    """Whether the server saw as many tokens in each request as were rendered here."""
    wrong = [one for one in run.answers if one.prompt != prompts[one.name].size]
    for one in wrong:
        told = f"{one.prompt} tokens instead of {prompts[one.name].size}"
        print(f"{run.server}: {one.name}: {told}", file=sys.stderr)
    return not wrong


def figures_of(run: Run, prompts: Mapping[str, Ids], bar: float | None) -> dict[str, Any]:
    """One server's line of the table; ``bar``: of its share."""
    found = shares(run.answers, prompts)
    told = all(answer.cached is not None for answer in run.answers)
    prompt = sum(one.prompt for one in found)
    generated = sum(answer.completion for answer in run.answers)
    forwarded = run.totals["prefill_tokens"] + run.totals["single_tokens"] - generated
    figures: dict[str, Any] = {
        "requests": len(found),
        "prompt_tokens": prompt,
        "prefilled_tokens": forwarded,
        "reusable_tokens": sum(one.reusable for one in found),
        "ttft_ms": _times(run),
        "seconds": round(run.seconds, 1),
    }
    if told:
        figures["reported_computed_tokens"] = sum(one.prompt - one.reused for one in found)
        figures["reused_share"] = round(total_share(found), 4)
        figures["least_share"] = round(min(_share(one) for one in found if one.reusable), 4)
    if "stats_asked_tokens" in run.totals:
        asked, reused = run.totals["stats_asked_tokens"], run.totals["stats_reused_tokens"]
        figures["stats_computed_tokens"] = asked - reused
    if bar is not None:
        figures |= check(total_share(found), bar, at_least=True)
        figures["told_wrong"] = sum(one.told_wrong for one in found)
        figures["pass"] = figures["pass"] and not figures["told_wrong"]
    return figures


def _share(one: Share) -> float:
    return 1.0 - one.lost / one.reusable


def _times(run: Run) -> dict[str, float]:
    """Milliseconds to the first token: of all requests, and of those after the restart."""
    all_ms = [1e3 * one.first_token_seconds for one in run.answers]
    after = [1e3 * one.first_token_seconds for one in run.answers if one.name in run.after_restart]
    times = {
        "first": all_ms[0],
        "median": statistics.median(all_ms),
        "p90": percentile(all_ms, 0.9),
        "total": sum(all_ms),
    }
    if after:
        times["first_after_restart"] = after[0]
        times["median_after_restart"] = statistics.median(after)
    return {name: round(value, 1) for name, value in times.items()}


def differing(runs: Sequence[Run]) -> dict[str, int]:
    """How many replies of each server are other than the last one's with the same engine.

    That is the stock one where it takes part. Two engines may be two versions of mlx-lm.
    """
    last = {KINDS[run.server].engine: run for run in runs}
    found = {}
    for run in runs:
        other = last[KINDS[run.server].engine]
        texts = {one.name: one.text for one in other.answers}
        if other is not run:
            found[run.server] = sum(texts[one.name] != one.text for one in run.answers)
    return found


def show_losses(run: Run, prompts: Mapping[str, Ids]) -> None:
    """One line a request that lost tokens, to standard error."""
    for one in shares(run.answers, prompts):
        answer = one.answer
        told = f"{run.server}: {answer.name}: {one.prompt} tokens, {one.reusable} reusable, "
        told += f"{one.reused} reused, {one.lost} lost, forwarded {answer.forwarded}, "
        told += f"{answer.first_token_seconds * 1e3:.0f} ms"
        print(f"{told}; {answer.receipt.get('why', '')}", file=sys.stderr)


def one_model(family: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All servers on one model."""
    phases = make_trace(SHORT if options.short else Size())
    model = make_folder(folder / family, family)
    prompts = prompts_of(phases, model)
    figures: dict[str, Any] = {"requests": count_requests(phases)}
    runs = []
    for number, name in enumerate(options.servers):
        python = python_of(KINDS[name].engine, options.vllm_python)
        place = Place(python, folder / f"{family}-{number}", model, FAMILIES[family])
        run = replay(name, phases, place)
        runs.append(run)
        if options.losses:
            print((place.folder / "output.log").read_text(errors="replace"), file=sys.stderr)
            show_losses(run, prompts)
        bar = BARS[family] if KINDS[name].has_stats else None
        figures[name] = figures_of(run, prompts, bar)
        figures[name]["same_prompts"] = same_prompts(run, prompts)
    figures["replies_differing"] = differing(runs)
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--servers", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--models", nargs="+", choices=tuple(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--vllm-python", default=str(_VLLM_PYTHON), help="of vllm-mlx")
    parser.add_argument("--short", action="store_true", help="a trace of half a minute")
    parser.add_argument("--losses", action="store_true", help="each request and the logs on stderr")
    options = parser.parse_args()
    options.pairs = 1
    figures: dict[str, Any] = {}
    with fresh_folder(options.dir) as folder:
        for family in options.models:
            figures[family] = one_model(family, options, folder)
    chosen = "" if len(options.models) > 1 else f"-{options.models[0]}"
    chosen += "-short" if options.short else ""
    report(f"agent_trace{chosen}", options, figures, "mlx", "mlx-lm")


if __name__ == "__main__":
    main()
