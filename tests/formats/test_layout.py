"""Rows keep their content in parts, in the other layout, and in MLX's own reader."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import FORMATS, Format, get_format, transpose_rows

HEADS, HEAD_DIM, TOKENS = 4, 64, 11
WIDTH = HEADS * HEAD_DIM


def wire_rows(kind: Format, n: int = TOKENS) -> NDArray[np.uint8]:
    rng = np.random.default_rng(7)
    if kind.name.startswith("raw"):
        return rng.integers(0, 256, (n, kind.row_bytes(WIDTH)), np.uint8)
    return kind.encode(rng.standard_normal((n, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("name", [*FORMATS, "raw:40"])
def test_parts_joined_again_are_the_wire_rows(name: str) -> None:
    kind = get_format(name)
    wire = wire_rows(kind)
    parts = kind.split(wire)
    sizes = [part.bytes_per_row for part in kind.parts(WIDTH)] if name != "raw:40" else [40]
    assert [part.shape for part in parts] == [(TOKENS, size) for size in sizes]
    assert (kind.join(parts) == wire).all()


def test_one_part_is_not_copied() -> None:
    kind = get_format("bf16")
    wire = wire_rows(kind)
    (part,) = kind.split(wire)
    assert np.shares_memory(part, wire)
    assert kind.join([part]) is part


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "mlx4g32", "raw:40"])
def test_rows_come_back_from_the_other_layout(name: str) -> None:
    kind = get_format(name)
    wire = wire_rows(kind)
    head_major = transpose_rows(kind, wire, WIDTH, HEADS, to_head_major=True)
    assert head_major.shape == (HEADS, TOKENS, kind.per_head(HEADS).row_bytes(HEAD_DIM))
    assert head_major.flags.c_contiguous
    back = transpose_rows(kind, head_major, WIDTH, HEADS, to_head_major=False)
    assert back.flags.c_contiguous
    assert (back == wire).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "mlx4g32"])
@pytest.mark.parametrize(("n", "width"), [(0, WIDTH), (TOKENS, 0), (1, WIDTH)])
def test_an_empty_run_has_both_layouts(name: str, n: int, width: int) -> None:
    kind = get_format(name)
    wire = wire_rows(kind, n)[:, : kind.row_bytes(width)]
    head_major = transpose_rows(kind, wire, width, HEADS, to_head_major=True)
    assert head_major.shape[:2] == (HEADS, n)
    assert (transpose_rows(kind, head_major, width, HEADS, to_head_major=False) == wire).all()


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "mlx4g32"])
def test_a_head_major_row_is_a_wire_row_of_its_head(name: str) -> None:
    kind = get_format(name)
    wire = wire_rows(kind)
    head_major = transpose_rows(kind, wire, WIDTH, HEADS, to_head_major=True)
    values = kind.decode(wire).reshape(TOKENS, HEADS, HEAD_DIM).transpose(1, 0, 2)
    for head in range(HEADS):
        assert (kind.decode(head_major[head]) == values[head]).all()


@pytest.mark.parametrize(
    ("name", "width", "heads"),
    [("int8", 256, 4), ("mlx4g32", 128, 8), ("fp16", 100, 3), ("fp16", 64, 0), ("raw:10", 8, 4)],
)
def test_a_row_that_cannot_be_cut_at_heads_has_one_layout(
    name: str, width: int, heads: int
) -> None:
    kind = get_format(name)
    assert not kind.head_major(width, heads)
    rows = np.zeros((2, kind.row_bytes(width)), np.uint8)
    with pytest.raises(CommandError, match="HND"):
        transpose_rows(kind, rows, width, heads, to_head_major=True)


def test_mlx_reads_the_parts_of_mlx4g32_to_the_same_values() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    kind = get_format("mlx4g32")
    wire = wire_rows(kind)
    codes, scales, biases = (np.ascontiguousarray(part) for part in kind.split(wire))
    s, b = mx.array(scales.view(np.float16)), mx.array(biases.view(np.float16))
    w = mx.array(codes.view(np.uint32))
    ours = kind.decode(wire)
    f32 = mx.dequantize(w, s.astype(mx.float32), b.astype(mx.float32), group_size=32, bits=4)
    assert np.abs(np.array(f32) - ours).max() <= 1e-6
    f16 = np.array(mx.dequantize(w, s, b, group_size=32, bits=4)).astype(np.float32)
    assert np.abs(f16 - ours).max() <= 4e-3


def test_mlx_and_bf16_agree_on_every_rounding() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    rows = np.random.default_rng(8).standard_normal((32, 256)).astype(np.float32)
    theirs = np.array(mx.array(rows).astype(mx.bfloat16).view(mx.uint16))
    assert (get_format("bf16").encode(rows).view(np.uint16) == theirs).all()
