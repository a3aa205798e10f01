"""The files that same-host clients read: V.EXPORT and KV.PREFIX.MAP."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from tests.conftest import RunningServer
from tests.server import oracle
from tests.server.wire import Wire

WIDTH, HEADS, ROWS = 128, 4, 300
DIM = WIDTH // HEADS


def fill(wire: Wire, ns: str, fmt: str, n: int = ROWS, layers: int = 2) -> dict[str, Any]:
    """Both sides of a namespace, and their wire rows by tensor name."""
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, fmt, "HEADS", HEADS)
    kept = {}
    for layer in range(layers):
        for seed, side in enumerate("kv"):
            random = np.random.default_rng(10 * layer + seed)
            rows = random.standard_normal((n, WIDTH)).astype(np.float32)
            wire.ok("V.STOREBATCH", f"{ns}_p{side}", layer, 0, n, rows.tobytes())
            kept[f"{side}.{layer}"] = oracle.stored(fmt, rows)
    return kept


def export(wire: Wire, ns: str, *words: str | int) -> Path:
    answer = wire.ask("V.EXPORT", ns + "_pk", ns + "_pv", *words)
    assert isinstance(answer, bytes), answer
    return Path(answer.decode())


def by_head(rows: NDArray[Any]) -> NDArray[Any]:
    """``[n, H*D]`` as ``[1, H, n, D]``."""
    return rows.reshape(len(rows), HEADS, -1).transpose(1, 0, 2)[None]


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_an_export_is_the_float32_fetch_by_head_rounded_to_float16(
    wire: Wire, ns: str, fmt: str
) -> None:
    kept = fill(wire, ns, fmt)
    path = export(wire, ns, 10, 250, 2, HEADS, DIM)
    tensors = load_file(path)
    assert sorted(tensors) == sorted(kept)
    for name, tensor in tensors.items():
        values = oracle.floats(fmt, kept[name], WIDTH)[10:250].astype(np.float16)
        assert tensor.dtype == np.float16 and tensor.shape == (1, HEADS, 240, DIM)
        np.testing.assert_array_equal(tensor.view(np.uint16), by_head(values).view(np.uint16))


def test_an_export_in_the_storage_format_keeps_every_bit(wire: Wire, ns: str) -> None:
    for fmt, dtype in (("bf16", "BF16"), ("fp32", "F32"), ("fp16", "F16")):
        kept = fill(wire, ns + fmt, fmt)
        path = export(wire, ns + fmt, 0, ROWS, 1, HEADS, DIM, "FMT", "STORED")
        with safe_open(path, "np") as file:
            assert file.get_slice("k.0").get_dtype() == dtype
            assert file.get_slice("k.0").get_shape() == [1, HEADS, ROWS, DIM]
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        wanted = by_head(kept["k.0"]).tobytes()
        assert raw[start : start + len(wanted)] == wanted
    kept = fill(wire, ns, "mlx4g32")
    tensors = load_file(export(wire, ns, 0, ROWS, 2, HEADS, DIM, "FMT", "STORED"))
    assert sorted(tensors) == [f"{s}.{n}.{p}" for s in "kv" for n in range(2) for p in "bsw"]
    half, groups = WIDTH // 2, WIDTH // 32
    codes, scales = kept["v.1"][:, :half], kept["v.1"][:, half : half + 2 * groups]
    np.testing.assert_array_equal(tensors["v.1.w"].view(np.uint8), by_head(codes))
    np.testing.assert_array_equal(tensors["v.1.s"].view(np.uint8), by_head(scales))
    assert tensors["v.1.w"].dtype == np.uint32 and tensors["v.1.s"].dtype == np.float16


def test_an_export_stays_until_its_session_changes(shared: RunningServer, ns: str) -> None:
    with Wire.tcp(shared.port) as wire:
        fill(wire, ns, "fp16")
        words = (0, ROWS, 2, HEADS, DIM)
        path = export(wire, ns, *words)
        assert path.is_absolute() and path.parent == shared.dir / "pion-export"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert export(wire, ns, *words) == path
        content = path.read_bytes()
        with path.open("rb") as reader:
            wire.ok("V.STOREBATCH", ns + "_pv", 1, 5, 1, np.ones(WIDTH, "<f4").tobytes())
            assert not path.exists()
            assert reader.read() == content
        second = export(wire, ns, *words)
        assert second != path
        assert load_file(second)["v.1"][0, 0, 5, 0] == 1
        assert wire.ask("KV.PREFIX.DROP", ns) == 1
        assert not second.exists()
        fill(wire, ns, "fp16")
        third = export(wire, ns, *words)
        assert third not in (path, second) and third.read_bytes() == content
        assert wire.ask("V.DROP", ns + "_pk", ns + "_pv") == 2
        assert not third.exists()


def test_exports_of_an_earlier_process_are_removed(pion_server: RunningServer) -> None:
    with Wire.tcp(pion_server.port) as wire:
        fill(wire, "a", "fp16")
        path = export(wire, "a", 0, ROWS, 2, HEADS, DIM)
    other = path.with_name("mine.safetensors")
    other.write_bytes(b"not the server's")
    pion_server.restart()
    assert not path.exists() and other.exists()
    with Wire.tcp(pion_server.port) as wire:
        assert export(wire, "a", 0, ROWS, 2, HEADS, DIM).exists()


def mapped(wire: Wire, ns: str) -> dict[str, Any]:
    answer = wire.ask("KV.PREFIX.MAP", ns)
    assert isinstance(answer, bytes), answer
    described: dict[str, Any] = json.loads(answer)
    return described


def rows_of(described: dict[str, Any], fmt: str) -> dict[str, NDArray[np.uint8]]:
    """Wire rows by ``side.layer``, put together from the files as a client would."""
    found: dict[str, NDArray[np.uint8]] = {}
    for segment in described["segments"]:
        assert Path(segment["path"]).stat().st_size == segment["size"]
        with safe_open(segment["path"], "np") as file:
            names = set(file.keys())
            for tensor in segment["tensors"]:
                name = tensor["name"]
                parts = [name + part for part in (".w", ".s", ".b")]
                chosen = [name] if name in names else parts
                arrays = [_bytes(file, segment["path"], one) for one in chosen]
                whole = np.concatenate([_by_token(a, tensor) for a in arrays], axis=1)
                first = tensor["row"]
                shown = whole[first : first + tensor["end"] - tensor["start"]]
                key = f"{tensor['side']}.{tensor['layer']}"
                sheet = found.get(key, np.zeros((0, whole.shape[1]), np.uint8))
                short = tensor["end"] - len(sheet)
                sheet = np.pad(sheet, ((0, max(0, short)), (0, 0)))
                sheet[tensor["start"] : tensor["end"]] = shown
                found[key] = sheet
                assert tensor["format"] == fmt
    return found


def _bytes(file: Any, path: str, name: str) -> NDArray[np.uint8]:
    """A tensor's bytes, its last axis in bytes (numpy has no bf16)."""
    shape = file.get_slice(name).get_shape()
    raw = Path(path).read_bytes()
    length = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + length])[name]["data_offsets"]
    data = np.frombuffer(raw, np.uint8)[8 + length + begin : 8 + length + end]
    return data.reshape(*shape[:-1], -1)


