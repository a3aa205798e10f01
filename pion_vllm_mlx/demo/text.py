"""The text that the demo's processes share, and the questions they ask about it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

# In the order in which the text answers them: a short prefix holds the first answers.
QUESTIONS = (
    "How high is the lighthouse at Sennick?",
    "What rhythm does the lamp of the lighthouse show?",
    "How many basins does the harbour have?",
    "When is the gate of the inner basin opened?",
    "By how much does the sea rise and fall at spring tide?",
    "Who writes the times of high water on the slate?",
    "Why is the pilot cutter painted orange?",
    "What does a helmsman do when the two green lights are not in line?",
    "Why does a dredger come each April?",
    "How does the sale in the fish market run?",
)


def prefix_text() -> str:
    """The text: about 2,200 words on how a small harbour works."""
    file = resources.files(__package__ or "pion_vllm_mlx.demo") / "harbour.txt"
    return file.read_text(encoding="utf-8")


def prefix_ids(encode: Callable[[str], list[int]], num_tokens: int) -> list[int]:
    """The first ``num_tokens`` token ids of the text, begun again as often as that needs.

    ``encode`` puts the model's first token, if it has one, before the ids of a text.
    """
    text = prefix_text()
    ids = encode(text)
    while len(ids) < num_tokens:
        # Growing by doubling keeps the number of encodings small at any length.
        text = f"{text}\n{text}"
        ids = encode(text)
    return ids[:num_tokens]


def question_text(question: str) -> str:
    """How a question follows the prefix."""
    return f"\n\nQuestion: {question}\nAnswer:"
