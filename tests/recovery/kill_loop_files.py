"""The files that MAP and EXPORT name hold what a client has stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.recovery.kill_loop_content import HEADS, LAYERS, SIDES, Prefix, token_major
from tests.recovery.material import sealed_tensors


def mapped_agrees(answer: bytes, prefix: Prefix) -> int:
    """Compare every tensor of a MAP's answer; how many files were read.

    A file may have been replaced by a tidier one since; it is passed over then.
    """
    described = json.loads(answer)
    read = 0
    for segment in described["segments"]:
        try:
            tensors = sealed_tensors(Path(segment["path"]))
        except FileNotFoundError:
            continue
        read += 1
        for entry in segment["tensors"]:
            assert entry["name"] in tensors, f"{segment['path']} has no {entry['name']}"
            _compare(entry, tensors[entry["name"]], prefix)
    return read


def _compare(entry: dict[str, Any], tensor: bytes, prefix: Prefix) -> None:
    sid = prefix.name + ("_pk" if entry["side"] == "k" else "_pv")
    size, row, count = prefix.row_bytes, entry["row"], entry["end"] - entry["start"]
    if entry["layout"] == "HND":
        spaced = np.frombuffer(tensor, np.uint8).reshape(HEADS, -1, size // HEADS)
        rows = token_major(spaced[:, row : row + count].tobytes(), count, "HND")
    else:
        rows = tensor[row * size : (row + count) * size]
    wanted = prefix.content.rows[sid][entry["layer"]][entry["start"] * size : entry["end"] * size]
    assert rows == wanted, f"{sid}: other bytes in {entry}"


def exported_agrees(path: str, prefix: Prefix, end: int) -> int:
    """Compare an exported file; 1, or 0 where another command has deleted it since."""
    try:
        tensors = sealed_tensors(Path(path))
    except FileNotFoundError:
        return 0
    for side in SIDES:
        for layer in range(LAYERS):
            rows = prefix.content.rows[prefix.name + side][layer][: end * prefix.row_bytes]
            found = token_major(tensors[f"{side[-1]}.{layer}"], end, "HND")
            assert found == rows, f"{prefix.name}{side} {layer}: other bytes in {path}"
    return 1
