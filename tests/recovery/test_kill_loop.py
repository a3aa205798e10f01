"""SIGKILL again and again under mixed load: nothing acknowledged is lost, no byte is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from pion_vllm_mlx.server.store.recovery import Paths, Recovery
from tests.recovery.kill_loop import KillLoop, Plan, Tally, kill_loop
from tests.recovery.material import open_sealed_files
from tests.server.wire import Wire


def _open_sealed(loop: KillLoop, tally: Tally) -> None:
    """Open every sealed segment with safetensors' own reader."""
    for worker in range(max(1, loop.plan.workers)):
        found = Recovery(Paths(loop.victim.folder, worker), True, False).run()
        assert not found.damaged
        segments = found.folder.segments.values()
        tally.sealed += open_sealed_files(segments)
        tally.shared += sum(segment.sealed and len(segment.groups()) > 1 for segment in segments)


def _run(folder: Path, plan: Plan) -> Tally:
    with kill_loop(folder, plan) as loop:
        tally = loop.run()
        loop.victim.kill_everything()
        _open_sealed(loop, tally)
        loop.start_again()
        for worker in range(max(1, plan.workers)):
            with Wire.tcp(loop.victim.port_of(worker)) as wire:
                wire.ok("KV.PREFIX.SAVE")
                wire.ok("SAVE")
        loop.victim.stop()
        _open_sealed(loop, tally)
        loop.start_again()
        loop.victim.kill_everything()
    print(f"\n{tally.summary()}")
    return tally


@pytest.mark.timeout(1800)
def test_kills_under_mixed_load_lose_nothing_and_serve_nothing_wrong(
    folder: Path, kills: int
) -> None:
    kills = kills or 200
    tally = _run(folder, Plan(kills))

    assert tally.kills >= kills
    assert tally.writing >= kills // 2 and tally.uploading >= kills // 10
    assert tally.mapping_or_saving >= kills // 5
    assert tally.evicted and tally.expired and tally.hits and tally.sealed


@pytest.mark.timeout(1800)
def test_killed_workers_lose_nothing_and_serve_nothing_wrong(folder: Path, kills: int) -> None:
    kills = kills or 40
    tally = _run(folder, Plan(kills, workers=2))

    assert tally.kills >= kills and tally.launcher_kills
    assert tally.writing >= kills // 2 and tally.uploading >= kills // 20
    assert tally.mapping_or_saving >= kills // 8
    assert tally.evicted and tally.hits and tally.sealed
