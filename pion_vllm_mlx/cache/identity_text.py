"""The texts of functions: where in which source file one stands, or else what it is made of.

A function whose code object is the one that its file's text compiles to is told by that text,
so every Python version tells it alike. Any other (typed into a shell, built by ``exec``, or
of a file that was edited since) is told by its bytecode, constants and names.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType


@dataclass(frozen=True)
class SourceFile:
    """One file: each code object of its text with its place, and the globals it reassigns."""

    digest: str
    places: dict[CodeType, str]
    reassigned: frozenset[str]


def source_file(code: CodeType) -> SourceFile | None:
    """The file that a code object says it is of, if its text holds that very code."""
    found = _file(code.co_filename)
    return found if found is not None and code in found.places else None


def bytecode_digest(code: CodeType) -> str:
    """32 hex digits over all that a code object does, nested ones included; not its lines."""
    return _digest(repr(_parts(code)).encode())


def all_names(code: CodeType) -> Iterator[str]:
    """The global and attribute names of a code object and of those nested in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from all_names(constant)


@lru_cache(maxsize=8192)
def global_names(code: CodeType) -> frozenset[str]:
    """The global names that a code object reads, nested ones included, less those it sets."""
    read: set[str] = set()
    written: set[str] = set()
    for inner in (code, *_nested(code)):
        for step in dis.get_instructions(inner):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(str(step.argval))
            elif step.opname == "STORE_GLOBAL":
                written.add(str(step.argval))
    return frozenset(read - written)


def _parts(code: CodeType) -> tuple[object, ...]:
    constants = [_parts(c) if isinstance(c, CodeType) else _constant(c) for c in code.co_consts]
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    variables = code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_name, code.co_code, constants, code.co_names, variables, arguments


def _constant(value: object) -> str:
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_constant, value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_constant, value)) + ")"
    return repr(value)


def _file(path: str) -> SourceFile | None:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return _read(path, (status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=1024)
def _read(path: str, _: tuple[int, int]) -> SourceFile | None:
    """The last argument, size and time, tells versions of a file apart."""
    try:
        text = Path(path).read_bytes()
        code = compile(text, path, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError):
        return None
    places: dict[CodeType, str] = {}
    met: Counter[tuple[str, int]] = Counter()
    for inner in _nested(code):
        place = inner.co_name, inner.co_firstlineno
        places[inner] = f"{place[0]}:{place[1]}:{met[place]}"
        met[place] += 1
    return SourceFile(_digest(text), places, _reassigned(text))


def _reassigned(text: bytes) -> frozenset[str]:
    """The names of a text's ``global`` statements. Most texts have none: they are not parsed."""
    if b"global" not in text:
        return frozenset()
    found = (node.names for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Global))
    return frozenset(name for names in found for name in names)


def _nested(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _nested(constant)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
