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

server: Any = importlib.import_module("mlx_lm.server")


def counted(load: Any, counter: Path) -> Any:
    """``load``, whose models count."""
    seen = 0

    @functools.wraps(load)
    def loading(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        kind = type(found[0])
        original = kind.__call__
        if "counts" in vars(original):
            return found

        def call(self: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            nonlocal seen
            seen += inputs.size
            counter.write_bytes(seen.to_bytes(8, "little"))
            return original(self, inputs, *more, **named)

        call.counts = True  # type: ignore[attr-defined]
        kind.__call__ = call
        return found

    return loading


if __name__ == "__main__":
    words = sys.argv[1:]
    at = words.index("--counter")
    counter = Path(words[at + 1])
    counter.write_bytes(bytes(8))
    server.load = counted(server.load, counter)
    code = engine_mlx_lm.main([*words[:at], *words[at + 2 :]])
    sys.stderr.flush()
    os._exit(code)  # as the engine itself does
