"""A GGUF vocabulary of the SentencePiece BPE kind, written as ``tokenizer.json``.

The GGUF holds pieces, scores and kinds. A byte-fallback BPE merges the adjacent pair whose
joined piece has the best score, so the merge list is every split of every ordinary piece
into two ordinary pieces, best score first. What is not an ordinary piece never comes out of
a merge: user-defined pieces (runs of newlines, of spaces, HTML tags) and control pieces are
cut out of the text beforehand, as added tokens, and bytes are the fallback for characters
that no piece spells.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from pion_vllm_mlx.errors import ConfigError

SPACE = "\u2581"


class PieceKind(IntEnum):
    """What a vocabulary entry is, numbered as GGUF numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """The pieces of a GGUF vocabulary; all three lists are indexed by token id."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    bos_id: int
    eos_id: int
    unknown_id: int
    padding_id: int

    def __post_init__(self) -> None:
        sizes = {len(self.pieces), len(self.scores), len(self.kinds), len(set(self.pieces))}
        if len(sizes) != 1:
            raise ConfigError("the vocabulary's pieces, scores and kinds do not fit together")
        for token_id in (self.bos_id, self.eos_id, self.unknown_id, self.padding_id):
            if not 0 <= token_id < len(self.pieces):
                raise ConfigError(f"token id {token_id} is outside the vocabulary")


def merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every pair of ordinary pieces that joins to an ordinary piece, best score first."""
    ordinary = {
        piece: score
        for piece, score, kind in zip(
            vocabulary.pieces, vocabulary.scores, vocabulary.kinds, strict=True
        )
        if kind == PieceKind.NORMAL
    }
    # sorted() is stable: pieces of equal score keep their order in the vocabulary.
    return [
        (piece[:cut], piece[cut:])
        for piece in sorted(ordinary, key=lambda piece: -ordinary[piece])
        for cut in range(1, len(piece))
        if piece[:cut] in ordinary and piece[cut:] in ordinary
    ]


def _added_tokens(vocabulary: Vocabulary) -> list[dict[str, Any]]:
    special = {PieceKind.CONTROL, PieceKind.UNKNOWN}
    return [
        {
            "id": token_id,
            "content": piece,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind in special,
        }
        for token_id, (piece, kind) in enumerate(
            zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        )
        if kind in special or kind == PieceKind.USER_DEFINED
    ]


def _post_processor(vocabulary: Vocabulary) -> dict[str, Any]:
    bos = vocabulary.pieces[vocabulary.bos_id]
    first = {"SpecialToken": {"id": bos, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            first,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": bos, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos_id], "tokens": [bos]}},
    }


def tokenizer_json(vocabulary: Vocabulary) -> dict[str, Any]:
    """The content of ``tokenizer.json``: a byte-fallback BPE that puts BOS first."""
    space_to_mark = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    mark_to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": space_to_mark,
        "pre_tokenizer": None,
        "post_processor": _post_processor(vocabulary),
        "decoder": {
            "type": "Sequence",
            "decoders": [mark_to_space, {"type": "ByteFallback"}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.pieces[vocabulary.unknown_id],
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": {piece: token_id for token_id, piece in enumerate(vocabulary.pieces)},
            "merges": [list(pair) for pair in merges(vocabulary)],
        },
    }


def write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": vocabulary.pieces[vocabulary.bos_id],
        "eos_token": vocabulary.pieces[vocabulary.eos_id],
        "unk_token": vocabulary.pieces[vocabulary.unknown_id],
        "pad_token": vocabulary.pieces[vocabulary.padding_id],
        "clean_up_tokenization_spaces": False,
    }
    for name, content in (
        ("tokenizer.json", tokenizer_json(vocabulary)),
        ("tokenizer_config.json", settings),
    ):
        text = json.dumps(content, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
