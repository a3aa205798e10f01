"""Which functions and types of its files a program of a GPU uses: their text without the others.

Nothing of C++ is understood but braces and names: what is at the top level of a file stays where
something that stays names it, in whichever branch, so more may stay than is used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_WORD = re.compile(r"\w+")
_TEMPLATE = re.compile(r"^template\s*<.*?>\s*", re.DOTALL)
_TYPE = re.compile(r"(?:struct|enum)\s+(\w+)")
# The name of a constant or another name of a type, else that of a function.
_NAME = re.compile(r"(\w+)\s*[=(]")


@dataclass(frozen=True)
class Piece:
    """Lines of a text that stay or go together, and the names that they are for.

    Without a name: an empty line or one for the preprocessor, which stays.
    """

    text: str
    names: frozenset[str]


def used(texts: Sequence[str], wanted: str) -> list[str]:
    """Stripped texts without the pieces that ``wanted``, and what it uses, does not name.

    Lines are emptied, not taken out: each stays the line that it was.
    """
    pieces = [pieces_of(text) for text in texts]
    words = set(_WORD.findall(wanted))
    left = {piece for one in pieces for piece in one}
    while found := {piece for piece in left if not piece.names or piece.names & words}:
        left -= found
        words.update(*(_WORD.findall(piece.text) for piece in found))
    return [
        "\n".join("\n" * p.text.count("\n") if p in left else p.text for p in one) for one in pieces
    ]


def pieces_of(text: str) -> list[Piece]:
    """The pieces of a stripped text: joined by line ends they are the text."""
    pieces, lines, depth = [], [], 0
    for line in text.split("\n"):
        lines.append(line)
        depth += line.count("{") - line.count("}")
        alone = len(lines) == 1 and (not line or line.startswith("#"))
        if depth == 0 and (line.endswith((";", "}")) or alone) and not line.endswith("\\"):
            pieces.append(_piece("\n".join(lines)))
            lines = []
    return [*pieces, *([_piece("\n".join(lines))] if lines else [])]


def _piece(text: str) -> Piece:
    code = _TEMPLATE.sub("", text)
    if not code or code.startswith("#"):
        return Piece(text, frozenset())
    kind = _TYPE.match(code)
    if kind and code.startswith("enum"):
        return Piece(text, frozenset(_WORD.findall(code)) - {"enum"})
    name = kind or _NAME.search(code)
    return Piece(text, frozenset() if name is None else frozenset({name[1]}))
