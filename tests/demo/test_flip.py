"""The turned-over byte lies in stored rows, and nothing else changes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from pion_vllm_mlx.demo.flip import flip_stored_byte
from pion_vllm_mlx.errors import DamagedData


def _segment(path: Path, sizes: dict[str, tuple[str, int]]) -> bytes:
    header: dict[str, object] = {"__metadata__": {}}
    end = 0
    for name, (dtype, size) in sizes.items():
        header[name] = {"dtype": dtype, "shape": [size], "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode().ljust(1024)
    content = struct.pack("<Q", len(text)) + text + bytes(range(256)) * (end // 256)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return content


def test_one_bit_of_the_largest_tensor_of_rows_is_turned_over(tmp_path: Path) -> None:
    folder = tmp_path / "pion.segments.0"
    sizes = {"filler": ("U8", 4096), "k": ("BF16", 256), "v": ("BF16", 512)}
    before = _segment(folder / "1.safetensors", sizes)
    _segment(folder / "2.safetensors", {"k": ("F32", 256)})
    (folder / "open").write_bytes(bytes(64))

    flipped = flip_stored_byte(tmp_path)

    after = (folder / "1.safetensors").read_bytes()
    assert flipped.file == "pion.segments.0/1.safetensors"
    assert flipped.offset == 8 + 1024 + 4096 + 256
    changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    assert changed == [flipped.offset]


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, struct.pack("<Q", 8) + b"not json"])
def test_a_folder_without_sealed_rows_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "pion.segments.0").mkdir()
    (tmp_path / "pion.segments.0" / "1").write_bytes(content)
    with pytest.raises(DamagedData, match="no sealed segment"):
        flip_stored_byte(tmp_path)
