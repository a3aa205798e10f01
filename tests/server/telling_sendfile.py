"""A server that prints a line for every file range that it hands to ``os.sendfile``."""

from __future__ import annotations

import os
import sys

from pion_vllm_mlx import cli

LINE = "sendfile sent "


def tell() -> None:
    """Say from now on how many bytes each call has sent."""
    real = os.sendfile

    def sendfile(to: int, file: int, offset: int, count: int) -> int:
        sent = real(to, file, offset, count)
        print(f"{LINE}{sent}", flush=True)
        return sent

    os.sendfile = sendfile


if __name__ == "__main__":
    tell()
    sys.exit(cli.main(sys.argv[1:]))
