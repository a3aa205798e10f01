"""Has an engine's command line looked at before it is needed, without loading a model.

``python -m pion_vllm_mlx.serve.engine_flags MODULE flags…`` ends with the code and the words
that the engine would end with for wrong flags, and with 0 where it would go on, or is none of
ours.  It imports what the engine does: a process of its own spares the front that.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pion_vllm_mlx.serve.engine_child import WRONG_USE, take_link
from pion_vllm_mlx.serve.pion_flags import take_pion_flags
from pion_vllm_mlx.serve.sampling import LARGEST

#: The least and the largest value of mlx-lm's flags: it takes others, too, and then every request
#: waits for ever, or is refused for a setting that it does not have.
_RANGES: Mapping[str, tuple[float, float]] = {
    "prefill_step_size": (1, math.inf),
    "prompt_concurrency": (1, math.inf),
    "decode_concurrency": (1, math.inf),
    "max_tokens": (1, math.inf),
    "prompt_cache_size": (1, math.inf),
    "temp": (0, LARGEST),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (0, math.inf),
    "num_draft_tokens": (0, math.inf),
}
#: what MLX quantizes to; for any other every request would end the engine.
_KV_BITS, KV_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)


def refuse_wrong_values(cli: dict[str, Any]) -> None:
    """Exits with code 2 and a sentence for values of mlx-lm's flags that it takes itself."""
    wrong = _wrong_value(cli)
    if wrong is not None:
        print(f"error: {wrong}", file=sys.stderr)
        raise SystemExit(WRONG_USE)


def _wrong_value(cli: dict[str, Any]) -> str | None:
    for name, (least, largest) in _RANGES.items():
        if not least <= cli[name] <= largest:
            flag = f"--{name.replace('_', '-')}"
            most = f" and at most {largest:g}" if largest < LARGEST else ""
            return f"{flag} must be at least {least:g}{most}"
    if not isinstance(cli["chat_template_args"], dict):
        return "--chat-template-args must be a JSON object"
    if cli.get("kv_bits") is not None:
        for flag, known in (("--kv-bits", _KV_BITS), ("--kv-group-size", KV_GROUPS)):
            if cli[flag[2:].replace("-", "_")] not in known:
                return f"{flag} must be one of {', '.join(map(str, known))}"
    return None


def refuse_wrong_sizes(server: Any) -> None:
    """Has ``--prompt-cache-bytes`` of ``mlx_lm.server`` refused in words, not by a traceback."""
    read = server._parse_size

    def size(text: str) -> int:
        try:
            return int(read(text))
        except (ArithmeticError, KeyError, ValueError) as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no size, as 2GB is one") from error

    server._parse_size = size


def _mlx_lm(words: list[str]) -> None:
    """mlx-lm's own ``main`` parses them, with nothing behind it."""
    _, rest = take_link(words)
    _, rest = take_pion_flags(rest)
    server: Any = importlib.import_module("mlx_lm.server")

    def run(host: str, port: int, cli: Any, **unused: Any) -> None:
        refuse_wrong_values(vars(cli))

    refuse_wrong_sizes(server)
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
