"""How long the part at the end of a prompt is that the next prompt will not have.

Agents end their newest message in a line with the time, a reminder or a list of open files, and
leave it out of the history. Every restore point near such an end is then of no use to the next
turn. What the last turn had to give up is what this one will: a guard is taken before that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import common_tokens

MOST_PROMPTS = 16
#: more is an edited message, and says nothing about the next turn.
MOST_ENDING_TOKENS = 1_024
#: prompts that share less are no turns of one conversation.
LEAST_SHARED_TOKENS = 256
#: by so much the endings of two turns may differ: a time has a digit more.
VARIATION_TOKENS = 16


@dataclass(frozen=True)
class Ending:
    """So many tokens, 0 for none; ``sure`` if two turns agree: else it may be a new chat's."""

    tokens: int = 0
    sure: bool = False


class Endings:
    """The latest prompts of one model, each with the ending that was seen there. One thread."""

    def __init__(self) -> None:
        self._prompts: deque[tuple[TokenIds, int]] = deque(maxlen=MOST_PROMPTS)

    def expected(self, tokens: TokenIds, common_stored: int = 0, stored: int = 0) -> Ending:
        """The ending of a prompt: what the nearest one before has that this one has not.

        None where that says nothing. After an edit, which is more than an ending, the one that
        was seen before. ``stored`` is the length of the nearest prompt that is stored: this
        process may have served none yet. The prompt is remembered.
        """
        shared, size, before = common_stored, max(common_stored, stored), 0
        nearer = common_stored - 1
        for prompt, ending in reversed(self._prompts):
            common = common_tokens(prompt, tokens)
            if common > nearer:
                nearer = shared = common
                size, before = int(prompt.size), ending
        seen = size - shared
        sure = bool(seen) and abs(seen - before) <= VARIATION_TOKENS
        if shared < LEAST_SHARED_TOKENS:
            seen, sure = 0, False
        elif seen > MOST_ENDING_TOKENS:  # an edit: the conversation goes on as it did
            seen, sure = before, False
        self._prompts.append((tokens, seen))
        return Ending(seen, sure)
