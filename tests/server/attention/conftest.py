"""A connection to each lane of the module's server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunningServer
from tests.server.attention.asking import Asking
from tests.server.memory.lane import Lane
from tests.server.wire import Wire


@pytest.fixture
def lane(shared: RunningServer) -> Iterator[Lane]:
    """A connection to the shared server's binary lane."""
    with Lane.tcp(shared.port + 1) as connection:
        yield connection


@pytest.fixture
def ask(wire: Wire, lane: Lane, ns: str) -> Asking:
    """Both lanes, on a session nobody else uses."""
    return Asking(wire, lane, ns)
