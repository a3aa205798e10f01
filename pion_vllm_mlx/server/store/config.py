"""What a store is told when it is opened."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoreConfig:
    """Where a store lives and what limits it. Sizes in bytes, 0 = no limit."""

    folder: Path
    worker: int = 0
    workers: int = 1
    wal: bool = True
    wal_size: int = 64 << 20
    appendfsync: str = "everysec"
    max_sessions: int = 256
    disk_budget: int = 0
    share_equal: bool = True
    salvage: bool = False
    #: how large a disk budget the disk allows, by what is free there and by our own bytes
    disk_allows: Callable[[int, int], int] | None = None
