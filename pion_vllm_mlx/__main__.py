"""``python -m pion_vllm_mlx`` is the same as the console command ``pion-vllm-mlx``."""

from __future__ import annotations

import sys

from pion_vllm_mlx.cli import main

if __name__ == "__main__":
    sys.exit(main())
