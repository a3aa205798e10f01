"""The trace of ``benchmarks/reproducers/agent_trace``, in short, proved against one engine."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.reproducers import agent_trace as trace
from benchmarks.reproducers.agent_trace_model import FAMILIES, make_folder
from benchmarks.reproducers.agent_trace_script import SHORT, make_trace
from benchmarks.reproducers.agent_trace_servers import Place
from benchmarks.reproducers.agent_trace_shares import shares, total_share

__all__ = ["FAMILIES", "prove_trace"]


def said_without_cache(model: Path, prompt: list[int], limit: int) -> str:
    """What mlx-lm alone answers, all of the prompt computed in one go."""
    from mlx_lm import load, stream_generate

    loaded, tokenizer = load(str(model))[:2]
    replies = stream_generate(loaded, tokenizer, prompt, max_tokens=limit)
    return "".join(reply.text for reply in replies)


def prove_trace(server: str, family: str, folder: Path) -> None:
    """Replays the trace and asserts what was reused of what could be, and that it was."""
    phases = make_trace(SHORT)
    model = make_folder(folder / family, family)
    place = Place(sys.executable, folder / "serve", model, FAMILIES[family])
    prompts = trace.prompts_of(phases, model)
    run = trace.replay(server, phases, place)
    assert trace.same_prompts(run, prompts)
    found = shares(run.answers, prompts)
    losses = [(one.answer.name, one.lost, one.answer.receipt) for one in found if one.lost]
    assert total_share(found) >= trace.BARS[family], losses
    # What is said to be reused did not go through the model, and the statistics agree.
    alone = [one for one in found if one.answer.forwarded is not None]
    assert [one.answer.forwarded for one in alone] == [one.prompt - one.reused for one in alone]
    last = run.answers[-1]
    assert last.text == said_without_cache(model, prompts[last.name].tolist(), last.completion)
    computed = run.totals["stats_asked_tokens"] - run.totals["stats_reused_tokens"]
    assert computed == sum(one.prompt - one.reused for one in found)
