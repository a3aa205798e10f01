"""A digest of the source text that turns weights and tokens into K/V.

The same weights give other K/V in another mlx-lm, so the text of the model's
module, of everything it imports from mlx_lm and from its own package, and of
mlx_lm's cache and base modules belongs to the key. Nothing is imported to find out: the import
statements are read from the text.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

_ALWAYS = ("mlx_lm.models.cache", "mlx_lm.models.base")
_MLX_LM = "mlx_lm"
_LIBRARIES = frozenset({"mlx", "builtins"})
"""MLX is in the key by its version, and by those of its functions that run."""


def code_digest(defined: Iterable[type | FunctionType]) -> str:
    """32 hex digits over the source of the modules of classes and functions.

    What they import from mlx_lm and from their own packages is included, transitively. A
    class without a source file (typed into a shell, for example) counts by its name here.
    """
    open_names = {str(c.__module__) for c in defined} | set(_ALWAYS)
    open_names = {name for name in open_names if _package(name) not in _LIBRARIES}
    ours = frozenset(map(_package, open_names))
    texts: dict[str, str] = {}
    while open_names:
        name = open_names.pop()
        source = _source(name, ours)
        texts[name] = source.digest if source else "no source"
        open_names |= {n for n in (source.imports if source else ()) if n not in texts}
    # A model file given by path has a made-up module name: its text says it all.
    lines = [f"{name if _package(name) == _MLX_LM else ''}={text};" for name, text in texts.items()]
    return hashlib.blake2b("".join(sorted(lines)).encode(), digest_size=16).hexdigest()


def _package(module: str) -> str:
    return module.partition(".")[0]


class _Source(NamedTuple):
    digest: str
    imports: frozenset[str]


def _source(module: str, ours: frozenset[str]) -> _Source | None:
    path = _path(module)
    if path is None:
        return None
    status = os.stat(path)
    return _read(module, str(path), ours, (status.st_size, status.st_mtime_ns))


def _path(module: str) -> Path | None:
    loaded = sys.modules.get(module)
    origin = getattr(loaded, "__file__", None)
    if origin is None:
        try:
            spec = find_spec(module)
        except (ImportError, ValueError):
            return None
        origin = spec.origin if spec else None
    path = Path(origin) if origin else None
    return path if path is not None and path.suffix == ".py" and path.is_file() else None


@lru_cache(maxsize=1024)
def _read(module: str, path: str, ours: frozenset[str], _: tuple[int, int]) -> _Source:
    """Digest and imports of one file; the last argument, size and time, tells it apart."""
    text = Path(path).read_bytes()
    package = module if Path(path).name == "__init__.py" else module.rpartition(".")[0]
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return _Source(digest, frozenset(_imports(ast.parse(text), package, ours)))


def _imports(tree: ast.AST, package: str, ours: frozenset[str]) -> Iterator[str]:
    """Names of the modules of ``ours`` that a file imports, at any depth of its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _package(a.name) in ours)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if _package(base) in ours:
                yield base
                inner = (f"{base}.{alias.name}" for alias in node.names)
                yield from (name for name in inner if _path(name) is not None)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)
