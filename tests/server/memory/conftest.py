"""A server of its own for the memory stores' tests, and a client of its binary lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RunningServer
from tests.server.memory.lane import Lane


@pytest.fixture
def lane(shared: RunningServer) -> Iterator[Lane]:
    """A connection to the shared server's binary lane."""
    with Lane.tcp(shared.port + 1) as connection:
        yield connection
