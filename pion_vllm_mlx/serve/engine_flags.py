"""Has an engine's command line looked at before it is needed, without loading a model.

``python -m pion_vllm_mlx.serve.engine_flags MODULE flags…`` ends with the code and the words
that the engine would end with for wrong flags, and with 0 where it would go on, or is none of
ours.  It imports what the engine does: a process of its own spares the front that.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from pion_vllm_mlx.serve.engine_child import WRONG_USE, take_link
from pion_vllm_mlx.serve.pion_flags import take_pion_flags


def refuse_wrong_values(cli: dict[str, Any]) -> None:
    """Exits with code 2 and a sentence for values of mlx-lm's flags that it takes itself."""
    if cli["prefill_step_size"] < 1:  # a prompt would never get anywhere
        print("error: --prefill-step-size must be at least 1", file=sys.stderr)
        raise SystemExit(WRONG_USE)


def _mlx_lm(words: list[str]) -> None:
    """mlx-lm's own ``main`` parses them, with nothing behind it."""
    _, rest = take_link(words)
    _, rest = take_pion_flags(rest)
    server: Any = importlib.import_module("mlx_lm.server")

    def run(host: str, port: int, cli: Any, **unused: Any) -> None:
        refuse_wrong_values(vars(cli))

    server.ModelProvider, server.run = _itself, run
    sys.argv = ["mlx_lm.server", *rest]
    server.main()


def _itself(parsed: Any) -> Any:
    """In the place of what loads a model for parsed flags."""
    return parsed


def _vllm_mlx(words: list[str]) -> None:
    from pion_vllm_mlx.serve.engine_vllm_mlx import parse

    parse(words)


_CHECKS: dict[str, Callable[[list[str]], None]] = {
    "pion_vllm_mlx.serve.engine_mlx_lm": _mlx_lm,
    "pion_vllm_mlx.serve.engine_vllm_mlx": _vllm_mlx,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Exits as the engine would; the exit code where it would go on."""
    module, *words = sys.argv[1:] if arguments is None else arguments
    check = _CHECKS.get(module)
    if check is not None:
        check(words)
    return 0


if __name__ == "__main__":
    sys.exit(main())
