"""LONGEST: the longest stored prefix, whatever the index says, and never one of other tokens."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pion_vllm_mlx.server.lineage import block_hashes
from tests.recovery.driving import Driver, refused

MID = "694817073596"
Tokens = list[int]


def packed(tokens: Tokens) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def namespace(segment: int) -> str:
    return f"pps{MID}s{segment}"


@dataclass
class Lineage:
    """Stores segments as a client does: rows first, then fields, then blocks."""

    driver: Driver
    whole: dict[int, Tokens] = field(default_factory=dict)
    bases: dict[int, int] = field(default_factory=dict)

    def add(self, segment: int, tokens: Tokens, parent: int = -1, base: int = 0) -> None:
        """A segment on top of the first ``base`` tokens of its parent's."""
        self.whole[segment] = self.whole.get(parent, [])[:base] + tokens
        self.bases[segment] = base
        ask, name = self.driver.ask, namespace(segment)
        ask("KV.PREFIX.REGISTER", name, 4, "fp16")
        for side in ("_pk", "_pv"):
            ask("V.STOREBATCH", name + side, 0, 0, len(tokens), bytes(16 * len(tokens)))
        fields = {"parent": parent, "base": base, "len": len(tokens)}
        self.set(segment, **fields, toks=packed(tokens))
        prompt = packed(self.whole[segment])
        for number, digest in enumerate(block_hashes(prompt), start=1):
            if number * 64 > base:
                ask("HSET", f"pps:{MID}:blk", digest, f"{segment}:{number * 64}")

    def set(self, segment: int, **fields: int | bytes) -> None:
        for name, value in fields.items():
            self.driver.ask("HSET", f"pps:{MID}:seg:{segment}", name, value)

    def longest(self, prompt: Tokens) -> Any:
        return self.driver.ask("KV.PREFIX.LONGEST", f"pps:{MID}", packed(prompt))

    def expected(self, segment: int, length: int) -> Any:
        return [length, namespace(segment).encode(), length - self.bases[segment]]


MISS = [0, None, 0]


@pytest.fixture
def lineage(tmp_path: Path) -> Iterator[Lineage]:
    with Driver(tmp_path) as driver:
        yield Lineage(driver)


def test_the_worked_example_of_the_block_hashes() -> None:
    hashes = list(block_hashes(packed(list(range(130)))))
    assert hashes == [b"3eb0d2f2913a18b8d3b811a9", b"f5eb5635a99750ad24b18263"]
    first = hashlib.blake2b(packed(list(range(64))), digest_size=12)
    assert hashes[0].decode() == first.hexdigest()


def test_a_match_goes_on_token_by_token_behind_the_last_block(lineage: Lineage) -> None:
    lineage.add(1, list(range(200)))
    for length in (64, 65, 127, 128, 199, 200):
        prompt = [*range(length), 9999, 9998]
        assert lineage.longest(prompt) == lineage.expected(1, length)
        assert lineage.longest(list(range(length))) == lineage.expected(1, length)
    assert lineage.longest(list(range(300))) == lineage.expected(1, 200)
    assert lineage.longest(list(range(63))) == MISS
    assert lineage.longest([*range(63), 7, *range(64, 200)]) == MISS
    assert lineage.longest([]) == MISS


def test_children_share_their_parents_rows(lineage: Lineage) -> None:
    root = list(range(300))
    lineage.add(1, root)
    lineage.add(2, list(range(5000, 5100)), parent=1, base=150)
    lineage.add(3, list(range(7000, 7200)), parent=2, base=210)
    for segment, length in ((1, 300), (2, 250), (3, 410), (3, 260)):
        prompt = lineage.whole[segment][:length]
        assert lineage.longest([*prompt, 1, 2, 3]) == lineage.expected(segment, length)


@pytest.mark.parametrize(
    "damage",
    [
        {"parent": 99},
        {"parent": 3},
        {"base": 151},
        {"base": 400},
        {"base": 0},
        {"len": 10_000},
        {"len": b"many"},
        {"parent": b""},
        {"toks": b""},
    ],
)
def test_a_chain_that_is_not_intact_is_passed_over(
    lineage: Lineage, damage: dict[str, int | bytes]
) -> None:
    lineage.add(1, list(range(300)))
    lineage.add(2, list(range(5000, 5200)), parent=1, base=150)
    lineage.add(3, list(range(7000, 7200)), parent=2, base=250)
    prompt = lineage.whole[3]
    assert lineage.longest(prompt) == lineage.expected(3, 450)

    lineage.set(2, **damage)

    # what is left agrees with segment 1 as far as the divergence, in whole blocks of it
    assert lineage.longest(prompt) == lineage.expected(1, 150)


def test_hashes_that_lie_never_make_other_tokens_match(lineage: Lineage) -> None:
    lineage.add(1, list(range(200)))
    other = [n + 1 for n in range(200)]
    for number, digest in enumerate(block_hashes(packed(other)), start=1):
        lineage.driver.ask("HSET", f"pps:{MID}:blk", digest, f"1:{number * 64}")
    assert lineage.longest(other) == MISS
    # and tokens of a parent that were changed under a child
    lineage.add(2, list(range(5000, 5200)), parent=1, base=150)
    lineage.set(1, toks=packed([*range(100), 1, *range(101, 200)]))
    assert lineage.longest(lineage.whole[2]) == lineage.expected(1, 100)


