"""bf16_rope_fp8_body: the rotary values of a row as bf16, the rest as fp8 blocks.

Wire row of W values: ``[rope × bf16]``, then an fp8 row of the other W − rope. The
format's name carries the number of rotary values: ``bf16_rope_fp8_body:64``.
"""

from __future__ import annotations

import numpy as np

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats.base import Bytes, Floats, Format, Part
from pion_vllm_mlx.formats.bf16 import Bf16
from pion_vllm_mlx.formats.blocks import BLOCK
from pion_vllm_mlx.formats.fp8 import Fp8

BF16_ROPE_FP8_BODY = "bf16_rope_fp8_body"


class Bf16RopeFp8Body(Format):
    """``rope`` values of two bytes, then blocks of fp8; 0 < rope < W."""

    block = BLOCK

    def __init__(self, rope: int) -> None:
        self.name = f"{BF16_ROPE_FP8_BODY}:{rope}"
        self.rope = rope
        self._rope, self._body = Bf16(), Fp8()

    def row_bytes(self, width: int) -> int:
        """Two bytes a rotary value and an fp8 row."""
        return 2 * self.rope + self._body.row_bytes(width - self.rope) if width else 0

    def width_of(self, row_bytes: int) -> int:
        """The rotary values and the body's width."""
        return self.rope + self._body.width_of(row_bytes - 2 * self.rope) if row_bytes else 0

    def parts(self, width: int) -> tuple[Part, ...]:
        """One U8 tensor."""
        n = self.row_bytes(width)
        return (Part("", "U8", n, n),)

    def head_major(self, width: int, heads: int) -> bool:
        """Never: the body's maximum belongs to the whole row."""
        return False

    def check_width(self, width: int) -> None:
        """Room for the rotary values and at least one block."""
        if not 0 < self.rope < width and width:
            raise CommandError(f"{self.name}: rope must be above 0 and below the width {width}")
        if width and (width - self.rope) % BLOCK:
            raise CommandError(f"{self.name}: width - rope must be a multiple of {BLOCK}")

    def _encode(self, rows: Floats, out: Bytes) -> None:
        ends = 2 * self.rope
        rope = np.empty((len(rows), ends), np.uint8)
        self._rope._encode(rows[:, : self.rope], rope)
        if ((rope.view("<u2") & 0x7F80) == 0x7F80).any():
            raise CommandError(f"{self.name}: a value is not finite or beyond the range of bf16")
        out[:, :ends] = rope
        self._body._encode(np.ascontiguousarray(rows[:, self.rope :]), out[:, ends:])

    def _decode(self, stored: Bytes, out: Floats) -> None:
        ends = 2 * self.rope
        values = np.empty((len(out), out.shape[1] - self.rope), np.float32)
        self._body._decode(stored[:, ends:], values)
        out[:, self.rope :] = values
        rope = np.empty((len(out), self.rope), np.float32)
        self._rope._decode(stored[:, :ends], rope)
        out[:, : self.rope] = rope
