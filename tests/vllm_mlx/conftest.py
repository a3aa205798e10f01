"""What is needed to test against the real vllm-mlx: it, and it being told to stay offline."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

REASON = "vllm-mlx is not installed here: make test-vllm-mlx makes an environment with it"
HAS_VLLM_MLX = importlib.util.find_spec("vllm_mlx") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what lies in this folder where vllm-mlx is missing; its warnings are not ours."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        if not HAS_VLLM_MLX:
            item.add_marker(pytest.mark.skip(reason=REASON))


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
