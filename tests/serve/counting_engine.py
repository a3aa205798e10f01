"""The mlx-lm engine, and a count of the tokens that its model really saw.

``--counter FILE``: 8 bytes, little-endian, renewed at every forward call.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from pion_vllm_mlx.serve import engine_mlx_lm
from tests.counted import as_ours

server: Any = importlib.import_module("mlx_lm.server")


SEEN = "tests.serve.seen"
"""The event of a forward call: what counts is nothing that the model's function holds."""


def count(counter: Path) -> None:
    """Has the tokens of all forward calls counted in a file."""
    seen = 0

    def heard(event: str, told: tuple[Any, ...]) -> None:
        nonlocal seen
        if event == SEEN:
            seen += told[0]
            counter.write_bytes(seen.to_bytes(8, "little"))

    counter.write_bytes(bytes(8))
    sys.addaudithook(heard)


def counted(load: Any) -> Any:
    """``load``, whose models tell what they see."""

    @functools.wraps(load)
    def loading(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        kind = type(found[0])
        original = kind.__call__
        if "counts" in vars(original):
            return found

        def call(self: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            sys.audit(SEEN, inputs.size)
            return original(self, inputs, *more, **named)

        kind.__call__ = as_ours(call)
        return found

    return loading


if __name__ == "__main__":
    words = sys.argv[1:]
    at = words.index("--counter")
    count(Path(words[at + 1]))
    server.load = counted(server.load)
    code = engine_mlx_lm.main([*words[:at], *words[at + 2 :]])
    sys.stderr.flush()
    os._exit(code)  # as the engine itself does
