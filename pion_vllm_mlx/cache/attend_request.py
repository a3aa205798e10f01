"""What is asked of attention at the server: its values, checked, and as they travel.

Letters: H_q query heads, H_kv stored heads, M query tokens, S suffix tokens, D head dimension;
all arrays are float32. Nothing here knows a connection: what does not fit together, or fits no
field, is refused before anything is sent.
"""

from __future__ import annotations

import operator
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.wire.resp import Part

Floats = NDArray[np.float32]

_MAX_U16, _MAX_U32 = (1 << 16) - 1, (1 << 32) - 1
_SELECTORS = {"": 0, "block_mean": 0, "block-mean": 0, "quest": 1}


@dataclass(frozen=True)
class Slot:
    """A resident layer: its session id, and the namespace that says on which worker it is.

    Raises TypeError for a namespace that is no text, ValueError for one that is empty, for a
    session id of more than 65,535 bytes and for a layer past 65,535.
    """

    namespace: str
    sid: str
    layer: int

    def __post_init__(self) -> None:
        check_namespace(self.namespace)
        if not 0 <= whole_number(self.layer, "layer_id") <= _MAX_U16:
            raise ValueError(f"a layer is 0 to {_MAX_U16}, not {self.layer}")
        if len(self.encoded) > _MAX_U16:
            raise ValueError(f"a session id has at most {_MAX_U16} bytes, not {len(self.encoded)}")

    @property
    def encoded(self) -> bytes:
        """The session id as it travels."""
        return self.sid.encode("utf-8", "surrogateescape")


@dataclass(frozen=True)
class Query:
    """Queries ``[H_q, M, D]`` beside a suffix ``[H_kv, S, D]``; S may be 0.

    ``head_map`` names the stored head of each query head, a byte each; empty is the identity.
    ``window`` None or -1 asks for the server's own, 0 for the whole prefix. Raises ValueError
    for what does not fit together: the binary lane says no lengths, there it would be read
    as something else.
    """

    q: Floats
    keys: Floats
    values: Floats
    head_map: bytes
    window: int | None = None

    def __post_init__(self) -> None:
        _check_window(self.window)
        heads, kv_heads, dim = self.q.shape[0], self.keys.shape[0], self.q.shape[2]
        if not self.q.shape[1]:
            raise ValueError(f"Q of shape {self.q.shape} holds no query: M must be 1 or more")
        if self.keys.shape != self.values.shape:
            raise ValueError(f"K of shape {self.keys.shape} and V of shape {self.values.shape}")
        if dim != self.keys.shape[2]:
            raise ValueError(f"Q of head dimension {dim}, K of {self.keys.shape[2]}")
        if max(heads, kv_heads, dim) > _MAX_U16:
            raise ValueError(f"{heads} and {kv_heads} heads of {dim} values are too many")
        named = len(self.head_map) or kv_heads
        if named != heads:
            raise ValueError(f"head_map names the stored heads of {named} query heads, not {heads}")
        if self.head_map and max(self.head_map) >= kv_heads:
            raise ValueError(f"head_map names head {max(self.head_map)} of {kv_heads}")

    @property
    def whole_head_map(self) -> bytes:
        """A byte for each query head, the identity spelled out. Raises ValueError past 256."""
        return self.head_map or bytes(range(self.q.shape[0]))

    @property
    def num_bytes(self) -> int:
        return int(2 * self.q.nbytes + self.keys.nbytes + self.values.nbytes)


@dataclass(frozen=True)
class Sparse:
    """Which blocks a query sees: ``top`` of blocks of ``block`` tokens; selector 0 or 1."""

    block: int
    top: int
    selector: int = 0

    def __post_init__(self) -> None:
        for name, number in (("B", self.block), ("K_top", self.top)):
            if number < 1:
                raise ValueError(f"{name} must be 1 or more, not {number}")


@dataclass(frozen=True)
class Ancestor:
    """A namespace that another one continues after so many of its rows, and its record."""

    namespace: str
    rows: int
    record: str


