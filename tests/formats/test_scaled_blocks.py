"""fp8, turbo and bf16_rope_fp8_body: documented bytes, and their definition in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.errors import CommandError, ConfigError
from pion_vllm_mlx.formats import BF16_ROPE_FP8_BODY, FORMATS, get_format, resolve

Floats = NDArray[np.float32]
TURBO = {"turbo4": (4, 7.0), "turbo3": (3, 3.0), "turbo2": (2, 1.5)}
BLOCKED = ["fp8", *TURBO]
ROPE = f"{BF16_ROPE_FP8_BODY}:64"


def gaussian(n: int = 64, width: int = 1024, seed: int = 0) -> Floats:
    return (np.random.default_rng(seed).standard_normal((n, width)) * 0.6).astype(np.float32)


def uniform(n: int = 64, width: int = 512) -> Floats:
    return np.random.default_rng(6).uniform(-1, 1, (n, width)).astype(np.float32)


def there_and_back(name: str, rows: Floats) -> Floats:
    kind = get_format(name)
    return kind.decode(kind.encode(rows))


def cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def one_block(*values: float) -> Floats:
    rows = np.zeros((1, 32), np.float32)
    rows[0, : len(values)] = values
    return rows


@pytest.mark.parametrize(
    ("name", "values", "wire"),
    [
        ("turbo4", (1, -1, 0.5, 0.25), "0000803f 9230 1fac8888888888888888888888888888"),
        ("turbo4", (2, -2, 1, 0.5), "00000040 9230 1fac8888888888888888888888888888"),
        # codes 7 1 6 5 4 4 4 4 of three bits: 0b_100_100_100_100_101_110_001_111
        ("turbo3", (1, -1, 0.5, 0.25), "0000803f 5535 8f4b92 244992 244992 244992"),
        # codes 3 0 2 2 and 2 for every zero
        ("turbo2", (1, -1, 0.5, 0.25), "0000803f 5539 a3aaaaaaaaaaaaaa"),
        # 448, -448, 224 and 112 in E4M3: 0x7e, 0xfe, 0x76, 0x6e
        ("fp8", (1, -1, 0.5, 0.25), "0000803f 003c 7efe766e" + "00" * 28),
    ],
)
def test_a_row_has_the_documented_bytes(name: str, values: tuple[float, ...], wire: str) -> None:
    assert get_format(name).encode(one_block(*values)).tobytes() == bytes.fromhex(wire)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("fp8", (140, 548, 1092)),
        ("turbo4", (76, 292, 580)),
        ("turbo3", (60, 228, 452)),
        ("turbo2", (44, 164, 324)),
    ],
)
def test_a_row_has_the_size_of_the_table(name: str, sizes: tuple[int, ...]) -> None:
    kind = get_format(name)
    for width, size in zip((128, 512, 1024), sizes, strict=True):
        assert kind.row_bytes(width) == size == kind.parts(width)[0].bytes_per_row
        assert kind.encode(gaussian(2, width)).shape == (2, size)
        assert kind.width_of(size) == width


def test_the_ratios_to_fp16_are_the_published_ones() -> None:
    ratios = {name: 1024 / get_format(name).row_bytes(512) for name in BLOCKED}
    expected = {"fp8": 1.87, "turbo4": 3.51, "turbo3": 4.49, "turbo2": 6.24}
    assert {name: round(ratio, 2) for name, ratio in ratios.items()} == expected


def bits_of(fields: NDArray[np.uint8], bits: int) -> NDArray[np.int64]:
    """Value j of a code field is its bits j*b … of a little-endian stream."""
    stream = np.unpackbits(fields, axis=-1, bitorder="little")
    codes = stream.reshape(*fields.shape[:-1], 32, bits).astype(np.int64)
    return (codes << np.arange(bits)).sum(-1)


@pytest.mark.parametrize("name", TURBO)
def test_turbo_follows_its_definition_in_float64(name: str) -> None:
    bits, levels = TURBO[name]
    rows = np.concatenate([gaussian(70, 256), gaussian(3, 256) * np.float32(1e-30)])
    rows[5, 32:64] = 0
    rows[6] = 0
    wire = get_format(name).encode(rows)
    whole = np.abs(rows).max(1, keepdims=True)
    assert (np.ascontiguousarray(wire[:, :4]).view("<f4") == whole).all()
    fields = wire[:, 4:].reshape(73, 8, 2 + 4 * bits)
    scales = np.ascontiguousarray(fields[..., :2]).view("<f2")[..., 0].astype(np.float64)
    blocks = rows.reshape(73, 8, 32).astype(np.float64)
    with np.errstate(invalid="ignore"):
        exact = np.nan_to_num(np.abs(blocks).max(-1) / whole / levels)
    assert np.abs(scales - exact).max() <= 2.0**-12  # half a unit of f16 below 1
    steps = (scales * whole)[..., None]
    live = steps[..., 0] > 0
    codes = bits_of(fields[..., 2:], bits)
    assert not codes[~live].any()
    x = blocks[live] / steps[live]
    if bits == 2:
        expected, values = np.clip(np.floor(x) + 2, 0, 3), codes - 1.5
        tie = np.abs(x - np.round(x)) < 1e-4
    else:
        half = 1 << (bits - 1)
        expected, values = np.clip(np.round(x), 1 - half, half - 1) + half, codes - half
        tie = np.abs(np.abs(x - np.round(x)) - 0.5) < 1e-4
    assert ((codes[live] == expected) | tie).all()
    decoded = (values * steps).reshape(73, 256)
    assert np.allclose(get_format(name).decode(wire), decoded, rtol=1e-6, atol=0)


def e4m3_values() -> NDArray[np.float64]:
    """The 127 finite values from 0 up, by their definition."""
    return np.array(
        [
            fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
            for exponent in range(16)
            for fraction in range(8)
        ][:127]
    )


def test_fp8_rounds_to_the_nearest_code_and_half_to_even() -> None:
    values = e4m3_values()
    middles = (values[:-1] + values[1:]) / 2
    wanted = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9)])
    wanted = np.concatenate([wanted, np.random.default_rng(3).uniform(0, 448, 4000)])
    wanted = np.concatenate([wanted, -wanted]).astype(np.float32)
    rows = np.zeros((-(-len(wanted) // 31), 32), np.float32)
    rows[:, 0] = 448  # A = 448, scale = 1: what comes is what is rounded
    rows[:, 1:].flat[: len(wanted)] = wanted
    codes = get_format("fp8").encode(rows)[:, 7:].reshape(-1)[: len(wanted)]
    magnitude = np.abs(wanted.astype(np.float64))
    distance = np.abs(values[None, :] - magnitude[:, None])
    nearest = distance.min(1)
    for code, sign in zip(codes & 127, codes >> 7, strict=True):
        assert code < 127 and sign in (0, 1)
    assert (distance[np.arange(len(wanted)), codes & 127] <= nearest * (1 + 1e-6)).all()
    tied = (distance <= nearest[:, None] * (1 + 1e-12)).sum(1) == 2
    assert tied.sum() > 100
    assert (codes[tied] % 2 == 0).all()
    assert ((codes >> 7 == 1) == np.signbit(wanted)).all()


def test_fp8_reads_its_codes_as_mlx_does() -> None:
    mx: Any = pytest.importorskip("mlx.core")
    from_fp8 = getattr(mx, "from_fp8", None)
    if from_fp8 is None:
        pytest.skip("this MLX has no from_fp8")
    codes = np.array([c for c in range(256) if c & 127 != 127] + [0, 0], np.uint8)
    theirs = np.array(from_fp8(mx.array(codes), dtype=mx.float32))
    head = np.frombuffer(np.float32(448).tobytes() + np.float16(1).tobytes(), np.uint8)
    wire = np.concatenate([np.tile(head, (8, 1)), codes.reshape(8, 32)], axis=1)
    assert (get_format("fp8").decode(wire).reshape(-1) == theirs).all()


@pytest.mark.parametrize("name", [*BLOCKED, ROPE])
def test_a_row_depends_on_its_own_values_only(name: str) -> None:
    kind = get_format(name)
    rows = gaussian(200, 1024)
    rows[3], rows[7, 64:128] = 0.25, -0.0
    together = kind.encode(rows)
    order = np.random.default_rng(4).permutation(len(rows))
    assert (kind.encode(rows[order]) == together[order]).all()
    for i in (0, 3, 7, 199):
        assert (kind.encode(rows[i : i + 1]) == together[i]).all()
    assert (kind.decode(together)[order] == kind.decode(together[order])).all()


@pytest.mark.parametrize("name", [*FORMATS, ROPE])
def test_encoding_leaves_its_input_alone(name: str) -> None:
    for rows in (gaussian(1, 96), gaussian(3, 128)):
        before = rows.copy()
        get_format(name).encode(rows)
        assert (rows == before).all()


@pytest.mark.parametrize("name", [*BLOCKED, ROPE])
def test_a_zero_row_is_all_zero_bytes_and_comes_back_without_sign(name: str) -> None:
    rows = np.zeros((2, 96), np.float32)
    if name in BLOCKED:
        rows[1] = -0.0
    wire = get_format(name).encode(rows)
    assert not wire.any()
    assert get_format(name).decode(wire).tobytes() == bytes(2 * 96 * 4)


@pytest.mark.parametrize("name", BLOCKED)
def test_a_block_without_a_scale_or_a_step_has_no_codes(name: str) -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[0, 0], rows[0, 33] = 1, -1e-9  # its scale is below half of the smallest f16
    rows[1, 0], rows[1, 33] = 1e-45, 0
    rows[2, 0], rows[2, 33] = -1e-40, 1e-45
    wire = get_format(name).encode(rows)
    kind = get_format(name)
    size = (kind.row_bytes(64) - 4) // 2
    assert not wire[0, 4 + size :].any()
    back = kind.decode(wire)
    assert not back[:2, 32:].any()
    assert np.isfinite(back).all()
    assert np.abs(back[1:] - rows[1:]).max() <= 1e-40


@pytest.mark.parametrize(("name", "ends"), [("turbo4", 7), ("turbo3", 3), ("fp8", 1)])
def test_a_block_whose_scale_is_rounded_down_saturates(name: str, ends: int) -> None:
    rows = np.zeros((1, 64), np.float32)
    scale = np.float32(2.0**-24)  # the smallest of f16
    rows[0, 0], rows[0, 40], rows[0, 41] = 1, ends * 1.49 * scale, -ends * 1.49 * scale
    back = there_and_back(name, rows)
    assert back[0, 40:42].tolist() == [ends * scale, -ends * scale]


@pytest.mark.parametrize("name", [*BLOCKED, ROPE])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [(0, 0), (70, 133), (99, 1023)])
def test_a_value_that_is_not_finite_is_refused(
    name: str, bad: float, place: tuple[int, int]
) -> None:
    rows = gaussian(100)
    rows[place] = bad
    with pytest.raises(CommandError, match="not finite"):
        get_format(name).encode(rows)


@pytest.mark.parametrize("name", BLOCKED)
def test_the_largest_floats_come_back_finite(name: str) -> None:
    rows = gaussian(4, 64)
    rows[0, :3] = 3.4028235e38, -3.4028235e38, 3.3e38
    rows[1, 40:43] = 3.4028235e38, -3.4028235e38, 3.3e38
    back = there_and_back(name, rows)
    assert np.isfinite(back).all()
    assert np.abs(back[0, :2] / rows[0, :2] - 1).max() < 1e-3
    rows[2] = 1e-40
    assert (there_and_back(name, rows)[2] == there_and_back(name, rows[2:3])[0]).all()


@pytest.mark.parametrize(
    ("name", "cosine_gaussian", "largest_uniform"),
    [
        ("fp8", 0.99, 0.04),
        ("turbo4", 0.95, 0.35),
        ("turbo3", 0.80, 0.75),
        ("turbo2", 0.70, 0.75),
    ],
)
def test_errors_are_within_the_documented_bounds(
    name: str, cosine_gaussian: float, largest_uniform: float
) -> None:
    rows = gaussian()
    assert cosine(there_and_back(name, rows), rows) > cosine_gaussian
    rows = uniform()
    assert np.abs(there_and_back(name, rows) - rows).max() <= largest_uniform


def test_mean_errors_have_the_documented_order_and_size() -> None:
    rows = gaussian()
    order = ("int8", "mlx4g32", "turbo4", "turbo3", "turbo2")
    errors = [float(np.abs(there_and_back(name, rows) - rows).mean()) for name in order]
    assert errors == sorted(set(errors))
    assert 0.046 < errors[2] < 0.052
    largest = np.abs(there_and_back("turbo2", uniform()) - uniform()).max()
    assert 0.32 < largest < 0.35


def test_the_rotary_values_are_bf16_and_the_body_is_fp8() -> None:
    kind, rows = get_format(ROPE), gaussian(50, 576)
    wire = kind.encode(rows)
    assert kind.row_bytes(576) == 2 * 64 + 4 + (576 - 64) // 32 * 34 == wire.shape[1]
    assert (wire[:, :128] == get_format("bf16").encode(rows[:, :64])).all()
    body = np.ascontiguousarray(rows[:, 64:])
    assert (wire[:, 128:] == get_format("fp8").encode(body)).all()
    back = kind.decode(wire)
    assert cosine(back[:, :64], rows[:, :64]) > 0.999
    assert cosine(back[:, 64:], body) > 0.99


@pytest.mark.parametrize(("rope", "width"), [(64, 64), (96, 64), (48, 64), (64, 100)])
def test_a_width_that_the_rotary_part_does_not_fit_is_refused(rope: int, width: int) -> None:
    with pytest.raises(CommandError, match="rope"):
        get_format(f"{BF16_ROPE_FP8_BODY}:{rope}").encode(gaussian(1, width))


def test_a_rotary_value_beyond_the_range_of_bf16_is_refused() -> None:
    rows = gaussian(2, 96)
    rows[1, 3] = 3.4028235e38
    with pytest.raises(CommandError, match="bf16"):
        get_format(ROPE).encode(rows)


@pytest.mark.parametrize(
    "name", [BF16_ROPE_FP8_BODY, f"{BF16_ROPE_FP8_BODY}:", f"{BF16_ROPE_FP8_BODY}:0", ROPE]
)
def test_the_rotary_format_is_for_schemas_only(name: str) -> None:
    with pytest.raises(CommandError, match="SCHEMA") as caught:
        resolve(name, 128)
    assert isinstance(caught.value, ConfigError)


@pytest.mark.parametrize("name", BLOCKED)
def test_a_width_without_whole_blocks_becomes_int8(name: str) -> None:
    assert resolve(name, 96).name == name
    assert resolve(name, 80).name == "int8"
    with pytest.raises(CommandError, match="multiple of 32"):
        get_format(name).encode(gaussian(1, 80))


@pytest.mark.parametrize("name", [*BLOCKED, ROPE])
def test_rows_of_an_impossible_size_are_refused(name: str) -> None:
    with pytest.raises(CommandError, match="no row has"):
        get_format(name).decode(np.zeros((2, 7), np.uint8))
