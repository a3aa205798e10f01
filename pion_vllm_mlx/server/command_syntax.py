"""The words of a command, from the text that its declaration carries.

::

    key value [NX|XX] [EX seconds|KEEPTTL] (field value)... token...

lower case      a value, by its name
UPPER CASE      a word that is written so, in any case
``[ ]``         may be left out
``( )``         belongs together
``a|b``         one of these, each as long as its bracket
``x...``        once or more often

``parse`` reads it; ``documented`` turns it into the ``arguments`` of COMMAND DOCS.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from pion_vllm_mlx.wire.resp import Map, Simple, Value

_WORDS = re.compile(r"\.\.\.|[][()|]|[A-Za-z0-9_-]+")
_KEYS = frozenset("attend_sid index k_sid key new_key ns sid slot_id v_sid".split())
_INTEGERS = frozenset(
    "amount block_size boundary count crc32c cursor database dim end fa_window head_dim heads k "
    "k_dim k_max kv_dim kv_heads layer length milliseconds ms n_heads n_layers offset proto "
    "q_heads rope rows seconds selector size snap_id start stop suffix_tokens token_id tokens "
    "top_blocks top_k ttl unix_milliseconds unix_seconds v_dim".split()
)


@dataclass(frozen=True)
class Node:
    """One part: a value, a written word, several in a row, or one of several.

    ``kind`` is ``value``, ``word``, ``row`` or ``choice``; only the last two have ``parts``.
    """

    kind: str
    name: str = ""
    parts: tuple[Node, ...] = ()
    optional: bool = False
    multiple: bool = False

    def fewest(self) -> int:
        """How many words it has at least."""
        if self.optional:
            return 0
        counts = [part.fewest() for part in self.parts]
        if self.kind == "row":
            return sum(counts)
        return min(counts) if self.kind == "choice" else 1

    def fixed(self) -> bool:
        """Whether it always has the same number of words."""
        if self.optional or self.multiple or not all(part.fixed() for part in self.parts):
            return False
        return self.kind != "choice" or len({part.fewest() for part in self.parts}) == 1


def parse(syntax: str) -> Node:
    """The parts of a syntax, as one row. Raises ValueError for a text that is none."""
    words = _WORDS.findall(syntax)
    if "".join(words) != syntax.replace(" ", ""):
        raise ValueError(f"not a syntax: {syntax!r}")
    node, at = _alternatives(words, 0, "")
    if at != len(words):
        raise ValueError(f"a bracket too many: {syntax!r}")
    return node if node.kind == "row" else Node("row", parts=(node,))


def _alternatives(words: Sequence[str], at: int, closing: str) -> tuple[Node, int]:
    """What stands up to a closing bracket, and where that is."""
    rows: list[list[Node]] = [[]]
    while at < len(words) and words[at] not in ("]", ")"):
        word = words[at]
        if word == "|":
            rows.append([])
        elif word == "...":
            rows[-1][-1] = replace(rows[-1][-1], multiple=True)
        elif word in ("[", "("):
            inner, at = _alternatives(words, at + 1, "]" if word == "[" else ")")
            rows[-1].append(replace(inner, optional=word == "["))
        else:
            rows[-1].append(Node("word" if word.isupper() else "value", word))
        at += 1
    if (words[at] if at < len(words) else "") != closing:
        raise ValueError("a bracket is not closed")
    nodes = [_row(parts) for parts in rows]
    return (nodes[0] if len(nodes) == 1 else Node("choice", parts=tuple(nodes))), at


def _row(parts: list[Node]) -> Node:
    if len(parts) == 1 and not (parts[0].optional or parts[0].multiple):
        return parts[0]
    return Node("row", parts=tuple(parts))


def fits(node: Node, arity: int) -> bool:
    """Whether an arity, which counts the name, lets exactly or at least these words through."""
    if arity < 0:
        return node.fewest() + 1 >= -arity
    return node.fewest() + 1 == arity and node.fixed()


def documented(node: Node, extensions: Collection[str] = ()) -> list[Value]:
    """The parts of a row as COMMAND DOCS describes arguments; words that are extensions say so."""
    found = _documented(node)
    for argument in found:
        _mark(argument, extensions)
    return found


def _mark(argument: Value, extensions: Collection[str]) -> None:
    """Flag an argument, and those inside of it, whose token is one of these words."""
    if not isinstance(argument, Map):
        return
    fields = dict(argument)
    inner, flags = fields.get("arguments", []), fields.get("flags", [])
    for one in inner if isinstance(inner, list) else []:
        _mark(one, extensions)
    if fields.get("token") in extensions and isinstance(flags, list):
        flags.append(Simple("extension"))
        if "flags" not in fields:
            argument.append(("flags", flags))


def _documented(node: Node) -> list[Value]:
    found: list[Value] = []
    parts = list(node.parts) if node.kind == "row" else [node]
    while parts:
        part = parts.pop(0)
        # a word and the value behind it are one argument with a token
        alone = part.optional or part.multiple
        if part.kind == "word" and not alone and parts and parts[0].kind == "value":
            found.append(_described(parts.pop(0), token=part.name))
        else:
            found.append(_described(part))
    return found


def _described(node: Node, token: str = "") -> Map:
    inner = _documented(node) if node.kind == "row" else []
    if len(inner) == 1 and isinstance(inner[0], Map):
        pairs = list(inner[0])
    else:
        pairs = [("name", _name(node)), ("type", _type(node))]
        if token or node.kind == "word":
            pairs.append(("token", token or node.name))
        if node.kind == "row":
            pairs.append(("arguments", inner))
        elif node.kind == "choice":
            pairs.append(("arguments", [_described(part) for part in node.parts]))
    # redis-cli takes nothing but simple strings here
    flags = [Simple(word) for word, is_so in _flags(node) if is_so]
    return Map([*pairs, ("flags", flags)] if flags else pairs)


def _flags(node: Node) -> tuple[tuple[str, bool], ...]:
    return ("optional", node.optional), ("multiple", node.multiple)


def _name(node: Node) -> str:
    if node.parts:
        return "-".join(_name(part) for part in node.parts[:3])
    return node.name.lower()


def _type(node: Node) -> str:
    if node.kind != "value":
        return {"word": "pure-token", "row": "block", "choice": "oneof"}[node.kind]
    if node.name in _KEYS:
        return "key"
    return "integer" if node.name in _INTEGERS else "string"
