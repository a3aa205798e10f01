"""Storage formats: one module a format, found here by name."""

from __future__ import annotations

from pion_vllm_mlx.errors import UnknownFormat
from pion_vllm_mlx.formats.base import Format, Part
from pion_vllm_mlx.formats.bf16 import Bf16
from pion_vllm_mlx.formats.bf16_rope_fp8_body import BF16_ROPE_FP8_BODY, Bf16RopeFp8Body
from pion_vllm_mlx.formats.convert import f16_to, to_f16, transpose_rows
from pion_vllm_mlx.formats.fp8 import Fp8
from pion_vllm_mlx.formats.fp16 import Fp16
from pion_vllm_mlx.formats.fp32 import Fp32
from pion_vllm_mlx.formats.int8 import Int8
from pion_vllm_mlx.formats.mlx4g32 import Mlx4G32
from pion_vllm_mlx.formats.raw import Raw
from pion_vllm_mlx.formats.turbo import Turbo2, Turbo3, Turbo4

__all__ = [
    "BF16_ROPE_FP8_BODY",
    "FORMATS",
    "Format",
    "Part",
    "UnknownFormat",
    "f16_to",
    "get_format",
    "resolve",
    "storage_format",
    "to_f16",
    "transpose_rows",
]

FORMATS: dict[str, Format] = {
    kind.name: kind
    for kind in (Fp16(), Bf16(), Fp32(), Int8(), Fp8(), Turbo4(), Turbo3(), Turbo2(), Mlx4G32())
}
"""The formats without a parameter, which may be asked for anywhere."""

_MAX_RAW_ROW_BYTES = 1 << 30
_MAX_ROPE = 65535


def get_format(name: str) -> Format:
    """The format of that name, ``raw:<bytes per row>`` and
    ``bf16_rope_fp8_body:<rope>`` included.

    Raises UnknownFormat, which is a CommandError and a ConfigError.
    """
    kind = FORMATS.get(name.lower())
    if kind is not None:
        return kind
    family, _, digits = name.lower().partition(":")
    if digits.isascii() and digits.isdigit() and len(digits) < 11 and digits == str(int(digits)):
        number = int(digits)
        if family == "raw" and number <= _MAX_RAW_ROW_BYTES:
            return Raw(number)
        if family == BF16_ROPE_FP8_BODY and 0 < number <= _MAX_ROPE:
            return Bf16RopeFp8Body(number)
    if family == BF16_ROPE_FP8_BODY:
        raise _only_in_a_schema()
    known = ", ".join(FORMATS)
    raise UnknownFormat(f"unknown format '{name[:64]}' (known: {known}, raw:<bytes per row>)")


def resolve(name: str, width: int) -> Format:
    """The format that rows of ``width`` values get when ``name`` is asked for.

    A blocked format whose blocks don't fit the width becomes int8. Raises UnknownFormat,
    also for bf16_rope_fp8_body, whose layers a schema has to name one by one.
    """
    kind = get_format(name)
    if isinstance(kind, Bf16RopeFp8Body):
        raise _only_in_a_schema()
    return kind if width % kind.block == 0 else FORMATS["int8"]


def storage_format(name: str) -> str:
    """The canonical name of a format that rows of any width can be asked for in.

    Raises UnknownFormat for all others, which is a ConfigError.
    """
    canonical = get_format(name).name
    if canonical not in FORMATS:
        known = ", ".join(FORMATS)
        raise UnknownFormat(f"{canonical} is no format for prefixes (known: {known})")
    return canonical


def _only_in_a_schema() -> UnknownFormat:
    return UnknownFormat(f"{BF16_ROPE_FP8_BODY} exists in a SCHEMA of V.CREATE only")
