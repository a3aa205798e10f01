"""Stores of one module on one server, closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pion_vllm_mlx.cache.lineage import LineageStore
from tests.cache.lineage.driving import open_store
from tests.conftest import RunningServer

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
