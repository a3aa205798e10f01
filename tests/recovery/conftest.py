"""A data folder where flushing costs nothing: a killed process needs no flush; a low limit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from pion_vllm_mlx.server.store import compaction
from pion_vllm_mlx.server.store import state as store_state

_MEMORY = Path("/dev/shm")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty data folder, in memory where the system has such a place."""
    if not os.access(_MEMORY, os.W_OK):
        path = tmp_path / "data"
        path.mkdir(mode=0o700)
        yield path
        return
    with tempfile.TemporaryDirectory(dir=_MEMORY, prefix="pion-test-") as name:
        path = Path(name) / "data"
        path.mkdir(mode=0o700)
        yield path


#: so many short runs stay as they are under ``fewer_runs``.
MOST_RUNS = 48


@pytest.fixture
def fewer_runs() -> Iterator[None]:
    """The limit of short runs in a row, low enough to be passed in no time."""
    with (
        mock.patch.object(compaction, "MANY_RUNS", MOST_RUNS),
        mock.patch.object(store_state, "MANY_RUNS", MOST_RUNS),
    ):
        yield
