"""A data folder where flushing costs nothing: a killed process needs no flush."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
