"""Kernels by name, and random values whose seed a failure shows."""

from __future__ import annotations

import os

import numpy as np
import pytest


@pytest.fixture
def rng() -> np.random.Generator:
    """A generator of other values every run; a failing test prints how to have them again."""
    seed = int.from_bytes(os.urandom(4), "little")
    print(f"np.random.default_rng({seed})")
    return np.random.default_rng(seed)
