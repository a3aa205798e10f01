"""One server for a module's tests of the prompt cache, and no prefix left in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunningServer, running_server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A running server that a module's tests share, each under namespaces of its own."""
    with running_server(tmp_path_factory.mktemp("store") / "data") as server:
        yield server
