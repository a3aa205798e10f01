"""The operations of the binary lane, by opcode: LAYER.*, ATTEND.*, PING, AUTH.

An operation reads its fields from the body and answers a status and the pieces of the
reply's body, which are sent from where they lie. A refusal raises CommandError, what is
not there NotStored.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from pion_vllm_mlx.errors import AuthenticationRequired, CommandError, WrongPassword
from pion_vllm_mlx.formats import get_format
from pion_vllm_mlx.server.attention import frames
from pion_vllm_mlx.server.commands import attend_index
from pion_vllm_mlx.server.memory.attend_index import IndexShape, NotStored
from pion_vllm_mlx.server.memory.layer_store import Piece
from pion_vllm_mlx.server.outbound import GATHER_BYTES
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire.frames import MAX_BODY_BYTES, BodyReader, Status, header

Pieces: TypeAlias = list[Piece]
Answer: TypeAlias = tuple[Status, Pieces]
Outcome: TypeAlias = "Pieces | Awaitable[Pieces]"
Handler: TypeAlias = Callable[[Context, BodyReader], Outcome]


_OK = Status.OK
_NOTHING = header(_OK, 0)


@dataclass(frozen=True)
class Operation:
    """One opcode. ``long`` says that its body may be long and is then kept in memory.

    ``early``: its reply may be sent by the thread that makes it.
    """

    name: str
    handler: Handler
    long: bool = False
    no_auth: bool = False
    grows: bool = False
    early: bool = False


OPERATIONS: dict[int, Operation] = {}


def _operation(name: str, *opcodes: int, **options: bool) -> Callable[[Handler], Handler]:
    def enter(handler: Handler) -> Handler:
        for opcode in opcodes:
            OPERATIONS[opcode] = Operation(name, handler, **options)
        return handler

    return enter


def find(context: Context, opcode: int) -> Operation:
    """The operation of an opcode, if this connection may use it. Raises CommandError."""
    operation = OPERATIONS.get(opcode)
    needs_auth = operation is None or not operation.no_auth
    if context.server.config.password and not context.client.authenticated and needs_auth:
        raise AuthenticationRequired("Authentication required.")
    if operation is None:
        raise CommandError(f"unknown opcode {opcode:#04x}")
    if operation.grows:
        context.server.memory_limit.check()
    return operation


def answers_early(opcode: int) -> bool:
    """Whether the reply to an opcode may overtake what the event loop has not sent yet."""
    operation = OPERATIONS.get(opcode)
    return operation is not None and operation.early


def refusal(error: CommandError) -> Answer:
    """The answer for what was refused, or is not there."""
    if isinstance(error, NotStored):
        return Status.MISS, []
    status = Status.COLDMISS if error.code == "COLDMISS" else Status.ERROR
    return status, [f"{error.code} {error.sentence}".encode("utf-8", "surrogateescape")]


def short(answer: Answer) -> bytes:
    """The reply as one piece; nothing where it is a long one."""
    status, pieces = answer
    if not pieces and status is _OK:
        return _NOTHING
    length = sum(len(piece) for piece in pieces)
    return b"" if length > GATHER_BYTES else b"".join((header(status, length), *pieces))


@_operation("ping", 0x03, 0xFF)
def _ping(context: Context, body: BodyReader) -> Pieces:
    return []


@_operation("auth", 0x37, no_auth=True)
def _auth(context: Context, body: BodyReader) -> Pieces:
    config = context.server.config
    given = bytes(body.rest())
    if not config.password:
        raise CommandError("AUTH called without any password configured")
    counted = len(given) >= 2 and int.from_bytes(given[:2], "little") == len(given) - 2
    right = config.password_matches(given)
    if not right and not (counted and config.password_matches(given[2:])):
        raise WrongPassword("invalid username-password pair or user is disabled.")
    context.client.authenticated = True
    return []


@_operation("layer.store", 0x01, 0x10, long=True, grows=True)
def _layer_store(context: Context, body: BodyReader) -> Pieces:
    sid, layer = body.sid(), body.u16()
    context.server.memory.layers.store(sid, layer, body.rest())
    return []


@_operation("layer.extend", 0x13, long=True, grows=True)
def _layer_extend(context: Context, body: BodyReader) -> Pieces:
    sid, layer = body.sid(), body.u16()
    context.server.memory.layers.extend(sid, layer, body.rest())
    return []


@_operation("layer.fetch", 0x02, 0x11)
def _layer_fetch(context: Context, body: BodyReader) -> Pieces:
    sid, layer = body.sid(), body.u16()
    body.end()
    pieces = context.server.memory.layers.fetch(sid, layer)
    if pieces is None:
        raise NotStored("layer not found")
    return pieces


@_operation("layer.fetch_batch", 0x12, long=True)
def _layer_fetch_batch(context: Context, body: BodyReader) -> Pieces:
    sid = body.sid()
    layers = [body.u16() for _ in range(body.u16())]
    body.end()
    out: list[Piece] = []
    total = 0
    for layer in layers:
        pieces = context.server.memory.layers.fetch(sid, layer)
        length = sum(len(piece) for piece in pieces or ())
        status = Status.MISS if pieces is None else Status.OK
        out += [struct.pack("<BI", status, length), *(pieces or ())]
        total += 5 + length
    if total > MAX_BODY_BYTES:
        raise CommandError(f"a reply of {total} bytes is too long")
    return out


@_operation("attend.create", 0x20, grows=True)
def _attend_create(context: Context, body: BodyReader) -> Pieces:
    sid, key_dim, value_dim = body.sid(), body.u16(), body.u16()
    body.end()
    if not key_dim or not value_dim:
        raise CommandError("key_dim and value_dim must be at least 1")
    int8 = get_format("int8")
    shape = IndexShape(key_dim, value_dim, int8, 0, int8)
    return [struct.pack("<I", context.server.memory.index.create(sid, shape))]


@_operation("attend.store", 0x21, long=True, grows=True)
async def _attend_store(context: Context, body: BodyReader) -> Pieces:
    sid, layer, count = body.sid(), body.u16(), body.u32()
    rows = body.rest()
    if not count:
        raise CommandError("count must be at least 1")
    cut = 4 * count * context.server.memory.index.session(sid).shape.key_dim
    blobs = rows[:cut], rows[cut:]
    await attend_index.store_rows(context.server, sid, layer, count, blobs)
    return []


@_operation("attend.finalize", 0x22)
async def _attend_finalize(context: Context, body: BodyReader) -> Pieces:
    sid, layer = body.sid(), body.u16()
    body.end()
    await attend_index.finalize_layer(context.server, sid, layer)
    return []


@_operation("attend.query", 0x23, long=True)
async def _attend_query(context: Context, body: BodyReader) -> Pieces:
    sid, layer, k = body.sid(), body.u16(), body.u16()
    rows, _ = await attend_index.search(context.server, sid, layer, k, body.rest())
    return [rows]


_operation("attend.prefix.query_fused", 0x24, long=True, early=True)(frames.query_fused)


@_operation("moe.expert", *range(0x31, 0x37))
def _moe_expert(context: Context, body: BodyReader) -> Pieces:
    raise CommandError("UNAVAILABLE: expert paging is not supported")
