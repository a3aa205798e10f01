"""What share of the tokens that could be reused was reused.

Reusable tokens of a request: its longest common prefix with any request that was completed
before it began, after header removal, at most all but its last token.  What was reused of them
is the least of that, of what the server says and, of requests beside which there was no other,
of what its model did not see; a request that reuses more than that (the prompt of one still in
flight) does not make up for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.reproducers.agent_trace_client import Answer

Ids = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Share:
    """One request: the tokens of its prompt, those reusable, those that are said to be reused."""

    answer: Answer
    prompt: int
    reusable: int
    reused: int

    @property
    def lost(self) -> int:
        """Reusable tokens that were computed again."""
        seen = self.answer.forwarded
        spared = self.prompt if seen is None else max(0, self.prompt - seen)
        return self.reusable - min(self.reused, spared, self.reusable)

    @property
    def told_wrong(self) -> bool:
        """Whether the model saw another number of the prompt's tokens than the server says."""
        seen = self.answer.forwarded
        return seen is not None and seen != self.prompt - self.reused


def common_prefix(left: Ids, right: Ids) -> int:
    """How many tokens two prompts have in common from their start."""
    size = min(left.size, right.size)
    differ = np.flatnonzero(left[:size] != right[:size])
    return int(differ[0]) if differ.size else int(size)


def shares(answers: Sequence[Answer], prompts: Mapping[str, Ids]) -> list[Share]:
    """Of each answer; ``prompts`` are the tokens of every request by its name."""
    found = []
    for answer in answers:
        ids = prompts[answer.name]
        before = [prompts[one.name] for one in answers if one.ended <= answer.began]
        longest = max((common_prefix(ids, other) for other in before), default=0)
        reusable = min(longest, ids.size - 1)
        reused = answer.cached if answer.cached is not None else ids.size - _computed(answer, ids)
        found.append(Share(answer, int(ids.size), reusable, reused))
    return found


def _computed(answer: Answer, ids: Ids) -> int:
    return ids.size if answer.forwarded is None else min(int(ids.size), answer.forwarded)


def total_share(found: Sequence[Share]) -> float:
    """Reused of all that was reusable."""
    reusable = sum(one.reusable for one in found)
    return 1.0 - sum(one.lost for one in found) / reusable if reusable else 1.0
