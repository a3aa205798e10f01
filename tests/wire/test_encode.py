"""Values take the wire form that RESP2 or RESP3 has for them."""

from __future__ import annotations

import math

import pytest

from pion_vllm_mlx.errors import CommandError, OutOfMemory
from pion_vllm_mlx.wire import resp
from pion_vllm_mlx.wire.resp import Map, Set, Simple, Value


@pytest.mark.parametrize(
    ("value", "in_resp2", "in_resp3"),
    [
        (Simple("OK"), b"+OK\r\n", b"+OK\r\n"),
        ("OK", b"$2\r\nOK\r\n", b"$2\r\nOK\r\n"),
        (b"\r\n\0", b"$3\r\n\r\n\0\r\n", b"$3\r\n\r\n\0\r\n"),
        (b"", b"$0\r\n\r\n", b"$0\r\n\r\n"),
        ("é", b"$2\r\n\xc3\xa9\r\n", b"$2\r\n\xc3\xa9\r\n"),
        ("\udcff", b"$1\r\n\xff\r\n", b"$1\r\n\xff\r\n"),
        (CommandError("\ud800"), b"-ERR \\ud800\r\n", b"-ERR \\ud800\r\n"),
        (-7, b":-7\r\n", b":-7\r\n"),
        (True, b":1\r\n", b":1\r\n"),
        (None, b"$-1\r\n", b"_\r\n"),
        (0.5, b"$3\r\n0.5\r\n", b",0.5\r\n"),
        (3.0, b"$1\r\n3\r\n", b",3\r\n"),
        (math.inf, b"$3\r\ninf\r\n", b",inf\r\n"),
        ([], b"*0\r\n", b"*0\r\n"),
        ([1, [b"a"]], b"*2\r\n:1\r\n*1\r\n$1\r\na\r\n", b"*2\r\n:1\r\n*1\r\n$1\r\na\r\n"),
        (Map([(b"a", 1)]), b"*2\r\n$1\r\na\r\n:1\r\n", b"%1\r\n$1\r\na\r\n:1\r\n"),
        (Map(), b"*0\r\n", b"%0\r\n"),
        (Set([1, 2]), b"*2\r\n:1\r\n:2\r\n", b"~2\r\n:1\r\n:2\r\n"),
        (OutOfMemory("full"), b"-OOM full\r\n", b"-OOM full\r\n"),
    ],
)
def test_a_value_has_one_form_a_protocol(value: Value, in_resp2: bytes, in_resp3: bytes) -> None:
    assert resp.encode(value, 2) == in_resp2
    assert resp.encode(value, 3) == in_resp3


@pytest.mark.parametrize("text", ["a\r\nb", "\n+OK", "x\r"])
def test_a_line_end_cannot_leave_its_line(text: str) -> None:
    for line in (resp.simple(text), resp.error("ERR", text), resp.encode(CommandError(text), 3)):
        assert line.count(b"\r\n") == 1
        assert line.endswith(b"\r\n")
        assert b"\n" not in line[:-2]
        assert b"\r" not in line[:-2]


@pytest.mark.parametrize("x", [0.1, 1e300, -2.5e-8, 1e15, 123456789.25, -0.0])
def test_a_double_reads_back_equal(x: float) -> None:
    back = float(resp.double_text(x))
    assert back == x
    assert math.copysign(1, back) == math.copysign(1, x)


def test_a_type_without_a_form_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dict"):
        resp.encode({"a": 1}, 3)  # type: ignore[arg-type]
