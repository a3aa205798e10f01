"""Things to store: small prefixes whose every byte follows from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import safetensors
from safetensors import safe_open

from pion_vllm_mlx.server.store.segment import Segment
from tests.recovery.driving import Driver, Word, one_bulk

#: layer and sid of a completion record, as clients write it.
COMPLETION_LAYER = 65535


def noise(seed: object, length: int) -> bytes:
    return random.Random(repr(seed)).randbytes(length)


def leaves(count: int, width: int = 64, heads: int = 2, fmt: str = "bf16") -> str:
    leaf = {"k": width, "v": width, "heads": heads, "format": fmt}
    return json.dumps([leaf] * count)


def register(namespace: str, count: int = 2, width: int = 64) -> tuple[Word, ...]:
    return (
        "KV.PREFIX.REGISTER",
        namespace,
        width,
        "bf16",
        "HEADS",
        2,
        "LEAVES",
        leaves(count, width),
    )


def rows(sid: str, layer: int, start: int, count: int, width: int = 64) -> tuple[Word, ...]:
    """A STOREBATCH of ``count`` bf16 rows, head-major."""
    blob = noise((sid, layer, start, count), count * width * 2)
    place: tuple[Word, ...] = ("V.STOREBATCH", sid, layer, start, count, blob)
    return (*place, "FMT", "STORED", "LAYOUT", "HND")


def state(sid: str, layer: int, length: int, salt: int = 0) -> tuple[Word, ...]:
    return ("SSM.PREFIX.STORE", sid, layer, noise((sid, layer, salt), length))


def whole_store(namespace: str, big: bool = True) -> Iterator[tuple[Word, ...]]:
    """Every command of one store: rows and states in the log and in segments, then the record."""
    yield register(namespace)
    sizes = [8, 600 if big else 9]  # rows of 128 bytes: 1 KB, and 75 KB
    for layer, count in enumerate(sizes):
        for side in ("_pk", "_pv"):
            yield rows(namespace + side, layer, 0, count)
            yield rows(namespace + side, layer, count, 5)
    yield state(namespace, 0, 300)
    yield state(namespace, 1, 70_000 if big else 400)
    yield state(f"{namespace}@4", 0, 200)
    yield state(namespace, COMPLETION_LAYER, 500)


def store_all(driver: Driver, namespace: str, big: bool = True) -> None:
    for words in whole_store(namespace, big):
        driver.ask(*words)


def sealed_tensors(path: Path) -> dict[str, bytes]:
    """A sealed file as safetensors' own reader sees it; raises when it refuses the file."""
    found = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    return {name: bytes(tensor["data"]) for name, tensor in found}


def open_sealed(driver: Driver) -> int:
    """As ``open_sealed_files``, for all that a driver has."""
    return open_sealed_files(driver.store.segments.segments.values())


def open_sealed_files(segments: Iterable[Segment]) -> int:
    """Open every sealed file with safetensors' own reader; how many there were.

    Tensors, dead ones included, must cover the file to its last byte.
    """
    sealed = [segment for segment in segments if segment.sealed]
    for segment in sealed:
        with safe_open(segment.path, "numpy") as file:
            names = set(file.keys())
        tensors = sealed_tensors(segment.path)
        assert set(tensors) == names and names
        data = sum(len(tensor) for tensor in tensors.values())
        assert segment.header_bytes + data == segment.size == segment.path.stat().st_size
    return len(sealed)


def agrees(driver: Driver, namespace: str) -> int:
    """What MAP points at is what FETCH answers, byte for byte; how many tensors were compared.

    For bf16 rows that were stored head-major.
    """
    compared = 0
    for segment in driver.map(namespace)["segments"]:
        tensors = sealed_tensors(Path(segment["path"]))
        for entry in segment["tensors"]:
            sid = namespace + ("_pk" if entry["side"] == "k" else "_pv")
            place: tuple[Word, ...] = (sid, entry["layer"], "RANGE", entry["start"], entry["end"])
            layout = ("FMT", "STORED", "LAYOUT", entry["layout"])
            fetched = one_bulk(driver.ask("V.FETCH", *place, *layout))
            heads = 2
            spaced = np.frombuffer(tensors[entry["name"]], np.uint8).reshape(heads, -1)
            shape = driver.store.state.sessions[sid.encode()].layers[entry["layer"]].spec
            row = shape.row_bytes // heads
            first, count = entry["row"] * row, (entry["end"] - entry["start"]) * row
            assert spaced[:, first : first + count].tobytes() == fetched, entry
            compared += 1
    return compared
