"""One front over the scripted engine a test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.front import Front, running_front


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front over ``scripted_engine``; its requests say what they want to hear."""
    with running_front(tmp_path_factory.mktemp("front")) as running:
        yield running