@dataclass(frozen=True)
class Whole:
    """What a namespace must hold for WARM to take it: the tokens of each layer, and the
    SHA-256 of its completion record, from before its rows are read until they are resident;
    an empty one asks for none. ``chain``: the tokens begin with the rows of these, the root
    first; None asks a namespace that has all of them, and no more.
    """

    tokens: int
    record: str = ""
    chain: tuple[Ancestor, ...] | None = None

    @property
    def options(self) -> list[Part]:
        """The words for it behind KV.PREFIX.WARM's own."""
        words: list[Part] = ["TOKENS", self.tokens]
        words += ["RECORD", self.record] if self.record else []
        if self.chain is not None:
            words += ["CHAIN", len(self.chain)]
            for one in self.chain:
                words += [one.namespace, one.rows, one.record]
        return words


def selector_number(name: str) -> int:
    """The selector of a name; raises ValueError for another one."""
    if name not in _SELECTORS:
        raise ValueError(f"unknown selector {name!r}; known: block_mean, quest")
    return _SELECTORS[name]


def query_command(slot: Slot, q: Floats, top_k: int, window: int | None) -> list[Part]:
    """The words of queries ``[H_kv, M, D]`` over the prefix alone."""
    heads, _, dim = q.shape
    command: list[Part] = ["ATTEND.PREFIX.QUERY", slot.sid, slot.layer, heads, dim, top_k]
    return [*command, np.ascontiguousarray(q), *_window(window)]


def fused_command(slot: Slot, query: Query) -> list[Part]:
    """The words of a fused query on RESP."""
    heads, _, dim = query.q.shape
    command: list[Part] = ["ATTEND.PREFIX.QUERY_FUSED", slot.sid, slot.layer, heads, dim]
    command += [query.keys.shape[1], query.keys.shape[0], query.q, query.keys, query.values]
    return [*command, query.head_map, *_window(query.window)]


def sparse_command(slot: Slot, query: Query, chosen: Sparse) -> list[Part]:
    """The words of a query over the best blocks, with the suffix where there is one."""
    heads, _, dim = query.q.shape
    name = "ATTEND.PREFIX.QUERY_SPARSE_AUTO"
    head: list[Part] = [slot.sid, slot.layer, heads, dim, chosen.block, chosen.top]
    head.append(query.keys.shape[0])
    tail: list[Part] = [query.head_map]
    tail += _window(query.window) or ([-1] if chosen.selector else [])
    tail += [chosen.selector] if chosen.selector else []
    if not query.keys.shape[1]:
        return [name, *head, query.q, *tail]
    suffix: list[Part] = [query.keys.shape[1], query.q, query.keys, query.values]
    return [f"{name}_FUSED", *head, *suffix, *tail]


def _window(window: int | None) -> list[Part]:
    _check_window(window)
    return [] if window is None else [int(window)]


def _check_window(window: int | None) -> None:
    if window is not None and not -1 <= whole_number(window, "fa_window") <= _MAX_U32:
        raise ValueError(f"a window is 0 to {_MAX_U32}, or -1 for the server's own, not {window}")


def check_namespace(namespace: Any) -> None:
    """Raises TypeError for what is no text, ValueError for an empty one."""
    if not isinstance(namespace, str):
        raise TypeError(f"namespace is a text, not {namespace!r}")
    if not namespace:
        raise ValueError("the namespace must be a text that is not empty")


def whole_number(value: Any, name: str) -> int:
    """A Python int, or one of numpy's. Raises TypeError naming it for a float, a bool, a text."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is a whole number, not {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is a whole number, not {value!r}") from None


def fused_body(slot: Slot, query: Query) -> bytes:
    """A fused query as the body of a frame."""
    heads, rows, dim = query.q.shape
    sid = slot.encoded
    head = struct.pack("<H", len(sid)) + sid
    head += struct.pack("<HHHH", slot.layer, heads, dim, query.keys.shape[0])
    head += struct.pack("<II", rows, query.keys.shape[1])
    parts = [head, query.q.tobytes(), query.keys.tobytes(), query.values.tobytes()]
    parts.append(query.whole_head_map)
    if query.window is not None and query.window >= 0:
        parts.append(struct.pack("<I", query.window))  # without one the server takes its own
    return b"".join(parts)
