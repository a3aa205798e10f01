"""Runs a server whose model counts what goes through it: ``--as SERVER --counter FILE --kind K``.

Everything else is the server's own command line.  The counter is 16 bytes, renewed at every
forward call: the tokens of calls with several a sequence (prefill, padding included), and those
of calls with one a sequence (decode, and the last token of a prompt), little-endian.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import mmap
import os
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

_LAYOUT = struct.Struct("<QQ")


def read_counter(path: Path) -> tuple[int, int]:
    """Tokens of prefill and of single steps so far; none before the server has begun."""
    held = path.read_bytes() if path.exists() else b""
    prefill, single = _LAYOUT.unpack(held) if len(held) == _LAYOUT.size else (0, 0)
    return prefill, single


def count_calls(kind: str, counter: Path) -> None:
    """Have every model of mlx-lm's module ``kind`` count from now on."""
    model: Any = importlib.import_module(f"mlx_lm.models.{kind}").Model
    original = model.__call__
    counter.write_bytes(_LAYOUT.pack(0, 0))
    with counter.open("r+b") as file:
        held = mmap.mmap(file.fileno(), _LAYOUT.size)

    @functools.wraps(original)
    def call(self: Any, inputs: Any, *more: Any, **named: Any) -> Any:
        prefill, single = _LAYOUT.unpack_from(held)
        several = inputs.shape[-1] > 1
        prefill, single = prefill + inputs.size * several, single + inputs.size * (not several)
        _LAYOUT.pack_into(held, 0, prefill, single)
        return original(self, inputs, *more, **named)

    # in a model's key a function of the product counts as its ``original``
    space = {**call.__globals__, "__name__": "pion_vllm_mlx.counting"}
    model.__call__ = FunctionType(call.__code__, space, "__call__", None, call.__closure__)


def _engine(name: str) -> Callable[[list[str]], int]:
    def run(words: list[str]) -> int:
        module: Any = importlib.import_module(f"pion_vllm_mlx.serve.{name}")
        code: int = module.main(words)
        return code

    return run


def _stock_mlx_lm(words: list[str]) -> int:
    sys.argv = ["mlx_lm.server", *words]
    importlib.import_module("mlx_lm.server").main()
    return 0


def _stock_vllm_mlx(words: list[str]) -> int:
    sys.argv = ["vllm-mlx", "serve", *words]
    importlib.import_module("vllm_mlx.cli").main()
    return 0


SERVERS = {
    "engine-mlx-lm": _engine("engine_mlx_lm"),
    "engine-vllm-mlx": _engine("engine_vllm_mlx"),
    "stock-mlx-lm": _stock_mlx_lm,
    "stock-vllm-mlx": _stock_vllm_mlx,
}


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; the exit code."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--as", dest="server", choices=tuple(SERVERS), required=True)
    parser.add_argument("--counter", type=Path, required=True)
    parser.add_argument("--kind", required=True)
    known, rest = parser.parse_known_args(list(arguments))
    count_calls(known.kind, known.counter)
    return SERVERS[known.server](rest)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # MLX's streams end with their thread, and would abort the process here
