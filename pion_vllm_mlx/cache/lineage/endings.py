"""How long the part at the end of a prompt is that the next prompt will not have.

Agents end their newest message in a line with the time, a reminder or a list of open files, and
leave it out of the history. Every restore point near such an end is then of no use to the next
turn. What the last turn had to give up is what this one will: the guard is taken before that.
"""

from __future__ import annotations

from collections import deque

from pion_vllm_mlx.cache.completion import TokenIds
from pion_vllm_mlx.cache.lineage.blocks import common_tokens

MOST_PROMPTS = 16
#: more is an edited message, and says nothing about the next turn.
MOST_ENDING_TOKENS = 1_024
#: prompts that share less are no turns of one conversation.
LEAST_SHARED_TOKENS = 256


class Endings:
    """The latest prompts of one model. For one thread."""

    def __init__(self) -> None:
        self._prompts: deque[TokenIds] = deque(maxlen=MOST_PROMPTS)

    def ending(self, tokens: TokenIds, common_stored: int = 0, stored: int = 0) -> int:
        """How many tokens at the end of the nearest prompt before are not in this one.

        0 where that says nothing: there is none, or it is more than an ending. ``stored`` is
        the length of the nearest one that is stored: this process may have served none yet.
        The prompt is remembered.
        """
        shared, size = common_stored, max(common_stored, stored)
        nearer = common_stored - 1
        for prompt in reversed(self._prompts):
            common = common_tokens(prompt, tokens)
            if common > nearer:
                nearer = shared = common
                size = int(prompt.size)
        self._prompts.append(tokens)
        ending = size - shared
        plain = shared >= LEAST_SHARED_TOKENS and ending <= MOST_ENDING_TOKENS
        return ending if plain else 0
