"""Where the time of slow calls and slow steps went, of what ``serve_stalls_watch`` has noted."""

from __future__ import annotations

import json
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .serve_stalls import Step

MOST_TOLD, MOST_BESIDE = 8, 6
LEAST_MS = 0.15
#: what another thread does for the store, by the call that is all of it.
WORK = {
    "Kept._write": "writing",
    "Kept._when_idle": "sealing",
    "LineageStore.match": "asking",
    "LineageStore.restore": "reading",
    "_let_go": "freeing",
}
OURS = "ours: "
#: what the engines' statistics know of the generation thread.
NAMED = frozenset(("plan", "fetch", "insert", "store", "take", "keep", "extract", "grow", "grew"))
Json = dict[str, Any]


class Call(NamedTuple):
    """A watched call."""

    thread: str
    name: str
    began: float
    ended: float
    cpu_ms: float

    @property
    def ms(self) -> float:
        """How long it took."""
        return (self.ended - self.began) * 1e3


def read(path: Path) -> list[Call]:
    """What an engine has written, in the order in which calls began."""
    lines = path.read_text().splitlines() if path.exists() else []
    return sorted((Call(*json.loads(line)) for line in lines), key=lambda call: call.began)


def slowest(calls: Sequence[Call], steps: Sequence[Step]) -> Json:
    """The longest calls of ours on the generation thread, and what went on in the same time.

    ``decoding``: those while somebody was decoding, ``steps``: the calls by their names in the
    statistics, whenever they were.
    """
    began = [step.began for step in steps]
    since = began[0] if began else 0.0
    mine = [call for call in calls if call.began >= since]
    ours, named = [], []
    for call in mine:
        if call.name in NAMED:
            named.append(call)
        elif call.name.startswith(OURS):
            after = bisect_left(began, call.began)
            if after < len(steps) and steps[after].waiting:
                ours.append(call)
    return {
        "decoding": [_told(call, mine) for call in _longest(ours)],
        "steps": [_told(call, mine) for call in _longest(named)],
    }


def _longest(calls: Sequence[Call]) -> list[Call]:
    return sorted(calls, key=lambda call: -call.ms)[:MOST_TOLD]


def _told(call: Call, calls: Sequence[Call]) -> Json:
    """A call: its parts, and what other threads were in.

    ``cpu_ms`` is what the thread itself has computed: the rest it waited, for the interpreter
    for the most part.
    """
    shares = [(_shared_ms(call, one), one) for one in calls if one is not call]
    shares = sorted((pair for pair in shares if pair[0] > LEAST_MS), key=lambda pair: -pair[0])
    within = [pair for pair in shares if pair[1].thread == call.thread]
    beside = [pair for pair in shares if pair[1].thread != call.thread]
    return {
        "call": call.name.removeprefix(OURS),
        "ms": round(call.ms, 3),
        "cpu_ms": round(call.cpu_ms, 3),
        "within": {one.name: round(ms, 2) for ms, one in reversed(within[:MOST_BESIDE])},
        "beside": [
            f"{one.thread} {one.name} {ms:.2f} of {one.ms:.2f}" for ms, one in beside[:MOST_BESIDE]
        ],
    }


def by_work(calls: Sequence[Call], steps: Sequence[Step], without: Sequence[Step]) -> Json:
    """How long steps that only decode take, by what the store's threads do meanwhile.

    Of each: how many, their mean, and how many of those milliseconds are more than as many steps
    of as many sequences take without a store.
    """
    alone = _means(without)
    work = [(WORK[call.name], call) for call in calls if call.name in WORK]
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for step, after in zip(steps, steps[1:], strict=False):
        if not _only_decodes(step, after) or step.decoded not in alone:
            continue
        names = {
            name for name, call in work if call.began < after.began and call.ended > step.began
        }
        names |= {"our calls"} if after.ours_ms > LEAST_MS else set()
        ms = (after.began - step.began) * 1e3
        found["+".join(sorted(names)) or "nothing"].append((ms, alone[step.decoded]))
    return {
        name: {
            "steps": len(pairs),
            "mean_ms": round(statistics.mean(ms for ms, _ in pairs), 3),
            "without_mean_ms": round(statistics.mean(usual for _, usual in pairs), 3),
            "more_ms": round(sum(ms - usual for ms, usual in pairs), 1),
        }
        for name, pairs in sorted(found.items())
    }


def _means(steps: Sequence[Step]) -> dict[int, float]:
    found: dict[int, list[float]] = defaultdict(list)
    for step, after in zip(steps, steps[1:], strict=False):
        if _only_decodes(step, after):
            found[step.decoded].append((after.began - step.began) * 1e3)
    return {count: statistics.mean(times) for count, times in found.items()}


def _only_decodes(step: Step, after: Step) -> bool:
    alone = not step.prefilled and not after.prefilled
    return bool(alone and step.decoded == after.decoded == after.waiting > 0)


def _shared_ms(one: Call, other: Call) -> float:
    return (min(one.ended, other.ended) - max(one.began, other.began)) * 1e3
