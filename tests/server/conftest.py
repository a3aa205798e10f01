"""One server for all tests of a module; each test takes a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.conftest import RunningServer, running_server
from tests.server.wire import Wire

_names = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server that the tests of one module share; none of them may stop it."""
    with running_server(tmp_path_factory.mktemp("shared") / "data") as server:
        yield server


@pytest.fixture
def wire(shared: RunningServer) -> Iterator[Wire]:
    """A connection to the shared server."""
    with Wire.tcp(shared.port) as connection:
        yield connection


@pytest.fixture
def ns() -> str:
    """A namespace nobody else uses."""
    return f"ns{next(_names)}"
