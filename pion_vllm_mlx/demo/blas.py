"""Whether the demo's processes will multiply matrices fast, and how to make them."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from pion_vllm_mlx import config

ADVICE = (
    "MLX multiplies with a slow library here. With OpenBLAS the demo is about ten times as fast:\n"
    "apt-get install libopenblas0-pthread"
)


@dataclass(frozen=True)
class MatrixLibrary:
    """``fast``: worth a full demo. ``environment``: what a process needs to get it."""

    fast: bool
    environment: dict[str, str]


def matrix_library(root: Path = Path("/")) -> MatrixLibrary:
    """On a Mac MLX uses Metal; on Linux its CPU wheel is slow without a preloaded BLAS.

    ``root`` is where the system's files are looked for.
    """
    inherited = config.module_environment()
    if sys.platform == "darwin" or "blas" in config.preloaded_libraries():
        return MatrixLibrary(True, inherited)
    installed = debian_openblas(root)
    if installed is None:
        return MatrixLibrary(False, inherited)
    return MatrixLibrary(True, config.module_environment(LD_PRELOAD=str(installed)))


def debian_openblas(root: Path) -> Path | None:
    """Where Debian and Ubuntu put the threaded OpenBLAS, if it is there."""
    folder = root / f"usr/lib/{platform.machine()}-linux-gnu/openblas-pthread"
    library = folder / "libopenblas.so.0"
    return library if library.exists() else None
