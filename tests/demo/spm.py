"""The SentencePiece BPE rule, written down plainly: the oracle of the tokenizer tests."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pion_vllm_mlx.demo.gguf_tokenizer import SPACE, PieceKind, Vocabulary


def _parts(vocabulary: Vocabulary, text: str) -> Iterator[tuple[str, bool]]:
    """Cut ``text`` at user-defined and control pieces, the longest first at each place."""
    whole = (PieceKind.USER_DEFINED, PieceKind.CONTROL, PieceKind.UNKNOWN)
    fixed = [
        piece
        for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True)
        if kind in whole
    ]
    pattern = "|".join(re.escape(piece) for piece in sorted(fixed, key=len, reverse=True))
    end = 0
    for match in re.finditer(pattern, text):
        yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    yield text[end:], False


def _merge(ranks: dict[str, float], symbols: list[str]) -> list[str]:
    """Join the adjacent pair of the best score, leftmost first, until no pair is a piece."""
    while True:
        best: tuple[float, int] | None = None
        for index in range(len(symbols) - 1):
            score = ranks.get(symbols[index] + symbols[index + 1])
            if score is not None and (best is None or score > best[0]):
                best = (score, index)
        if best is None:
            return symbols
        index = best[1]
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]


def spm_encode(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of ``text`` without BOS."""
    ids = {piece: token_id for token_id, piece in enumerate(vocabulary.pieces)}
    ranks = {
        piece: score
        for piece, score, kind in zip(
            vocabulary.pieces, vocabulary.scores, vocabulary.kinds, strict=True
        )
        if kind == PieceKind.NORMAL
    }
    result: list[int] = []
    for part, is_piece in _parts(vocabulary, text):
        if is_piece:
            result.append(ids[part])
            continue
        for symbol in _merge(ranks, list(part.replace(" ", SPACE))):
            if symbol in ranks:
                result.append(ids[symbol])
            else:
                result.extend(ids[f"<0x{byte:02X}>"] for byte in symbol.encode())
    return result
