"""Frames of the binary lane: any cuts, any bytes, bodies straight into their targets."""

from __future__ import annotations

import random
import struct

import pytest

from pion_vllm_mlx.errors import CommandError, ProtocolError
from pion_vllm_mlx.wire.frames import (
    INLINE_BODY_BYTES,
    MAX_BODY_BYTES,
    BodyReader,
    Frame,
    FrameParser,
    frame,
    header,
)
from pion_vllm_mlx.wire.resp import BulkTarget, MemoryBulk


def body_of(one: Frame) -> bytes:
    return one.body if isinstance(one.body, bytes) else bytes(one.body.view)  # type: ignore[attr-defined]


def feed(
    parser: FrameParser, data: bytes, most: int = 1 << 30, alone: bool = False
) -> list[tuple[int, bytes]]:
    """Bring ``data`` in pieces of at most ``most`` bytes, pulling frames as they come.

    ``alone``: what comes first is asked for as the only frame.
    """
    found, at = [], 0
    while at < len(data):
        window = parser.get_buffer()
        assert window is not None and len(window), "the parser asks to pause"
        n = min(len(window), len(data) - at, most)
        window[:n] = data[at : at + n]
        at += n
        if alone and not parser.mid_frame:
            only = parser.only_frame(n)
            found += [(only.code, body_of(only))] if only is not None else []
        else:
            parser.buffer_updated(n)
        while (one := parser.next_frame()) is not None:
            found.append((one.code, body_of(one)))
    return found


def test_frames_are_the_protocol_s_bytes() -> None:
    assert frame(0xFF) == bytes.fromhex("5ecaff00000000")
    fetch = struct.pack("<H", 2) + b"s1" + struct.pack("<H", 7)
    assert frame(0x11, fetch) == bytes.fromhex("5eca1106000000020073310700")
    create = struct.pack("<H", 3) + b"s01" + struct.pack("<HH", 64, 64)
    assert frame(0x20, create) == bytes.fromhex("5eca2009000000030073303140004000")
    assert header(0x24, 1053) == bytes.fromhex("5eca241d040000")
    assert header(0, 1024) == bytes.fromhex("5eca0000040000")


LENGTHS = [0, 1, 6, 7, 8, 100, INLINE_BODY_BYTES - 7, INLINE_BODY_BYTES]
LENGTHS += [INLINE_BODY_BYTES + 1, 2 * INLINE_BODY_BYTES, 100_000]


@pytest.mark.parametrize("most", [1, 2, 7, 8, 1000, 16_384, 1 << 30])
def test_frames_come_out_whole_whatever_the_pieces(most: int) -> None:
    rng = random.Random(most)
    lengths = LENGTHS if most > 1 else LENGTHS[:7]
    sent = [(rng.randrange(256), rng.randbytes(n)) for n in rng.sample(lengths, len(lengths))]
    parser = FrameParser()
    assert feed(parser, b"".join(frame(code, body) for code, body in sent), most) == sent
    assert not parser.mid_frame


def test_a_body_s_place_is_asked_for_after_the_frame_before_it_was_pulled() -> None:
    asked: list[int] = []

    def open_body(code: int, length: int) -> BulkTarget:
        asked.append(code)
        return MemoryBulk(length)

    parser = FrameParser(open_body)
    data = frame(1, b"x") + frame(2, bytes(INLINE_BODY_BYTES + 1))
    window = parser.get_buffer()
    assert window is not None
    window[: len(data)] = data
    parser.buffer_updated(len(data))
    assert parser.next_frame() == Frame(1, b"x") and asked == []
    second = parser.next_frame()
    assert second is not None and second.code == 2 and asked == [2]


def test_a_parser_whose_frames_nobody_pulls_asks_to_pause() -> None:
    parser = FrameParser()
    while (window := parser.get_buffer()) is not None:
        ping = frame(3)[: len(window)]
        window[: len(ping)] = ping
        parser.buffer_updated(len(ping))
    pulled = 0
    while parser.next_frame() is not None:
        pulled += 1
    assert pulled > 1000 and parser.get_buffer() is not None


