"""A small vocabulary with every kind of piece."""

from __future__ import annotations

WORDS = "he ll llo hello or wor ld world \u2581w \u2581world \u2581hello".split()
LETTERS = list("abcdefghlorwxyz,.\u00e9") + ["\u2581"]
SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>"]
RUNS = ["\n", "\n\n", "\n\n\n", "  ", "   ", "<b>"]


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and kinds: specials, runs, bytes, words by score, letters."""
    pieces = SPECIALS + RUNS + [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [-1000.0] * (len(SPECIALS) + len(RUNS)) + [0.0] * 256
    kinds = [3] * len(SPECIALS) + [4] * len(RUNS) + [6] * 256
    for rank, piece in enumerate(WORDS + LETTERS):
        pieces.append(piece)
        scores.append(-float(rank))
        kinds.append(1)
    return pieces, scores, kinds