def _by_token(array: NDArray[np.uint8], tensor: dict[str, Any]) -> NDArray[np.uint8]:
    if tensor["layout"] == "HND":
        # spare rows lie behind the last one
        assert array.shape[1] >= tensor["rows"]
        array = array[:, : tensor["rows"]].transpose(1, 0, 2)
        return array.reshape(tensor["rows"], -1)
    return array.reshape(tensor["rows"], -1)


#: int8 rows cannot be cut at heads
LAYOUTS = [
    (fmt, layout)
    for fmt in oracle.FORMATS
    for layout in ("NHD", "HND")
    if (fmt, layout) != ("int8", "HND")
]


@pytest.mark.parametrize(("fmt", "layout"), LAYOUTS)
@pytest.mark.parametrize("n", [5, 1_000])
def test_mapped_files_hold_the_rows(wire: Wire, ns: str, fmt: str, layout: str, n: int) -> None:
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, fmt, "HEADS", HEADS)
    kept: dict[str, NDArray[np.uint8]] = {}
    for turn, (start, count) in enumerate([(0, n), (n, 7), (3, 2)]):
        for seed, side in enumerate("kv"):
            random = np.random.default_rng(10 * turn + seed)
            rows = oracle.stored(fmt, random.standard_normal((count, WIDTH)).astype(np.float32))
            blob = rows
            if layout == "HND":
                blob = oracle.head_major(fmt, rows, WIDTH, HEADS)
            words = (f"{ns}_p{side}", 4, start, count, blob.tobytes())
            wire.ok("V.STOREBATCH", *words, "FMT", "STORED", "LAYOUT", layout)
            key = f"{side}.4"
            old = kept.get(key, rows[:0])
            kept[key] = np.concatenate((old[:start], rows, old[start + count :]))
        if turn == 1:
            mapped(wire, ns)
    found = rows_of(mapped(wire, ns), fmt)
    assert sorted(found) == sorted(kept)
    for key, rows in kept.items():
        np.testing.assert_array_equal(found[key], rows)


