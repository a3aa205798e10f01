"""The written tokenizer says what the vocabulary's own merging rule says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pion_vllm_mlx.demo.gguf_tokenizer import Vocabulary, tokenizer_json, write_tokenizer
from pion_vllm_mlx.errors import ConfigError
from tests.demo.spm import spm_encode
from tests.demo.tiny_vocabulary import RUNS, WORDS, vocabulary

tokenizers = pytest.importorskip("tokenizers", reason="comes with the mlx extra")

BOS = 2


def _vocabulary() -> Vocabulary:
    pieces, scores, kinds = vocabulary()
    return Vocabulary(pieces, scores, kinds, bos_id=BOS, eos_id=1, unknown_id=3, padding_id=0)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(_vocabulary())))


FRAGMENTS = [*WORDS, *RUNS, " ", "he", "\u00e9", "\u65e5", "\U0001f600", "\x00", "\u2581", "\r"]
TEXTS = st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3))).map("".join)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS)
def test_ids_are_those_of_merging_the_best_scored_pair_first(tokenizer: Any, text: str) -> None:
    assert tokenizer.encode(text).ids == [BOS, *spm_encode(_vocabulary(), text)]


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=TEXTS.filter(lambda text: "\u2581" not in text))
def test_text_comes_back_from_its_ids(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=True) == text


def test_an_unknown_character_becomes_its_utf8_bytes(tokenizer: Any) -> None:
    pieces = vocabulary()[0]
    ids = tokenizer.encode("\u65e5").ids
    assert [pieces[i] for i in ids] == ["<bos>", "<0xE6>", "<0x97>", "<0xA5>"]


def test_the_oracle_can_tell_two_merge_orders_apart(tokenizer: Any) -> None:
    straight = _vocabulary()
    turned = Vocabulary(
        straight.pieces,
        [-score for score in straight.scores],
        straight.kinds,
        bos_id=BOS,
        eos_id=1,
        unknown_id=3,
        padding_id=0,
    )
    assert tokenizer.encode(" world").ids != [BOS, *spm_encode(turned, " world")]


def test_special_pieces_are_written_to_the_tokenizers_settings(tmp_path: Path) -> None:
    write_tokenizer(_vocabulary(), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<bos>", "<eos>")


def test_a_vocabulary_whose_lists_do_not_fit_is_refused() -> None:
    pieces, scores, kinds = vocabulary()
    with pytest.raises(ConfigError, match="fit together"):
        Vocabulary(pieces, scores[1:], kinds, bos_id=2, eos_id=1, unknown_id=3, padding_id=0)
    with pytest.raises(ConfigError, match="token id"):
        Vocabulary(pieces, scores, kinds, bos_id=10**6, eos_id=1, unknown_id=3, padding_id=0)
