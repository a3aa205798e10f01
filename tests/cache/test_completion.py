"""Only a whole completion record of the same key and tokens makes a hit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from crc32c import crc32c

from pion_vllm_mlx.cache.completion import CompletionRecord, Run, StateSum, token_ids
from pion_vllm_mlx.errors import DamagedData, NewerFormat


def record(ids: list[int] | None = None) -> CompletionRecord:
    return CompletionRecord(
        identity={"weights": "ab", "args": {"rope_theta": 1e4, "layers": [1, 2]}},
        ids=token_ids(ids or [5, 6, 0xFFFFFFFF]),
        slots=[{"class": "KVCache", "offset": 3}],
        leaves=[{"k": 64, "v": 64, "heads": 2, "format": "bf16"}],
        runs=[Run(0, "k", 0, 3, "bf16", "HND", 0xFFFFFFFF), Run(0, "v", 0, 3, "bf16", "HND", 1)],
        states=[StateSum(1, 77, 4096)],
        prefill_ms=12.5,
    )


def test_a_record_comes_back_equal() -> None:
    back = CompletionRecord.decode(memoryview(bytearray(record().encode())))
    assert back.ids.tolist() == [5, 6, 0xFFFFFFFF]
    assert {k: v for k, v in vars(back).items() if k != "ids"} == {
        k: v for k, v in vars(record()).items() if k != "ids"
    }


def test_any_flipped_byte_is_damage() -> None:
    blob = record().encode()
    for at in range(len(blob)):
        for bit in (0x01, 0x80):
            broken = bytearray(blob)
            broken[at] ^= bit
            with pytest.raises(DamagedData):
                CompletionRecord.decode(broken)


def test_any_cut_or_extension_is_damage() -> None:
    blob = record().encode()
    for length in range(len(blob)):
        with pytest.raises(DamagedData):
            CompletionRecord.decode(blob[:length])
    with pytest.raises(DamagedData):
        CompletionRecord.decode(blob + b"\0")


def signed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


def test_a_newer_version_is_told_from_damage() -> None:
    body = bytearray(record().encode()[:-4])
    body[8:12] = struct.pack("<I", 2)
    with pytest.raises(NewerFormat, match="version 2"):
        CompletionRecord.decode(signed(bytes(body)))


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b'{"identity": 3}', b"\xff"])
def test_a_verified_record_that_says_nonsense_is_damage(text: bytes) -> None:
    body = struct.pack("<8sIII", b"PIONDONE", 1, len(text), 1) + text + b"\0" * 4
    with pytest.raises(DamagedData):
        CompletionRecord.decode(signed(body))


def test_a_mismatch_names_the_first_differing_field_or_token() -> None:
    stored = record([1, 2, 3, 4])
    same = stored.identity
    assert stored.mismatch(dict(same), token_ids([1, 2, 3, 4])) is None
    assert stored.mismatch(same, token_ids([1, 2, 9, 9])) == (
        "token 2 differs from the stored prefix"
    )
    assert "the stored prefix has 4" in str(stored.mismatch(same, token_ids([1, 2])))
    assert "5 tokens were asked for" in str(stored.mismatch(same, token_ids([1, 2, 3, 4, 5])))
    other = {"weights": "ab", "args": {"rope_theta": 2e4, "layers": [1, 2]}}
    assert "args.rope_theta" in str(stored.mismatch(other, stored.ids))
    other = {"weights": "ab", "args": {"rope_theta": 1e4, "layers": [1, 3]}}
    assert "args.layers[1]" in str(stored.mismatch(other, stored.ids))
    assert "tenant" in str(stored.mismatch({**same, "tenant": "x"}, stored.ids))
    assert "weights" in str(stored.mismatch({"args": same["args"]}, stored.ids))


@pytest.mark.parametrize(
    "ids",
    [[], [[1, 2]], [1.0, 2.0], ["a"], [-1], [1 << 32], [True, False], np.zeros((1, 3), int), 7],
    ids=str,
)
def test_what_is_no_list_of_token_ids_is_refused(ids: object) -> None:
    with pytest.raises(ValueError, match="token ids"):
        token_ids(ids)


def test_token_ids_accept_what_holds_integers() -> None:
    import mlx.core as mx

    for ids in ([3, 4], (3, 4), np.array([3, 4], np.int64), mx.array([3, 4])):
        assert token_ids(ids).tolist() == [3, 4]
        assert token_ids(ids).dtype == np.uint32