def test_mapped_files_are_read_by_mlx_as_they_are(wire: Wire, ns: str) -> None:
    mx = pytest.importorskip("mlx.core")
    wire.ok("KV.PREFIX.REGISTER", ns, WIDTH, "bf16", "HEADS", HEADS)
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    stored = oracle.stored("bf16", rows)
    blob = oracle.head_major("bf16", stored, WIDTH, HEADS)
    for side in ("_pk", "_pv"):
        options = ("FMT", "STORED", "LAYOUT", "HND")
        wire.ok("V.STOREBATCH", ns + side, 0, 0, ROWS, blob.tobytes(), *options)
    described = mapped(wire, ns)
    (segment,) = described["segments"]
    arrays = mx.load(segment["path"])
    for tensor in segment["tensors"]:
        array = arrays[tensor["name"]]
        assert array.dtype == mx.bfloat16 and array.shape[1] >= ROWS + 64
        values = np.array(array[:, :ROWS].astype(mx.float32))
        wanted = oracle.floats("bf16", stored, WIDTH).reshape(ROWS, HEADS, DIM).transpose(1, 0, 2)
        np.testing.assert_array_equal(values, wanted)


def test_a_published_file_never_changes_and_later_rows_go_elsewhere(wire: Wire, ns: str) -> None:
    fill(wire, ns, "fp16")
    first = mapped(wire, ns)
    files = {segment["path"]: Path(segment["path"]).read_bytes() for segment in first["segments"]}
    assert mapped(wire, ns) == first
    wire.ok("V.STOREBATCH", ns + "_pk", 0, ROWS, 9, bytes(9 * WIDTH * 4))
    second = mapped(wire, ns)
    assert second["generation"] != first["generation"]
    for path, content in files.items():
        assert Path(path).read_bytes() == content
    with open(next(iter(files)), "rb") as reader:
        assert wire.ask("KV.PREFIX.DROP", ns) == 1
        assert not any(Path(path).exists() for path in files)
        assert reader.read() == next(iter(files.values()))


def test_there_is_nothing_to_map_without_rows(wire: Wire, ns: str) -> None:
    assert wire.ask("KV.PREFIX.MAP", ns) == "UNKNOWN"
    wire.ok("KV.PREFIX.REGISTER", ns, 4, "fp16")
    assert wire.ask("KV.PREFIX.MAP", ns) == "UNKNOWN"


@pytest.mark.parametrize("place", [0, 9, -1])
def test_an_export_whose_bytes_changed_is_never_handed_out_again(
    wire: Wire, ns: str, place: int
) -> None:
    fill(wire, ns, "fp16")
    first = export(wire, ns, 0, ROWS, 2, HEADS, DIM)
    whole = first.read_bytes()
    damaged = bytearray(whole)
    damaged[place] ^= 1
    first.write_bytes(damaged)
    again = export(wire, ns, 0, ROWS, 2, HEADS, DIM)
    assert again != first and again.read_bytes() == whole
    assert export(wire, ns, 0, ROWS, 2, HEADS, DIM) == again