class NoRoom(MemoryBulk):
    """A target that has room for a few bytes at a time, when told so."""

    room = 0

    def buffer(self) -> memoryview | None:
        window = super().buffer()
        assert window is not None
        return window[: self.room] if self.room else None


def test_a_target_without_room_makes_the_parser_wait() -> None:
    target = NoRoom(INLINE_BODY_BYTES + 10)
    parser = FrameParser(lambda code, length: target)
    data = header(9, target.length) + bytes(range(250))
    window = parser.get_buffer()
    assert window is not None
    window[: len(data)] = data
    parser.buffer_updated(len(data))
    assert parser.next_frame() is None and parser.get_buffer() is None
    target.room = 3
    assert parser.get_buffer() is None, "bytes that came earlier go first"
    assert parser.next_frame() is None and target.filled == 250
    window = parser.get_buffer()
    assert window is not None and len(window) == 3
    assert parser.abandon() is target and not parser.mid_frame


@pytest.mark.parametrize("seed", range(60))
def test_an_only_frame_is_the_one_that_would_have_been_pulled(seed: int) -> None:
    rng = random.Random(seed)
    most_body = rng.choice((10, 1 << 16, 1 << 30))
    pulled, only = FrameParser(max_body=most_body), FrameParser(max_body=most_body)
    for _ in range(20):
        sent = [
            frame(rng.randrange(256), rng.randbytes(rng.choice((0, 0, 1, 7, 300, 9, 20_000))))
            for _ in range(rng.choice((1, 1, 1, 2, 3)))
        ]
        data = b"".join(sent)
        most = rng.choice((6, 7, len(data), len(sent[0]), 1 << 30))
        try:
            expected = feed(pulled, data, most)
        except ProtocolError:
            with pytest.raises(ProtocolError):
                feed(only, data, most, alone=True)
            return
        assert feed(only, data, most, alone=True) == expected


@pytest.mark.parametrize(
    "bad", [b"*1\r\n$4\r\nPING\r\n", header(3, 0)[::-1], header(3, MAX_BODY_BYTES + 1), b"\0" * 7]
)
def test_what_is_no_frame_is_refused_on_its_header(bad: bytes) -> None:
    parser = FrameParser()
    with pytest.raises(ProtocolError):
        feed(parser, frame(3) + bad)


def test_any_bytes_end_in_frames_or_a_refusal() -> None:
    """Mutated frames: what was sent before the damage comes out, nothing else happens."""
    rng = random.Random(20_261_129)
    refused = 0
    for _ in range(3000):
        sent = [(rng.randrange(256), rng.randbytes(rng.choice((0, 3, 40)))) for _ in range(4)]
        data = bytearray(b"".join(frame(code, body) for code, body in sent))
        for _ in range(rng.randrange(4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        parser = FrameParser(max_body=1 << 16)
        try:
            got = feed(parser, bytes(data), rng.choice((1, 5, 1000)))
            assert sum(7 + len(body) for _, body in got) <= len(data)
        except ProtocolError:
            refused += 1
    assert 100 < refused < 3000


def test_a_body_s_fields_are_read_in_order_and_the_rest_is_not_copied() -> None:
    data = struct.pack("<H", 3) + b"sid" + struct.pack("<HI", 7, 70_000) + b"tensor"
    body = BodyReader(data)
    assert (body.sid(), body.u16(), body.u32()) == (b"sid", 7, 70_000)
    rest = body.rest()
    assert rest == b"tensor" and rest.obj is data and rest.readonly
    body.end()


@pytest.mark.parametrize(
    "data", [b"", b"\x01", b"\x05\x00abc", b"\x00\x00", b"\xff\xff" + bytes(65_534)]
)
def test_a_body_that_ends_too_early_is_refused(data: bytes) -> None:
    with pytest.raises(CommandError):
        BodyReader(data).sid()


def test_bytes_left_over_are_refused() -> None:
    body = BodyReader(b"\x01\x00\x02")
    body.u16()
    with pytest.raises(CommandError, match="left over"):
        body.end()
