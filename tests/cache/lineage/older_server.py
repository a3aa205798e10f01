"""A server without two of our extensions: what it would say, its clients find out themselves."""

from __future__ import annotations

import importlib
import sys

from pion_vllm_mlx import cli
from pion_vllm_mlx.server.command import TABLE

LACKING = (b"KV.PREFIX.LONGEST", b"KV.PREFIX.EXPLAIN")

if __name__ == "__main__":
    importlib.import_module("pion_vllm_mlx.server.commands")  # fills the table
    for name in LACKING:
        del TABLE[name]
    sys.exit(cli.main(sys.argv[1:]))
