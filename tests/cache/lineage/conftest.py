"""Stores of one module on one server, closed at the end; and a server of a test alone."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.cache.lineage import LineageStore
from tests.cache.lineage.driving import open_store
from tests.conftest import RunningServer, running_server

Opener = Callable[..., LineageStore]


@pytest.fixture
def opened(store: RunningServer) -> Iterator[Opener]:
    """Opens lineage stores on the module's server, and closes them."""
    stores: list[LineageStore] = []

    def open_one(model: Any, **options: Any) -> LineageStore:
        stores.append(open_store(model, store, **options))
        return stores[-1]

    yield open_one
    for one in stores:
        one.close()


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RunningServer]:
    """A server of this test alone, which may be frozen at its end."""
    with running_server(tmp_path / "data") as server:
        yield server
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.pid, signal.SIGCONT)
