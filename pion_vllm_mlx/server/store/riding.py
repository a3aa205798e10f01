"""Which rows and states ride in the log, in their record, and are not written to a segment."""

from __future__ import annotations

from pion_vllm_mlx.server.store.config import StoreConfig
from pion_vllm_mlx.server.store.shapes import SPACED_BYTES

#: of a session's rows, and of the states of a sid, so much: little needs no file, nor a flush of
#: one. Rows are written once more when they are sealed, and states at each save; all others go
#: to their segment, once.
INLINE_BYTES = 4 << 10
#: where every store is flushed before its answer, what is shorter: one file is then, and not two.
FLUSHED_INLINE_BYTES = SPACED_BYTES


def rides_in_log(config: StoreConfig, nbytes: int, others: int) -> bool:
    """Whether ``nbytes`` do that come to ``others`` runs or states, taken to be as long."""
    if not config.wal:
        return False
    if config.appendfsync == "always":
        return nbytes < FLUSHED_INLINE_BYTES
    return nbytes * (1 + others) < INLINE_BYTES
