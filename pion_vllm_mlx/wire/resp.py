"""RESP2 and RESP3, sans-io: requests in, replies out, replies in.

::

    requests.py   bytes from a client  -> commands     (RequestParser, BulkTarget)
    inline.py     an inline command's quoting rules
    encode.py     values               -> reply bytes
    replies.py    bytes from a server  -> values       (ReplyParser)
"""

from __future__ import annotations

from .encode import (
    CRLF,
    Map,
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
)
from .inline import split_inline
from .replies import OpenReplyBulk, Push, Reply, ReplyParser
from .requests import (
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
    "Arg",
    "BulkTarget",
    "DiscardBulk",
    "Limits",
    "Map",
    "MemoryBulk",
    "OpenBulk",
    "OpenReplyBulk",
    "Push",
    "Reply",
    "ReplyParser",
    "RequestParser",
    "Set",
    "Simple",
    "Value",
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
    "set_header",
    "simple",
    "split_inline",
]
