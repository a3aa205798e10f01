"""An engine whose model says ``$PION_TEST_SAYS``: a tiny random model calls no tools.

All is the engine's own, its batches, sampling and parsers, but that each row of logits leaves one
token: the next one of that text behind the last header of an assistant's message.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from typing import Any

import mlx.core as mx
from transformers import PreTrainedTokenizerFast

HEADER = "<|im_start|>assistant\n"


def saying(words: list[int], header: list[int], tokens: Any, logits: mx.array) -> mx.array:
    """A logits processor that leaves the next of ``words``; it sees prompt and reply."""
    seen = [int(token) for token in tokens]
    ends = range(len(seen), len(header) - 1, -1)
    begins = next(end for end in ends if seen[end - len(header) : end] == header)
    forced = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
    forced[..., words[min(len(seen) - begins, len(words) - 1)]] = 0
    return forced


def steer(folder: str, text: str) -> None:
    """Has every request of a batch say ``text``, in the tokens of the model in ``folder``."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    words, header = (tokenizer.encode(one) for one in (f"{text}<|endoftext|>", HEADER))
    original: Any = importlib.import_module("mlx_lm.generate").BatchGenerator
    forced = functools.partial(saying, words, header)
    insert = original.insert_segments
    signature = inspect.signature(insert)

    @functools.wraps(insert)
    def steered(*args: Any, **options: Any) -> Any:
        given = signature.bind(*args, **options)
        own = given.arguments.get("logits_processors") or [[] for _ in given.arguments["segments"]]
        given.arguments["logits_processors"] = [[*(those or ()), forced] for those in own]
        return insert(*given.args, **given.kwargs)

    original.insert_segments = steered


if __name__ == "__main__":
    steer(os.environ["PION_TEST_MODEL"], os.environ["PION_TEST_SAYS"])
    engine: Any = importlib.import_module(os.environ["PION_TEST_ENGINE"])
    code = engine.main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # as the engines themselves do
