"""What a store counts of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

from pion_vllm_mlx.server.store.findings import Finding


@dataclass
class Counters:
    """What happened since the start."""

    damaged: int = 0
    fetches: int = 0
    bytes_stored: int = 0
    bytes_copied: int = 0
    bytes_shared: int = 0


@dataclass
class Replayed:
    """How the last start went."""

    vstore: int = 0
    ssm: int = 0
    notes: list[Finding] = field(default_factory=list)
