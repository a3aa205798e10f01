"""The completion record: the last write of a store, and the only thing that makes a hit.

It lies under sid ``<namespace>`` layer 65535 of SSM.PREFIX. All integers are little
endian.

=========  =======  ==========================================================
offset     type     meaning
=========  =======  ==========================================================
0          8 bytes  magic ``PIONDONE``
8          u32      format version, 1
12         u32      J, bytes of the JSON part
16         u32      N, number of tokens
20         J bytes  JSON, UTF-8: identity, slots, leaves, runs, states
20+J       u32[N]   token ids
20+J+4N    u32      CRC-32C of everything before it
=========  =======  ==========================================================

Every version keeps the magic, the version at offset 8 and the CRC at the end, so
that damage and a newer version are told apart. The checksum does not protect
against someone who writes a record on purpose.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from crc32c import crc32c
from numpy.typing import NDArray

from pion_vllm_mlx.cache.identity_names import first_difference
from pion_vllm_mlx.errors import DamagedData, NewerFormat

COMPLETION_LAYER = 65535
VERSION = 1

_MAGIC = b"PIONDONE"
_HEAD = struct.Struct("<8sIII")
_CRC = struct.Struct("<I")

TokenIds = NDArray[np.uint32]


@dataclass(frozen=True)
class Run:
    """Rows ``[start, start + rows)`` of one side of a leaf, as they were sent.

    ``crc`` is the CRC-32C of the run's bytes in that format and layout.
    """

    layer: int
    side: Literal["k", "v"]
    start: int
    rows: int
    format: str
    layout: str
    crc: int


@dataclass(frozen=True)
class StateSum:
    """Checksum and length of the blob of one recurrent slot."""

    slot: int
    crc: int
    length: int


@dataclass(frozen=True)
class CompletionRecord:
    """What was stored under a namespace, entirely.

    ``ids`` are the tokens of the prefix, uint32; ``slots`` the metadata of
    ``layers.dismantle``; ``leaves`` one JSON object a leaf as in LEAVES.
    """

    identity: dict[str, Any]
    ids: TokenIds
    slots: list[dict[str, Any]]
    leaves: list[dict[str, Any]]
    runs: list[Run] = field(default_factory=list)
    states: list[StateSum] = field(default_factory=list)
    prefill_ms: float = 0.0

    def encode(self) -> bytes:
        """The bytes of the record."""
        text = json.dumps(
            {
                "identity": self.identity,
                "slots": self.slots,
                "leaves": self.leaves,
                "runs": [list(vars(run).values()) for run in self.runs],
                "states": [list(vars(state).values()) for state in self.states],
                "prefill_ms": self.prefill_ms,
            },
            separators=(",", ":"),
        ).encode()
        ids = np.ascontiguousarray(self.ids, "<u4")
        head = _HEAD.pack(_MAGIC, VERSION, len(text), ids.size)
        body = b"".join([head, text, ids.tobytes()])
        return body + _CRC.pack(crc32c(body))

    @staticmethod
    def decode(blob: bytes | bytearray | memoryview) -> CompletionRecord:
        """The record in ``blob``.

        Raises DamagedData for bytes that do not verify, NewerFormat for a record of a
        version that this one does not know.
        """
        view = memoryview(blob).cast("B")
        if len(view) < _HEAD.size + _CRC.size:
            raise DamagedData("completion record: cut short")
        (stored,) = _CRC.unpack_from(view, len(view) - _CRC.size)
        if crc32c(view[: -_CRC.size]) != stored:
            raise DamagedData("completion record: checksum does not match")
        magic, version, text_bytes, count = _HEAD.unpack_from(view)
        if magic != _MAGIC:
            raise DamagedData("completion record: not one")
        if version > VERSION:
            raise NewerFormat(f"completion record of version {version}, known is {VERSION}")
        if len(view) != _HEAD.size + text_bytes + 4 * count + _CRC.size:
            raise DamagedData("completion record: lengths do not add up")
        ids_at = _HEAD.size + text_bytes
        ids = np.frombuffer(view[ids_at : ids_at + 4 * count], "<u4")
        try:
            return _from_json(json.loads(bytes(view[_HEAD.size : ids_at])), ids)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"completion record: {error!r}") from error

    def mismatch(self, identity: dict[str, Any], ids: TokenIds) -> str | None:
        """Why this record is not a hit for ``identity`` and ``ids``, or None if it is.

        Names the first field of the key that differs, or the first token.
        """
        differing = first_difference(self.identity, identity)
        if differing is not None:
            return f"key field {differing} differs from the stored prefix"
        if np.array_equal(self.ids, ids):
            return None
        common = min(self.ids.size, ids.size)
        unequal = np.flatnonzero(self.ids[:common] != ids[:common])
        if unequal.size:
            return f"token {int(unequal[0])} differs from the stored prefix"
        return f"{ids.size} tokens were asked for, the stored prefix has {self.ids.size}"


def looks_like_one(blob: bytes) -> bool:
    """Whether bytes begin as a completion record of any version does."""
    return blob.startswith(_MAGIC)


def token_ids(ids: Sequence[int] | Any) -> TokenIds:
    """Token ids as uint32 ``[N]``.

    Raises ValueError for an empty or nested list, and for what is not an integer in
    0 … 2**32-1.
    """
    array = np.asarray(ids)
    if array.ndim != 1:
        raise ValueError(f"token ids must be one flat list, not {array.ndim}-dimensional")
    if array.size == 0:
        raise ValueError("token ids must not be empty")
    if array.dtype.kind not in "iu":
        raise ValueError(f"token ids must be integers, not {array.dtype}")
    if int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
        raise ValueError("token ids must lie between 0 and 4294967295")
    return array.astype("<u4")


def _from_json(parts: dict[str, Any], ids: TokenIds) -> CompletionRecord:
    record = CompletionRecord(
        identity=parts["identity"],
        ids=ids,
        slots=parts["slots"],
        leaves=parts["leaves"],
        runs=[Run(*values) for values in parts["runs"]],
        states=[StateSum(*values) for values in parts["states"]],
        prefill_ms=float(parts["prefill_ms"]),
    )
    if not isinstance(record.identity, dict) or not isinstance(record.slots, list):
        raise TypeError("identity or slots of another type")
    return record
