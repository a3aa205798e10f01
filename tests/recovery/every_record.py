"""A small folder whose logs hold every kind of record, and all that its store knows."""

from __future__ import annotations

import struct
from pathlib import Path
from unittest import mock

from pion_vllm_mlx.server.store import framing, records, riding, shapes
from tests.recovery.broken import MAGICS, SSM_WAL, VSTORE_WAL
from tests.recovery.driving import Content, Driver, Options, Word
from tests.recovery.material import COMPLETION_LAYER, noise, register, rows, state

WIDTH = 8
#: from here on rows and states go to a segment.
LONG_BYTES = 100
HASHES = struct.pack("<QQ", 1, 2)
#: their operations.
KINDS = {
    VSTORE_WAL: {
        kind.op
        for kind in (
            records.Create,
            records.Rows,
            records.Drop,
            records.Truncate,
            records.Blocks,
            records.Pin,
            records.Expire,
            records.Seal,
        )
    },
    SSM_WAL: {records.StoreState.op, records.DropStates.op},
}


def dense(sid: str, start: int, count: int) -> tuple[Word, ...]:
    """Rows that are stored without room behind them."""
    blob = noise((sid, start, count), count * WIDTH * 2)
    return ("V.STOREBATCH", sid, 0, start, count, blob, "FMT", "STORED")


def fill(folder: Path) -> Content:
    """Rows and states in the logs and in segments, some of them cut off or dropped again.

    What lies in a segment is short here: these files are read thousands of times.
    """
    with (
        mock.patch.object(riding, "INLINE_BYTES", LONG_BYTES),
        mock.patch.object(shapes, "SPACED_BYTES", LONG_BYTES),
        Driver(folder) as driver,
    ):
        driver.ask(*register("n", 1, WIDTH))
        driver.ask("KV.PREFIX.REGISTER", "m", WIDTH, "fp16", "BLOCKS", 64, 2, HASHES)
        driver.ask(*rows("n_pk", 0, 0, 2, WIDTH))
        driver.ask(*dense("n_pv", 0, 2))
        driver.ask(*state("n", 0, 20))
        driver.ask(*state("n", 0, 20, salt=1))
        driver.ask(*state("n", 1, LONG_BYTES))
        driver.ask(*state("n", 2, 20))
        driver.ask("SSM.PREFIX.DROP", "n", 2)
        driver.ask(*state("m", 0, 20))
        driver.ask("SSM.PREFIX.DROP", "m")
        driver.ask(*state("n", COMPLETION_LAYER, 20))
        driver.ask("KV.PREFIX.EXPIRE", "n", 100_000)
        driver.ask("KV.PREFIX.PIN", "n")
        driver.ask("KV.PREFIX.MAP", "n")
        driver.ask(*rows("n_pk", 0, 2, LONG_BYTES // WIDTH, WIDTH))
        point = driver.ask("V.SNAPSHOT", "n_pk")
        driver.ask(*dense("n_pk", 20, 2))
        driver.ask("V.RESTORE", "n_pk", point)
        driver.ask("V.DROP", "m_pv")
        driver.ask("KV.PREFIX.PIN", "m")
        whole = everything(driver)
    for log, kinds in KINDS.items():
        assert operations(folder / log) == kinds
    return whole


def operations(log: Path) -> set[int]:
    found = framing.scan(memoryview(log.read_bytes()), MAGICS[log.name], log.name)
    return {frame.op for frame in found.frames}


def everything(driver: Driver) -> Content:
    """What a store holds, and what it knows about its sessions beside their rows."""
    found = driver.content()
    for sid, session in driver.store.state.sessions.items():
        blocks = session.blocks and bytes(session.blocks.blob)
        found["kept", sid, -1] = (session.pinned, session.deadline_ms, blocks)
    return found


def everything_of(folder: Path, options: Options | None = None) -> Content:
    with Driver(folder, options) as driver:
        return everything(driver)
