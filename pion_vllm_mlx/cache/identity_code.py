"""A digest of the source text that turns weights and tokens into K/V.

The same weights give other K/V in another mlx-lm, so the text of the model's
module, of everything it imports from mlx_lm, and of mlx_lm's cache and base
modules belongs to the key. Nothing is imported to find out: the import
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
from typing import NamedTuple

_ALWAYS = ("mlx_lm.models.cache", "mlx_lm.models.base")
_LIBRARIES = frozenset({"mlx", "builtins"})
"""MLX itself is not part of the key: its layers are a stable interface."""


def code_digest(classes: Iterable[type]) -> str:
    """32 hex digits over the source of the modules that define ``classes``.

    What they import from mlx_lm is included, transitively. A class without a source
    file (typed into a shell, for example) counts by its name.
    """
    open_names = {c.__module__ for c in classes} | set(_ALWAYS)
    open_names = {name for name in open_names if name.partition(".")[0] not in _LIBRARIES}
    texts: dict[str, str] = {}
    while open_names:
        name = open_names.pop()
        source = _source(name)
        texts[name] = source.digest if source else "no source"
        open_names |= {n for n in (source.imports if source else ()) if n not in texts}
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(texts):
        # A model file given by path has a made-up module name: its text says it all.
        known = name if name.partition(".")[0] == "mlx_lm" else ""
        digest.update(f"{known}={texts[name]};".encode())
    return digest.hexdigest()


class _Source(NamedTuple):
    digest: str
    imports: frozenset[str]


def _source(module: str) -> _Source | None:
    path = _path(module)
    if path is None:
        return None
    status = os.stat(path)
    return _read(module, str(path), status.st_size, status.st_mtime_ns)


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
def _read(module: str, path: str, size: int, mtime_ns: int) -> _Source:
    """Digest and imports of one file; size and time are what makes it another file."""
    text = Path(path).read_bytes()
    package = module if Path(path).name == "__init__.py" else module.rpartition(".")[0]
    digest = hashlib.blake2b(text, digest_size=16).hexdigest()
    return _Source(digest, frozenset(_imports(ast.parse(text), package)))


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Names of the mlx_lm modules that a file imports, at any depth of its text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if _is_ours(a.name))
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            if _is_ours(base):
                yield base
                inner = (f"{base}.{alias.name}" for alias in node.names)
                yield from (name for name in inner if _path(name) is not None)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    parents = package.split(".")
    parents = parents[: len(parents) - node.level + 1]
    return ".".join([*parents, node.module] if node.module else parents)


def _is_ours(name: str) -> bool:
    return name == "mlx_lm" or name.startswith("mlx_lm.")
