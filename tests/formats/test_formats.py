"""Storage formats: documented bytes, exactness where promised, bounded errors elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError, ConfigError
from pion_vllm_mlx.formats import FORMATS, f16_to, get_format, resolve, to_f16

Floats = NDArray[np.float32]
QUANTIZED = ["int8", "mlx4g32"]
ALL = list(FORMATS)
WORST = np.float32([3.4028235e38, -3.4028235e38, 1e-45, 0, -0.0, 1.17e-38])


def gaussian(n: int = 64, width: int = 1024, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((n, width)) * 0.6).astype(np.float32)


def mean_error(name: str, rows: Floats) -> float:
    kind = get_format(name)
    return float(np.abs(kind.decode(kind.encode(rows)) - rows).mean())


def cosine(a: Floats, b: Floats) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


@pytest.mark.parametrize(
    ("name", "row", "wire"),
    [
        ("fp16", [1, -2, 0.5, 0], "003c 00c0 0038 0000"),
        ("bf16", [1, -2, 0.5, 0], "803f 00c0 003f 0000"),
        ("fp32", [1, -2, 0.5, 0], "0000803f 000000c0 0000003f 00000000"),
        ("int8", [1, -2, 0.5, 0], "000000c0 0000803f ff00d4aa"),
        ("mlx4g32", np.linspace(-1, 1, 32), "00112233445566778899aabbccddeeff 4430 00bc"),
    ],
)
def test_a_row_has_the_documented_bytes(name: str, row: list[float], wire: str) -> None:
    rows = np.asarray([row], np.float32)
    kind = get_format(name)
    assert kind.encode(rows).tobytes() == bytes.fromhex(wire)
    assert kind.row_bytes(rows.shape[1]) == len(bytes.fromhex(wire))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fp16", (256, 1024, 2048)),
        ("bf16", (256, 1024, 2048)),
        ("fp32", (512, 2048, 4096)),
        ("int8", (136, 520, 1032)),
        ("mlx4g32", (80, 320, 640)),
        ("raw:77", (77, 77, 77)),
    ],
)
def test_a_row_has_the_documented_size(name: str, sizes: tuple[int, ...]) -> None:
    kind = get_format(name)
    assert tuple(kind.row_bytes(width) for width in (128, 512, 1024)) == sizes
    assert kind.row_bytes(0) == 0
    for width in (128, 512):
        parts = kind.parts(width)
        assert sum(part.bytes_per_row for part in parts) == kind.row_bytes(width)
        item = {"F16": 2, "BF16": 2, "F32": 4, "U8": 1, "U32": 4}
        assert all(p.bytes_per_row == item[p.dtype] * p.items_per_row for p in parts)


def test_fp16_is_the_cast_from_float32() -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (256, 512), np.uint32)
    rows = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = rows.astype(np.float16)
    assert (get_format("fp16").encode(rows) == expected.view(np.uint8)).all()


def test_every_f16_pattern_stays_as_it_is_in_an_fp16_layer() -> None:
    patterns = np.arange(65536, dtype=np.uint16).reshape(64, 1024).view(np.uint8)
    fp16 = get_format("fp16")
    assert f16_to(fp16, patterns) is patterns
    values = patterns.view(np.float16)
    again = fp16.encode(fp16.decode(patterns)).view(np.float16)
    number = ~np.isnan(values)
    assert (again.view(np.uint16)[number] == values.view(np.uint16)[number]).all()
    assert np.isnan(again[~number]).all()


def test_every_bf16_pattern_survives_its_float32_form() -> None:
    patterns = np.arange(65536, dtype=np.uint16).reshape(64, 1024)
    bf16 = get_format("bf16")
    stored = patterns.view(np.uint8)
    assert (bf16.encode(bf16.decode(stored)) == stored).all()


def test_bf16_rounds_half_to_even() -> None:
    bits = np.random.default_rng(2).integers(0, 2**32, 200_000, np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)].reshape(1, -1)
    got = get_format("bf16").encode(values).view(np.uint16)[0].astype(np.uint32)
    low = values.view(np.uint32)[0] & np.uint32(0xFFFF0000)
    cut, rest = low >> 16, values.view(np.uint32)[0] - low
    up = (rest > 0x8000) | ((rest == 0x8000) & (cut % 2 == 1))
    assert (got == cut + up).all()


def test_a_nan_stays_one_in_bf16() -> None:
    bits = np.uint32([[0x7F800001, 0xFFFFFFFF, 0x7FC00000, 0x7F80FFFF, 0x7FFFFFFF, 0xFF812345]])
    got = get_format("bf16").encode(bits.view(np.float32)).view(np.uint16)
    assert ((got & 0x7FFF) > 0x7F80).all()
    assert (got >> 15 == bits >> 31).all()
    assert got[0, -1] == 0xFF81


def test_fp32_keeps_every_bit() -> None:
    bits = np.random.default_rng(3).integers(0, 2**32, (16, 4096), np.uint32)
    fp32 = get_format("fp32")
    stored = fp32.encode(bits.view(np.float32))
    assert (stored.view(np.uint32) == bits).all()
    assert (fp32.decode(stored).view(np.uint32) == bits).all()


@pytest.mark.parametrize("name", ALL)
def test_a_row_depends_on_its_own_values_only(name: str) -> None:
    kind = get_format(name)
    rows = gaussian(200, 1024)
    rows[3], rows[7, :32] = 0.25, -0.0
    together = kind.encode(rows)
    order = np.random.default_rng(4).permutation(len(rows))
    assert (kind.encode(rows[order]) == together[order]).all()
    for i in (0, 3, 7, 199):
        assert (kind.encode(rows[i : i + 1]) == together[i]).all()
    assert (kind.decode(together)[order] == kind.decode(together[order])).all()


@pytest.mark.parametrize("name", ALL)
def test_no_rows_and_no_width_are_possible(name: str) -> None:
    kind = get_format(name)
    assert kind.encode(np.empty((0, 64), np.float32)).shape == (0, kind.row_bytes(64))
    assert kind.encode(np.empty((5, 0), np.float32)).shape == (5, 0)
    assert kind.decode(np.empty((0, kind.row_bytes(64)), np.uint8)).shape == (0, 64)
    assert kind.decode(np.empty((5, 0), np.uint8)).shape == (5, 0)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (70, 33), (99, 1023)])
def test_a_value_that_is_not_finite_is_refused(
    name: str, bad: float, place: tuple[int, int]
) -> None:
    rows = gaussian(100)
    rows[place] = bad
    with pytest.raises(CommandError, match="not finite"):
        get_format(name).encode(rows)


def test_an_overflowing_parameter_is_refused() -> None:
    rows = gaussian(2, 64)
    rows[1, 5] = -70_000
    with pytest.raises(CommandError, match="float16"):
        get_format("mlx4g32").encode(rows)
    rows[1, 5] = 1e6
    with pytest.raises(CommandError, match="float16"):
        get_format("mlx4g32").encode(rows)


def test_int8_returns_both_ends_of_a_row_exactly() -> None:
    rows = np.concatenate([gaussian(50), np.resize(WORST, (1, 1024))])
    int8 = get_format("int8")
    back = int8.decode(int8.encode(rows))
    assert (back.min(axis=1) == rows.min(axis=1)).all()
    assert (back.max(axis=1) == rows.max(axis=1)).all()
    assert np.isfinite(back).all()


def test_int8_returns_rows_of_zeros_and_ones_and_constant_rows_exactly() -> None:
    rows = np.random.default_rng(5).integers(0, 2, (40, 128)).astype(np.float32)
    rows[:3] = np.float32([[0.1], [-7e30], [1e-45]])
    int8 = get_format("int8")
    assert (int8.decode(int8.encode(rows)) == rows).all()


def test_int8_takes_the_nearest_code_also_where_the_span_overflows() -> None:
    rows = gaussian(40)
    rows[1] *= np.float32(5e38 / 6)
    rows[1, :2] = 3.4e38, -3.4e38
    wide = rows.astype(np.float64)
    low, high = wide.min(1, keepdims=True), wide.max(1, keepdims=True)
    exact = (wide - low) / (high - low) * 255
    codes = get_format("int8").encode(rows)[:, 8:]
    assert np.abs(codes - exact).max() < 0.501
    bound = (high - low) / 255 * 0.501
    assert (
        np.abs(get_format("int8").decode(get_format("int8").encode(rows)) - wide) <= bound
    ).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_sign_of_a_zero_does_not_reach_the_stored_parameters(name: str) -> None:
    kind = get_format(name)
    zeros = np.zeros((1, 64), np.float32)
    assert (kind.encode(-zeros) == kind.encode(zeros)).all()


@pytest.mark.parametrize("offset", [0, 100])
def test_mlx4g32_follows_its_definition_in_float64(offset: int) -> None:
    rows = gaussian(100, 256) / np.float32(1 + offset) + np.float32(offset)
    groups = rows.reshape(100, 8, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low) / np.float32(15)).astype(np.float16).astype(np.float64)
    bias = low.astype(np.float16).astype(np.float64)
    codes = np.clip(np.round((groups - bias) / scale), 0, 15)
    expected = (codes * scale + bias).reshape(100, 256)
    kind = get_format("mlx4g32")
    assert np.abs(kind.decode(kind.encode(rows)) - expected).max() < (1e-5 if offset else 1e-6)


def test_a_group_without_a_scale_gives_its_smallest_value() -> None:
    rows = np.zeros((4, 64), np.float32)
    rows[0] = 0.1
    rows[3] = 2049  # beside the nearest float16, 2048
    rows[1, 40] = 1e-8
    rows[2, ::2] = -0.0
    kind = get_format("mlx4g32")
    wire = kind.encode(rows)
    codes, scales, _ = kind.split(wire)
    assert not codes.any()
    assert (np.ascontiguousarray(scales).view(np.float16) == 1).all()
    assert (kind.decode(wire)[0] == np.float32(np.float16(0.1))).all()
    assert not wire[2, -4:].any()


def test_errors_are_bounded_and_ordered() -> None:
    rows = gaussian()
    errors = [mean_error(name, rows) for name in ("fp32", "fp16", "bf16", "int8", "mlx4g32")]
    assert errors == sorted(errors)
    assert len(set(errors)) == 5
    assert errors[3] < 0.0045
    assert errors[4] < 0.042
    for name in ALL:
        kind = get_format(name)
        least = {"mlx4g32": 0.98, "turbo4": 0.95, "turbo3": 0.80, "turbo2": 0.70}
        assert cosine(kind.decode(kind.encode(rows)), rows) > least.get(name, 0.99)


def test_int8_is_within_its_bound_on_uniform_rows() -> None:
    rows = np.random.default_rng(6).uniform(-1, 1, (64, 512)).astype(np.float32)
    int8 = get_format("int8")
    assert np.abs(int8.decode(int8.encode(rows)) - rows).max() <= 0.05


@pytest.mark.parametrize("name", ALL)
def test_f16_rows_are_stored_as_their_float32_form_would_be(name: str) -> None:
    half = gaussian(10, 64).astype(np.float16)
    kind = get_format(name)
    stored = f16_to(kind, half.view(np.uint8))
    assert (stored == kind.encode(half.astype(np.float32))).all()
    exported = to_f16(kind, stored).view(np.float16)
    assert (exported == kind.decode(stored).astype(np.float16)).all()


def test_names_are_found_and_unknown_ones_refused() -> None:
    assert get_format("FP16").name == "fp16"
    assert get_format("raw:36").row_bytes(128) == 36
    for name in ("fp64", "", "raw", "raw:", "raw:-1", "raw:1e3", "raw:07", "raw:99999999999", "é"):
        with pytest.raises(CommandError, match="unknown format") as caught:
            get_format(name)
        assert isinstance(caught.value, ConfigError)


def test_a_blocked_format_falls_back_to_int8_where_blocks_do_not_fit() -> None:
    assert resolve("mlx4g32", 96).name == "mlx4g32"
    assert resolve("mlx4g32", 80).name == "int8"
    assert resolve("fp16", 3).name == "fp16"
    with pytest.raises(CommandError, match="multiple of 32"):
        get_format("mlx4g32").encode(gaussian(1, 80))


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32", "int8", "mlx4g32"])
def test_rows_of_an_impossible_size_are_refused(name: str) -> None:
    with pytest.raises(CommandError, match="no row has"):
        get_format(name).decode(np.zeros((2, 7), np.uint8))


def test_opaque_rows_are_never_converted() -> None:
    raw = get_format("raw:8")
    with pytest.raises(CommandError, match="opaque"):
        raw.encode(gaussian(1, 8))
    with pytest.raises(CommandError, match="opaque"):
        raw.decode(np.zeros((1, 8), np.uint8))
