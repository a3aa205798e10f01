"""Whether the demo's processes will multiply matrices fast, and how to make them."""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from pion_vllm_mlx import config

ADVICE = (
    "MLX multiplies with a slow library here, so the demo is shortened. With OpenBLAS it is\n"
    "about ten times as fast: apt-get install libopenblas0-pthread"
)


@dataclass(frozen=True)
class MatrixLibrary:
    """``fast``: worth a full demo. ``environment``: what a process needs to get it."""

    fast: bool
    environment: dict[str, str]


def matrix_library() -> MatrixLibrary:
    """On a Mac MLX uses Metal; on Linux its CPU wheel is slow without a preloaded BLAS."""
    inherited = config.child_environment({})
    if sys.platform == "darwin" or "blas" in config.preloaded_libraries():
        return MatrixLibrary(True, inherited)
    installed = debian_openblas()
    if installed is None:
        return MatrixLibrary(False, inherited)
    return MatrixLibrary(True, config.child_environment({"LD_PRELOAD": str(installed)}))


def debian_openblas() -> Path | None:
    """Where Debian and Ubuntu put the threaded OpenBLAS, if it is there."""
    folder = Path(f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread")
    library = folder / "libopenblas.so.0"
    return library if library.exists() else None
