"""Prefixes that begin alike over one pool: the same rows, and what is equal once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import api
from pion_vllm_mlx.kernels.api import Affine, Prefix, Selection
from pion_vllm_mlx.kernels.host import Sides
from pion_vllm_mlx.kernels.paging import BLOCK_TOKENS, first_block, pooled
from pion_vllm_mlx.kernels.prefix import arrays_of
from tests.kernels import cases

KINDS = ("fp32", "fp16", "bf16", "4 bits", "8 bits, bf16")
HEADS, DIM = 2, 64


def cut(side: Any, first: int, end: int) -> Any:
    pick = lambda array: np.ascontiguousarray(array[:, first:end])  # noqa: E731
    return side.mapped(pick) if isinstance(side, Affine) else pick(side)


def behind(one: Any, other: Any) -> Any:
    if not isinstance(one, Affine):
        return np.concatenate([one, other], axis=1)
    pairs = [(getattr(one, n), getattr(other, n)) for n in ("codes", "scales", "biases")]
    return Affine(*(np.concatenate(pair, axis=1) for pair in pairs), one.bits, one.group)


def drawn(rng: np.random.Generator, tokens: int, kind: str) -> Prefix:
    return cases.prefix(rng, (HEADS, tokens, DIM), kind)


def going_on(whole: Prefix, at: int, more: Prefix) -> Prefix:
    """The first tokens of one prefix and all of another."""
    sides = [
        behind(cut(mine, 0, at), cut(own, 0, more.num_tokens))
        for mine, own in ((whole.keys, more.keys), (whole.values, more.values))
    ]
    return Prefix(*sides, at + more.num_tokens)


def answers(prefix: Prefix, q: Any) -> list[Any]:
    found = [
        api.attend(q, prefix),
        api.attend(q, prefix, window=70),
        api.attend_sparse_auto(q[:, 0], prefix, Selection(16, 3)),
    ]
    return [array for one in found for array in (one.out, one.lse)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_holds_the_same_rows_and_what_is_equal_once(
    rng: np.random.Generator, kind: str
) -> None:
    root = drawn(rng, 300, kind)
    family = [
        root,
        going_on(root, 200, drawn(rng, 90, kind)),
        going_on(root, 64, drawn(rng, 1, kind)),
        going_on(root, 30, drawn(rng, 200, kind)),
    ]
    assert len({first_block(one) for one in family[:3]}) == 1
    assert first_block(family[3]) != first_block(root)
    assert first_block(drawn(rng, BLOCK_TOKENS - 1, kind)) == b""
    found = pooled(family)
    # 5 blocks of the root, 2 of what goes on at 200 (3 are equal), 1 of what does at 64
    assert found.num_blocks == 5 + 2 + 1
    assert [one.table is None for one in found.prefixes] == [False, False, False, True]
    assert found.prefixes[3] is family[3]
    assert found.prefixes[0].nbytes == found.num_blocks * found.block_bytes
    assert found.prefixes[2].rows_bytes == 2 * found.block_bytes
    q = cases.values(rng, (HEADS, 3, DIM), "fp32")
    for one, before in zip(found.prefixes, family, strict=True):
        for mine, theirs in zip(answers(one, q), answers(before, q), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)
    again = pooled([*found.prefixes[1:3], going_on(root, 250, drawn(rng, 9, kind))])
    assert again.num_blocks == 5 + 1 + 2
    (alone,) = pooled([again.prefixes[0]]).prefixes
    assert alone.table is None and alone.rows_bytes == alone.nbytes
    for mine, theirs in zip(answers(alone, q), answers(family[1], q), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_is_read_where_it_lies_and_copied_only_where_blocks_do_not_follow(
    rng: np.random.Generator, kind: str
) -> None:
    root = drawn(rng, 64 * 6, kind)
    one, other = pooled([root, going_on(root, 64 * 3, drawn(rng, 100, kind))]).prefixes
    pool = arrays_of(one.keys)[0]
    assert np.array_equal(arrays_of(Sides.of(one).keys.side)[0].shape[:2], (HEADS, 64 * 8))
    for prefix in (one, other):
        sides, whole = Sides.of(prefix), Sides.of(pooled([prefix]).prefixes[0])
        assert whole.blocks is None and np.shares_memory(arrays_of(sides.keys.side)[0], pool)
        for _ in range(40):
            cuts = np.sort(rng.choice(prefix.num_tokens + 1, 2 * int(rng.integers(1, 4)), False))
            ranges = [(int(first), int(end)) for first, end in cuts.reshape(-1, 2)]
            for mine, theirs in ((sides.keys, whole.keys), (sides.values, whole.values)):
                found = mine.read(sides.located(ranges)).copy()
                np.testing.assert_array_equal(found, theirs.read(ranges))
        tokens = rng.integers(0, prefix.num_tokens, (HEADS, 9))
        heads = np.arange(HEADS)[:, None]
        found = sides.keys.take(heads, sides.rows_of(tokens)).copy()
        np.testing.assert_array_equal(found, whole.keys.take(heads, tokens))
    assert len(Sides.of(one).located([(3, root.num_tokens)])) == 1
    assert len(Sides.of(other).located([(3, other.num_tokens)])) == 2
    if kind == "fp32":
        sides = Sides.of(one)
        assert np.shares_memory(sides.keys.read(sides.located([(3, root.num_tokens)])), pool)


def test_blocks_that_only_have_a_checksum_in_common_stay_two(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pion_vllm_mlx.kernels.paging.crc32c", lambda data, before=0: 7)
    one, other = drawn(rng, 130, "fp32"), drawn(rng, 130, "fp32")
    assert first_block(one) == first_block(other)
    assert pooled([one, other]).num_blocks == 0
    assert pooled([one, other, replace(one, statistics={})]).num_blocks == 3


def test_what_was_remembered_of_a_prefix_goes_along(rng: np.random.Generator) -> None:
    root = drawn(rng, 300, "fp32")
    other = going_on(root, 128, drawn(rng, 100, "fp32"))
    api.select_blocks(cases.values(rng, (HEADS, DIM), "fp32"), root, Selection(16, 3))
    found = pooled([root, other]).prefixes
    assert found[0].statistics == root.statistics and found[0].statistics
    assert not found[1].statistics
