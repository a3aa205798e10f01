"""A worker process whose housekeeping is in a hurry; see ``hasty``."""

from __future__ import annotations

import sys

from pion_vllm_mlx.server import worker
from tests.recovery.hasty import hurry

if __name__ == "__main__":
    hurry()
    sys.exit(worker.main())
