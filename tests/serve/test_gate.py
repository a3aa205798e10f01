"""What a request's log line says."""

from __future__ import annotations

import pytest

from pion_vllm_mlx.serve.gate import _receipt_words


@pytest.mark.parametrize(("value", "shown"), [(-0.0, "0.0"), (-0.04, "0.0"), (-1.26, "-1.3")])
def test_nothing_saved_has_no_sign(value: float, shown: str) -> None:
    assert list(_receipt_words({"saved_ms": value})) == [f"saved_ms={shown}"]