def test_a_segment_whose_rows_went_is_no_match(lineage: Lineage) -> None:
    lineage.add(1, list(range(300)))
    lineage.add(2, list(range(5000, 5100)), parent=1, base=150)
    prompt = lineage.whole[2]
    assert lineage.longest(prompt) == lineage.expected(2, 250)
    lineage.driver.ask("V.DROP", namespace(2) + "_pv")
    assert lineage.longest(prompt) == lineage.expected(1, 150)
    lineage.driver.ask("KV.PREFIX.EXPIRE", namespace(1), 0)
    assert lineage.longest(prompt) == MISS


def test_a_segment_with_too_few_rows_is_no_match(lineage: Lineage) -> None:
    lineage.add(1, list(range(100)))
    lineage.set(1, len=200, toks=packed(list(range(200))))
    assert lineage.longest(list(range(100))) == lineage.expected(1, 100)
    assert lineage.longest(list(range(200))) == MISS


def test_four_segments_are_tried_and_no_more(lineage: Lineage) -> None:
    prompt = list(range(6 * 64))
    lineage.add(1, prompt[:64])
    digests = list(block_hashes(packed(prompt)))
    for number in range(2, 5):
        lineage.driver.ask("HSET", f"pps:{MID}:blk", digests[number], f"{number}0:64")
    assert lineage.longest(prompt) == lineage.expected(1, 64)
    lineage.driver.ask("HSET", f"pps:{MID}:blk", digests[5], "50:64")
    assert lineage.longest(prompt) == MISS


def test_an_index_of_nonsense_is_a_miss(lineage: Lineage) -> None:
    prompt = list(range(128))
    for value in (b"", b"1", b"x:64", b"-1:64", b"1:", b"\xff:\xff", b"9" * 400 + b":64"):
        for digest in block_hashes(packed(prompt)):
            lineage.driver.ask("HSET", f"pps:{MID}:blk", digest, value)
        assert lineage.longest(prompt) == MISS


def test_random_trees_match_what_a_plain_search_finds(lineage: Lineage) -> None:
    dice = random.Random(3)
    lineage.add(1, [dice.randrange(3) for _ in range(400)])
    for segment in range(2, 9):
        parent = dice.randrange(1, segment)
        low, high = lineage.bases[parent] + 1, len(lineage.whole[parent])
        base = dice.randrange(low, high)
        # diverges at once: its first token is not its parent's next one
        tokens = [7 + segment, *[dice.randrange(3) for _ in range(dice.randrange(80, 200))]]
        lineage.add(segment, tokens, parent, base)
    for _ in range(60):
        source = lineage.whole[dice.randrange(1, 9)]
        prompt = [*source[: dice.randrange(len(source) + 1)], *[5] * dice.randrange(3)]
        best = max(_common(prompt, whole) for whole in lineage.whole.values())
        length, name, position = lineage.longest(prompt)
        if best < 64:
            assert length == 0
            continue
        # whole blocks are found, and then as far as the segment that holds the last one goes
        assert best - best % 64 <= length <= best
        segment = int(name.decode().rpartition("s")[2])
        assert lineage.whole[segment][:length] == prompt[:length]
        assert position == length - lineage.bases[segment]


def _common(left: Tokens, right: Tokens) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_a_required_prefix_comes_before_both_names(lineage: Lineage) -> None:
    lineage.add(1, list(range(100)))
    driver = lineage.driver
    driver.server.config = replace(driver.server.config, ns_prefix=b"mine-")
    prompt = packed(list(range(100)))
    assert "must start with" in refused(driver, "KV.PREFIX.LONGEST", f"pps:{MID}", prompt)
    index = f"mine-pps:{MID}"
    assert driver.ask("KV.PREFIX.LONGEST", index, prompt) == MISS
    driver.ask("KV.PREFIX.REGISTER", f"mine-{namespace(1)}", 4, "fp16")
    for side in ("_pk", "_pv"):
        driver.ask("V.STOREBATCH", f"mine-{namespace(1)}{side}", 0, 0, 100, bytes(1600))
    driver.ask("HSET", f"{index}:seg:1", "parent", -1, "base", 0, "len", 100, "toks", prompt)
    driver.ask("HSET", f"{index}:blk", next(block_hashes(prompt)), "1:64")
    answer = driver.ask("KV.PREFIX.LONGEST", index, prompt)
    assert answer == [100, f"mine-{namespace(1)}".encode(), 100]
    assert "pps:<id>" in refused(driver, "KV.PREFIX.LONGEST", f"mine-x{MID}", prompt)


def test_bad_arguments_are_refused(lineage: Lineage) -> None:
    ask = lineage.driver
    assert "pps:<id>" in refused(ask, "KV.PREFIX.LONGEST", "other", b"")
    assert "pps:<id>" in refused(ask, "KV.PREFIX.LONGEST", "pps:", b"")
    assert "multiple of 4" in refused(ask, "KV.PREFIX.LONGEST", f"pps:{MID}", b"12345")
    ask.ask("SET", f"pps:{MID}:blk", "a string")
    assert "wrong kind" in refused(ask, "KV.PREFIX.LONGEST", f"pps:{MID}", bytes(256))
