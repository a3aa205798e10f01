"""V.CREATE SCHEMA: layers of their own width and format, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.formats import get_format
from tests.conftest import RunningServer
from tests.server.wire import Wire, Word, refuse

BODY = "bf16_rope_fp8_body"


def rows(n: int, width: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)


@pytest.mark.parametrize(
    ("fragment", "words"),
    [
        ("exceeds", (64, "SCHEMA", 60)),
        ("exceeds", (64, "SCHEMA", 60, *["fmt=fp16"] * 60)),
        ("specs are needed", (64, "SCHEMA", 2, "fmt=fp16")),
        ("specs are needed", (64, "SCHEMA", 1, "fmt=fp16", "fmt=fp16")),
        ("specs are needed", (64, "SCHEMA", 1, "fmt=fp16", "VQUANT", "fp16")),
        ("number of layers", (64, "SCHEMA")),
        ("N", (64, "SCHEMA", 0)),
        ("N", (64, "SCHEMA", "abc", "fmt=fp16")),
        ("unknown key", (64, "SCHEMA", 1, "fmt=fp16,block=32")),
        ("unknown key", (64, "SCHEMA", 1, "fmt=fp16,")),
        ("unknown key", (64, "SCHEMA", 1, "")),
        ("S-tensor reserved", (64, "SCHEMA", 1, "fmt=fp16,s=1")),
        ("S-tensor reserved", (64, "SCHEMA", 2, "fmt=fp16", "s=,fmt=fp8")),
        ("fmt= is needed", (64, "SCHEMA", 1, "dim=64")),
        ("lacks its value", (64, "SCHEMA", 1, "fmt")),
        ("given twice", (64, "SCHEMA", 1, "fmt=fp16,fmt=fp8")),
        ("unknown fmt", (64, "SCHEMA", 1, "fmt=fp64")),
        ("unknown fmt", (64, "SCHEMA", 1, "fmt=raw:16")),
        ("unknown fmt", (64, "SCHEMA", 1, f"fmt={BODY}:32")),
        ("dim= is needed", (0, "SCHEMA", 2, "fmt=fp16,dim=8", "fmt=fp16")),
        ("dim", (64, "SCHEMA", 1, "fmt=fp16,dim=0")),
        ("dim", (64, "SCHEMA", 1, "fmt=fp16,dim=65537")),
        ("dim", (65537, "SCHEMA", 1, "fmt=fp16")),
        *[
            ("multiple of 32", (64, "SCHEMA", 2, "fmt=fp16", f"fmt={name},dim=80"))
            for name in ("fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")
        ],
        ("rope=", (96, "SCHEMA", 1, f"fmt={BODY}")),
        ("rope", (96, "SCHEMA", 1, f"fmt={BODY},rope=96")),
        ("rope", (96, "SCHEMA", 1, f"fmt={BODY},rope=0")),
        ("rope", (96, "SCHEMA", 1, f"fmt={BODY},rope=128")),
        ("multiple of 32", (100, "SCHEMA", 1, f"fmt={BODY},rope=32")),
        ("rope=", (96, "SCHEMA", 1, "fmt=fp8,rope=32")),
        ("SCHEMA", (96, "VQUANT", BODY)),
        ("SCHEMA", (96, "VQUANT", f"{BODY}:32")),
        ("unknown option", (96, "VQUANT", "fp8", "SCHEMA", 1, "fmt=fp8")),
        ("dim", (0, "VQUANT", "fp8")),
    ],
)
def test_a_schema_that_cannot_be_is_refused(
    wire: Wire, ns: str, fragment: str, words: tuple[Word, ...]
) -> None:
    refuse(wire, fragment, "V.CREATE", ns, *words)
    assert wire.ask("V.INFO", ns) is None


def test_a_namespace_has_no_format_that_only_a_schema_has(wire: Wire, ns: str) -> None:
    refuse(wire, f"unknown vquant '{BODY}'", "KV.PREFIX.REGISTER", ns, 96, BODY)
    refuse(wire, "SCHEMA", "KV.PREFIX.REGISTER", ns, 96, f"{BODY}:32")
    leaf = '[{"k":96,"v":96,"heads":1,"format":"' + BODY + ':32"}]'
    refuse(wire, "SCHEMA", "KV.PREFIX.REGISTER", ns, 96, "fp16", "LEAVES", leaf)


MIXED = ("fmt=fp16", f"fmt={BODY},rope=64,dim=576", "FMT=Turbo4,DIM=128", "fmt=fp8", "fmt=int8")
MIXED_LAYERS = ((64, "fp16"), (576, f"{BODY}:64"), (128, "turbo4"), (64, "fp8"), (64, "int8"))


def test_every_layer_of_a_schema_has_its_own_width_and_format(wire: Wire, ns: str) -> None:
    slot = wire.ask("V.CREATE", ns, 64, "schema", 5, *MIXED)
    assert isinstance(slot, int) and slot >= 0
    assert wire.ask("V.CREATE", ns, 64, "SCHEMA", 5, *MIXED) == slot
    info = wire.info("V.INFO", ns)
    assert info["schema"] == "heterogeneous"
    assert info["v_format"] == "fp16"
    assert [info[f"layer_{n}_dim"] for n in range(5)] == ["64", "576", "128", "64", "64"]
    formats = ["fp16", BODY, "turbo4", "fp8", "int8"]
    assert [info[f"layer_{n}_fmt"] for n in range(5)] == formats
    assert info["layer_1_rope"] == "64"
    assert "layer_0_tokens" not in info
    for layer, (width, name) in enumerate(MIXED_LAYERS):
        values = rows(7, width, layer)
        kind = get_format(name)
        wire.ok("V.STOREBATCH", ns, layer, 0, 7, values.tobytes())
        stored = wire.ask("V.FETCH", ns, layer, "RANGE", 0, 7, "FMT", "STORED")
        assert stored == kind.encode(values).tobytes()
        expected = kind.decode(kind.encode(values))
        assert wire.ask("V.FETCH", ns, layer, "RANGE", 0, 7) == expected.tobytes()
        assert wire.ask("V.FETCH", ns, layer, 6, 0) == expected[[6, 0]].tobytes()
    native = wire.ask("V.FETCH", ns, "BATCH", 0, 9, "FMT", "NATIVE")
    assert [len(part) for part in native] == [
        9 * 64 * 2,
        9 * 576 * 4,
        9 * 128 * 4,
        9 * 256,
        9 * 256,
    ]
    for part, (width, name) in zip(native, MIXED_LAYERS, strict=True):
        tail = 2 * width * (2 if name == "fp16" else 4)
        assert part[-tail:] == bytes(tail), name  # zero-filled, without a sign


def test_a_layer_behind_the_schema_has_the_default_width_in_int8(wire: Wire, ns: str) -> None:
    wire.ask("V.CREATE", ns, 8, "SCHEMA", 1, "fmt=fp16,dim=32")
    values = rows(2, 8)
    wire.ok("V.STOREBATCH", ns, 3, 0, 2, values.tobytes())
    expected = get_format("int8").encode(values).tobytes()
    assert wire.ask("V.FETCH", ns, 3, "RANGE", 0, 2, "FMT", "STORED") == expected
    wire.ask("V.CREATE", f"{ns}b", 0, "SCHEMA", 1, "fmt=fp16,dim=32")
    refuse(wire, "no dimension", "V.STOREBATCH", f"{ns}b", 1, 0, 2, values.tobytes())


def test_a_schema_of_equal_layers_is_uniform(wire: Wire, ns: str) -> None:
    wire.ask("V.CREATE", ns, 0, "SCHEMA", 2, "fmt=fp8,dim=64", "dim=64,fmt=fp8")
    info = wire.info("V.INFO", ns)
    assert (info["schema"], info["v_format"]) == ("uniform", "fp8")
    assert not [key for key in info if key.startswith("layer_")]
    wire.ask("V.CREATE", f"{ns}b", 64, "SCHEMA", 1, "fmt=fp8")
    assert wire.info("V.INFO", f"{ns}b")["v_format"] == "fp8"
    wire.ask("V.CREATE", f"{ns}c", 0, "SCHEMA", 1, f"fmt={BODY},dim=96,rope=32")
    assert wire.info("V.INFO", f"{ns}c")["v_format"] == BODY


def test_another_schema_for_a_session_with_rows_is_refused(wire: Wire, ns: str) -> None:
    wire.ask("V.CREATE", ns, 64, "SCHEMA", 1, "fmt=fp8")
    wire.ask("V.CREATE", ns, 64, "SCHEMA", 1, "fmt=fp16")  # it was empty
    wire.ok("V.STOREBATCH", ns, 0, 0, 1, rows(1, 64).tobytes())
    for words in (("SCHEMA", 1, "fmt=fp8"), ("SCHEMA", 2, "fmt=fp16", "fmt=fp16"), ()):
        refuse(wire, "already exists with a different schema", "V.CREATE", ns, 64, *words)


def test_fifty_nine_layers_are_possible_and_two_schemas_make_a_namespace(
    wire: Wire, ns: str
) -> None:
    for side in ("_pk", "_pv"):
        assert isinstance(wire.ask("V.CREATE", ns + side, 32, "SCHEMA", 59, *["fmt=fp8"] * 59), int)
    assert wire.ask("KV.PREFIX.LOOKUP", ns) == "HIT"
    assert len(wire.ask("V.FETCH", f"{ns}_pk", "BATCH", 0, 1)) == 59


def test_free_is_another_name_of_drop(wire: Wire, ns: str) -> None:
    wire.ask("V.CREATE", ns, 64)
    assert wire.ask("V.FREE", ns, f"{ns}-never") == 1
    assert wire.ask("V.INFO", ns) is None


FORMATS = ("fp16", "bf16", "fp32", "int8", "fp8", "turbo4", "turbo3", "turbo2", "mlx4g32")


def test_every_format_survives_both_ways_of_a_restart(pion_server: RunningServer) -> None:
    values = rows(300, 96)
    asked = [("V.FETCH", "s", "BATCH", 0, 300), ("V.FETCH", "s", "BATCH", 0, 300, "FMT", "STORED")]
    asked += [("V.FETCH", name, 0, "RANGE", 0, 300) for name in FORMATS]
    with Wire.tcp(pion_server.port) as wire:
        specs = [*(f"fmt={name}" for name in FORMATS), f"fmt={BODY},rope=32"]
        wire.ask("V.CREATE", "s", 96, "SCHEMA", len(specs), *specs)
        for layer in range(len(specs)):
            for at, n in ((0, 3), (3, 290), (293, 7)):
                wire.ok("V.STOREBATCH", "s", layer, at, n, values[at : at + n].tobytes())
        for name in FORMATS:
            wire.ask("V.CREATE", name, 96, "VQUANT", name)
            wire.ok("V.STOREBATCH", name, 0, 0, 300, values.tobytes())
            kind = get_format(name)
            fetched = wire.ask("V.FETCH", name, 0, "RANGE", 0, 300)
            assert fetched == kind.decode(kind.encode(values)).tobytes()
        before = [wire.ask(*words) for words in asked]
        info = wire.ask("V.INFO", "s")
    for save in (False, True, False):
        if save:
            with Wire.tcp(pion_server.port) as wire:
                wire.ok("KV.PREFIX.SAVE")
        pion_server.restart()
        with Wire.tcp(pion_server.port) as wire:
            assert [wire.ask(*words) for words in asked] == before
            assert wire.ask("V.INFO", "s") == info
