"""Tests against the real vllm-mlx: offline, quiet, and stock again behind each.

Modules that need it skip themselves where it cannot be imported; ``make test-vllm-mlx`` makes
an environment that has it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

HAS_VLLM_MLX = importlib.util.find_spec("vllm_mlx") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The warnings of vllm-mlx and what it imports are not ours to make fatal."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """vllm-mlx stays offline and does not log a line a step."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    logging.getLogger("vllm_mlx").setLevel(logging.ERROR)
    yield


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """Whatever a test does, vllm-mlx is stock again behind it."""
    yield
    if HAS_VLLM_MLX:
        from pion_vllm_mlx.cache.vllm_mlx_backend import uninstall_vllm_mlx_backend

        uninstall_vllm_mlx_backend()
