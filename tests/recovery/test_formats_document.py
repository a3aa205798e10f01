"""docs/formats.md is true: files of a release are read by its tables, without our own code."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crc32c import crc32c

from pion_vllm_mlx.cache.completion import CompletionRecord, Run
from pion_vllm_mlx.server.keyspace import changes
from pion_vllm_mlx.server.store import framing, records
from tests.fixtures.make_release import LONG_ROWS, OPEN_ROWS, ROW, noise

ROOT = Path(__file__).parents[2]
FIRST, LATER = (ROOT / "tests" / "fixtures" / name for name in ("0.1", "0.1-more"))
DOCUMENT = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")

Logged = tuple[int, int, bytes]
SNAPSHOT = "pion.snapshot"


def header(data: bytes) -> tuple[bytes, int]:
    """Magic and covered LSN of a log or snapshot."""
    magic, version, zero, covered = struct.unpack_from("<8sIIQ", data)
    crc, last = struct.unpack_from("<II", data, 24)
    assert (version, zero, last) == (1, 0, 0) and crc == crc32c(data[:24])
    return magic, covered


def read(data: bytes) -> Iterator[Logged]:
    """LSN, operation and payload of every record."""
    at = 32
    while at < len(data):
        crc, length, lsn, op = struct.unpack_from("<IIQB", data, at)
        end = at + 17 + length
        assert crc == crc32c(data[at + 4 : end])
        yield lsn, op, data[at + 17 : end]
        at = end


def parts(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """JSON and blob of a record of rows or states."""
    (length,) = struct.unpack_from("<I", payload)
    return json.loads(payload[4 : 4 + length]), payload[4 + length :]


@pytest.fixture(params=[FIRST, LATER], ids=lambda path: path.name)
def release(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def runs_of(file: Path) -> list[dict[str, Any]]:
    """The JSON of each record of rows, in order."""
    return [parts(payload)[0] for _, op, payload in read(file.read_bytes()) if op == 2]


def open_segments(release: Path) -> set[str]:
    """Names of the segments that no record calls complete."""
    sealed = {
        parts(payload)[0]["segment"]
        for name in ("pion.vstore.0", "pion.vstore.wal.0")
        for _, op, payload in read((release / name).read_bytes())
        if op == 4
    }
    return {path.stem for path in (release / "pion.segments.0").iterdir()} - sealed


FILES = re.findall(r"^\| `(pion\.[a-z.]+)\.<w>` .* `(PION\w+)` \|$", DOCUMENT, re.MULTILINE)


def test_the_document_names_every_file_of_records(release: Path) -> None:
    named = {path.name.removesuffix(".0") for path in release.glob("pion.*") if path.is_file()}
    assert {name for name, _ in FILES} == named


@pytest.mark.parametrize(("name", "magic"), FILES, ids=[name for name, _ in FILES])
def test_frames_are_as_the_tables_say(name: str, magic: str, release: Path) -> None:
    data = (release / f"{name}.0").read_bytes()
    found, covered = header(data)
    assert found == magic.encode()
    frames = list(read(data))
    lsns = [lsn for lsn, _, _ in frames]
    assert lsns == list(range(lsns[0], lsns[0] + len(lsns)))
    if ".wal" in name:
        snapshot = SNAPSHOT if name == "pion.wal" else name.replace(".wal", "")
        before = header((release / f"{snapshot}.0").read_bytes())[1]
        assert covered == 0 and lsns[0] == before + 1
    else:
        assert lsns[0] == 1 and frames[-1][1] == 255
        assert frames[-1][2] == struct.pack("<Q", len(frames) - 1)


def test_every_operation_is_in_the_table_with_its_fields(release: Path) -> None:
    rows = re.findall(r"^\| (\d+) (\w+) \| (\w+) \| (.*) \|.*\|$", DOCUMENT, re.MULTILINE)
    table = {
        int(op): (name, log, set(re.findall(r"`([a-z_]+)`", text))) for op, name, log, text in rows
    }
    kinds = {op for op in range(255) if records.is_known(op)}
    assert set(table) == kinds
    for kind in (records.Create, records.Rows, records.Drop, records.Seal, records.StoreState):
        assert table[kind.op][:2] == (kind.__name__, kind.log)
    for file in ("vstore", "vstore.wal", "ssm", "ssm.wal"):
        for _, op, payload in read((release / f"pion.{file}.0").read_bytes()):
            if op != 255:
                assert parts(payload)[0].keys() <= table[op][2], op


def head_major(data: bytes, run: dict[str, Any]) -> bytes:
    """The rows of a run of two heads of four bf16 values."""
    head = 4 * 2
    starts = [run["offset"] + index * run["padded"] * head for index in range(2)]
    return b"".join(data[start : start + run["rows"] * head] for start in starts)


def content(release: Path, run: dict[str, Any]) -> bytes:
    return (release / "pion.segments.0" / f"{run['segment']}.safetensors").read_bytes()


def test_rows_lie_where_a_record_says(release: Path) -> None:
    runs = runs_of(release / "pion.vstore.0")
    (run,) = [r for r in runs if (r["sid"], r["layer"], r["start"]) == ("chat_pk", 0, 0)]
    rows = head_major(content(release, run), run)
    assert run["hnd"] and rows == noise("chat_pk", 96)
    assert crc32c(rows) == run["crc"] == run["sent"]


def test_long_head_major_runs_have_the_spare_rows_that_the_document_says() -> None:
    spare, step = map(int, re.findall(r"rows plus (\d+), rounded up to (\d+)", DOCUMENT)[0])
    (start,) = map(int, re.findall(r"runs begin at multiples of (\d+)", DOCUMENT, re.IGNORECASE))
    (least,) = map(int, re.findall(r"Head-major runs from (\d+) KiB", DOCUMENT))
    runs = runs_of(LATER / "pion.vstore.0")
    (long,) = [run for run in runs if run["sid"] == "long_pk"]
    assert long["padded"] == -(-(LONG_ROWS + spare) // step) * step
    assert head_major(content(LATER, long), long) == noise("long", LONG_ROWS * ROW)
    for run in runs:
        spaced = run["hnd"] and run["sid"] == "long_pk"
        assert (run["padded"] > run["rows"]) == spaced == (run["rows"] * ROW >= least << 10)
        assert not run["segment"] or run["offset"] % start == 0


def test_a_run_of_which_a_part_was_taken_back_shows_its_first_rows() -> None:
    runs = [run for run in runs_of(LATER / "pion.vstore.0") if run["sid"] == "shown"]
    shown = b""
    for run in runs:
        begin = run["offset"]
        shown += content(LATER, run)[begin : begin + run["shown"] * ROW]
        assert run["shown"] < run["rows"]
    assert shown == noise("shown", 5 * ROW)[: 3 * ROW] + noise("shown in part", 6 * ROW)[: 2 * ROW]


def test_what_lies_in_an_open_segment_is_said_by_the_log_alone() -> None:
    (name,) = open_segments(LATER)
    (run,) = [run for run in runs_of(LATER / "pion.vstore.wal.0") if run["segment"] == name]
    data = content(LATER, run)
    assert data[: run["offset"]] == bytes(run["offset"])
    assert data[run["offset"] : run["offset"] + OPEN_ROWS * ROW] == noise("open", OPEN_ROWS * ROW)
    logged = read((LATER / "pion.ssm.wal.0").read_bytes())
    states = [parts(payload)[0] for _, op, payload in logged if op == 16]
    (state,) = [state for state in states if state["segment"] == name]
    blob = data[state["offset"] : state["offset"] + state["length"]]
    assert blob == noise("open state", state["length"]) and crc32c(blob) == state["crc"]


def test_a_log_goes_on_from_within_a_save() -> None:
    """Its first records are of rows that came while the snapshot before it was written."""
    first, *_ = runs_of(LATER / "pion.vstore.wal.0")
    assert first["sid"] == "tail" and first["segment"] == ""


def test_sealed_segments_are_safetensors_without_gaps(release: Path) -> None:
    sealed = {path.stem for path in (release / "pion.segments.0").iterdir()} - open_segments(
        release
    )
    for name in sealed:
        data = (release / "pion.segments.0" / f"{name}.safetensors").read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        tensors = json.loads(data[8 : 8 + length])
        known = r"[kvx]\.\d+\.\d+-\d+(\.[wsb])?|state\.\d+|dead\.\d+"
        assert all(re.fullmatch(known, name) for name in tensors)
        places = sorted(tensor["data_offsets"] for tensor in tensors.values())
        ends = [0, *(end for _, end in places)]
        assert [begin for begin, _ in places] == ends[:-1] and ends[-1] == len(data) - 8 - length


def test_a_portable_copy_has_the_table_at_its_end(release: Path) -> None:
    data = (release / "portable").read_bytes()
    length, crc, version, magic = struct.unpack("<QII8s", data[-24:])
    text = data[-24 - length : -24]
    assert (version, magic) == (1, b"PIONPC01") and crc == crc32c(text)
    entries = json.loads(text)
    assert [name for name, _, _ in entries][:2] == ["manifest", "states"]
    content = {name: data[at : at + count] for name, at, count in entries}
    assert header(content["manifest"])[0] == b"PIONVS01"
    assert header(content["states"])[0] == b"PIONSS01"


def test_a_completion_record_is_as_the_table_says() -> None:
    ids = np.array([5, 6, 7], np.uint32)
    runs = [Run(0, "k", 0, 3, "bf16", "HND", 9)]
    blob = CompletionRecord({"a": 1}, ids, [], [], runs, prefill_ms=2.5).encode()
    magic, version, length, count = struct.unpack_from("<8sIII", blob)
    assert (magic, version, count) == (b"PIONDONE", 1, 3)
    found = json.loads(blob[20 : 20 + length])
    assert struct.unpack_from("<3I", blob, 20 + length) == (5, 6, 7)
    assert struct.unpack_from("<I", blob, 20 + length + 12) == (crc32c(blob[:-4]),)
    assert found["runs"] == [[0, "k", 0, 3, "bf16", "HND", 9]]
    section = DOCUMENT.partition("## Completion record")[2].partition("\n## ")[0]
    assert set(found) == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_verb_of_the_keys_is_in_the_table() -> None:
    table = re.findall(r"^\| ([A-Z]+) \| (\d+) \|", DOCUMENT, re.MULTILINE)
    assert {name: int(number) for name, number in table} == {
        verb.name: verb.value for verb in changes.Verb
    }
    assert (changes.WHOLE, changes.FIRST, changes.MORE, changes.LAST) == (1, 2, 3, 4)
    frames = read((LATER / "pion.wal.0").read_bytes())
    first = next(payload for _, op, payload in frames if op == 1)
    verb, count, length = struct.unpack_from("<BII", first)
    assert (verb, count, first[9 : 9 + length]) == (4, 2, b"text")


def test_limits_are_those_of_the_code() -> None:
    assert f"at most {framing.MAX_PAYLOAD:,}" in DOCUMENT
    assert framing.HEADER_BYTES == 32 and framing.FRAME_BYTES == 17 and framing.END == 255
