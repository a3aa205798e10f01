"""Storage formats: one module a format, found here by name."""

from __future__ import annotations

from pion_vllm_mlx.formats.base import Format, Part, UnknownFormat
from pion_vllm_mlx.formats.bf16 import Bf16
from pion_vllm_mlx.formats.convert import f16_to, to_f16, transpose_rows
from pion_vllm_mlx.formats.fp16 import Fp16
from pion_vllm_mlx.formats.fp32 import Fp32
from pion_vllm_mlx.formats.int8 import Int8
from pion_vllm_mlx.formats.mlx4g32 import Mlx4G32
from pion_vllm_mlx.formats.raw import Raw

__all__ = [
    "FORMATS",
    "Format",
    "Part",
    "UnknownFormat",
    "f16_to",
    "get_format",
    "resolve",
    "to_f16",
    "transpose_rows",
]

FORMATS: dict[str, Format] = {
    kind.name: kind for kind in (Fp16(), Bf16(), Fp32(), Int8(), Mlx4G32())
}
_MAX_RAW_ROW_BYTES = 1 << 30


def get_format(name: str) -> Format:
    """The format of that name, ``raw:<bytes per row>`` included.

    Raises UnknownFormat, which is a CommandError and a ConfigError.
    """
    kind = FORMATS.get(name.lower())
    if kind is not None:
        return kind
    prefix, _, digits = name.lower().partition(":")
    if prefix == "raw" and digits.isascii() and digits.isdigit() and len(digits) < 11:
        row_bytes = int(digits)
        if digits == str(row_bytes) and row_bytes <= _MAX_RAW_ROW_BYTES:
            return Raw(row_bytes)
    known = ", ".join(FORMATS)
    raise UnknownFormat(f"unknown format '{name[:64]}' (known: {known}, raw:<bytes per row>)")


def resolve(name: str, width: int) -> Format:
    """The format that rows of ``width`` values get when ``name`` is asked for.

    A blocked format whose blocks don't fit the width becomes int8.
    """
    kind = get_format(name)
    return kind if width % kind.block == 0 else FORMATS["int8"]
