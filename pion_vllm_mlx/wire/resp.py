"""RESP2 and RESP3, sans-io: requests in, replies out, replies in.

::

    requests.py   bytes from a client  -> commands     (RequestParser, BulkTarget)
    inline.py     an inline command's quoting rules
    encode.py     values               -> reply bytes
    outgoing.py   commands             -> buffers to send (request_buffers)
    replies.py    bytes from a server  -> values       (ReplyParser)
"""

from __future__ import annotations

from pion_vllm_mlx.wire.encode import (
    CRLF,
    NULL_ARRAY,
    Map,
    NullArray,
    Set,
    Simple,
    Value,
    array_header,
    bulk,
    bulk_header,
    double,
    double_text,
    encode,
    error,
    integer,
    map_header,
    nil,
    set_header,
    simple,
    windows,
)
from pion_vllm_mlx.wire.inline import split_inline
from pion_vllm_mlx.wire.outgoing import Part, request_buffers
from pion_vllm_mlx.wire.replies import (
    INLINE_BULK_BYTES,
    OpenReplyBulk,
    Push,
    Reply,
    ReplyParser,
    allocate,
)
from pion_vllm_mlx.wire.requests import (
    Arg,
    BulkTarget,
    DiscardBulk,
    Limits,
    MemoryBulk,
    OpenBulk,
    RequestParser,
    open_in_memory,
)

__all__ = [
    "CRLF",
    "INLINE_BULK_BYTES",
    "NULL_ARRAY",
    "Arg",
    "BulkTarget",
    "DiscardBulk",
    "Limits",
    "Map",
    "MemoryBulk",
    "NullArray",
    "OpenBulk",
    "OpenReplyBulk",
    "Part",
    "Push",
    "Reply",
    "ReplyParser",
    "RequestParser",
    "Set",
    "Simple",
    "Value",
    "allocate",
    "array_header",
    "bulk",
    "bulk_header",
    "double",
    "double_text",
    "encode",
    "error",
    "integer",
    "map_header",
    "nil",
    "open_in_memory",
    "request_buffers",
    "set_header",
    "simple",
    "split_inline",
    "windows",
]
