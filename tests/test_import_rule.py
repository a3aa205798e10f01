"""Which part may import which: the source is walked, and the line that breaks a rule is named."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import pion_vllm_mlx

PACKAGE = Path(pion_vllm_mlx.__file__).parent
ROOT = "pion_vllm_mlx"
SHARED = ("errors", "config", "wire", "formats")


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported anywhere in a module of ``package``.

    ``from a import b`` gives both ``a`` and ``a.b``: b may be a module.  A string given to
    ``import_module`` counts, and so does an import that only type checkers see.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base]).rstrip(".")
            yield node.lineno, base
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            name = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            if name in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def under(name: str, *parts: str) -> bool:
    """Whether a dotted name is one of this package's ``parts`` or lies below one."""
    return any(name == f"{ROOT}.{part}" or name.startswith(f"{ROOT}.{part}.") for part in parts)


def broken_rule(module: str, imported: str) -> str | None:
    """The rule that ``module`` (its path below the package) breaks by importing a name."""
    part = module.partition(".")[0]
    top = imported.partition(".")[0]
    in_kernels = part == "kernels"
    known_to_kernels = under(imported, "kernels", "errors", "config")
    if part == "server" and top == "mlx_lm":
        return "server never imports mlx_lm"
    if part == "server" and top == "mlx":
        return "server leaves mlx to kernels"
    if part == "server" and under(imported, "cache", "patch", "serve", "demo"):
        return f"cache and server meet only in {', '.join(SHARED)}"
    if part in ("cache", "patch", "serve") and under(imported, "server"):
        return f"cache and server meet only in {', '.join(SHARED)}; patch never uses server"
    if part == "cache" and under(imported, "patch", "serve", "demo"):
        return "cache is below patch, serve and demo"
    if part in SHARED and under(imported, "cache", "server", "patch", "serve", "demo", "kernels"):
        return f"{', '.join(SHARED)} know none of the layers above"
    if part in SHARED and top in ("mlx", "mlx_lm"):
        return f"{', '.join(SHARED)} run where mlx is not installed"
    if module.startswith("server.store") and under(
        imported, "server.commands", "server.dispatch", "server.command", "server.app"
    ):
        return "store knows no command"
    if in_kernels and top == ROOT and imported != ROOT and not known_to_kernels:
        return "kernels import nothing of the package but errors and config"
    if in_kernels and top == "mlx_lm":
        return "kernels know no model"
    if under(imported, "cli") and module != "__main__":
        return "nothing imports cli"
    return None


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """Lines that read the environment through ``os``."""
    names = {"environ", "environb", "getenv", "getenvb"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names:
            if isinstance(node.value, ast.Name) and node.value.id == "os":
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            if any(alias.name in names for alias in node.names):
                yield node.lineno


def violations(folder: Path) -> list[str]:
    """``file:line: rule (name)`` for every broken rule in the package at ``folder``."""
    found = set()
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder).with_suffix("")
        parts = [part for part in relative.parts if part != "__init__"]
        module = ".".join(parts)
        package = ".".join([ROOT, *relative.parts[:-1]])
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        where = path.relative_to(folder)
        for line, name in imports(tree, package):
            rule = broken_rule(module, name)
            if rule:
                found.add(f"{where}:{line}: {rule}")
        if module != "config":
            for line in environment_reads(tree):
                found.add(f"{where}:{line}: only config.py reads the environment")
    return sorted(found)


def test_every_module_keeps_the_import_rule() -> None:
    assert violations(PACKAGE) == []


@pytest.mark.parametrize(
    ("file", "source", "rule"),
    [
        ("server/app.py", "import mlx_lm", "server never imports mlx_lm"),
        ("server/app.py", "def f():\n    from mlx_lm.models import cache", "never imports mlx_lm"),
        ("server/app.py", "import mlx.core as mx", "server leaves mlx to kernels"),
        ("server/app.py", "from pion_vllm_mlx.cache import layers", "meet only in"),
        ("server/app.py", "from ..cache.layers import rebuild", "meet only in"),
        ("server/store/wal.py", "from ..commands import prefix", "store knows no command"),
        ("server/store/wal.py", "from pion_vllm_mlx.server import dispatch", "knows no command"),
        ("kernels/api.py", "from pion_vllm_mlx.formats import bf16", "nothing of the package but"),
        ("kernels/cpu.py", "from mlx_lm.models import base", "kernels know no model"),
        ("wire/frames.py", "from pion_vllm_mlx.kernels import api", "none of the layers above"),
        ("cache/layers.py", "from pion_vllm_mlx.server.store.wal import Wal", "meet only in"),
        (
            "cache/layers.py",
            "import importlib\nimportlib.import_module('pion_vllm_mlx.server')",
            "",
        ),
        ("patch/apply.py", "import pion_vllm_mlx.server.app", "patch never uses server"),
        ("serve/app.py", "from pion_vllm_mlx.server import options", "meet only in"),
        ("wire/resp.py", "from pion_vllm_mlx import cache", "none of the layers above"),
        ("formats/fp16.py", "import mlx.core", "where mlx is not installed"),
        ("demo/run.py", "from pion_vllm_mlx import cli", "nothing imports cli"),
        ("cache/layers.py", "import os\nos.environ.get('X')", "only config.py reads"),
        ("cache/layers.py", "from os import getenv", "only config.py reads"),
    ],
)
def test_a_planted_violation_is_named_with_its_line(
    tmp_path: Path, file: str, source: str, rule: str
) -> None:
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1
    line = source.count("\n") + 1
    assert found[0].startswith(f"{file}:{line}: ")
    assert rule in found[0]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("server/app.py", "from pion_vllm_mlx.errors import PionError\nfrom . import dispatch"),
        ("kernels/mlx_expression.py", "import mlx.core as mx"),
        ("kernels/api.py", "from pion_vllm_mlx.errors import CommandError\nfrom . import host"),
        ("server/app.py", "from pion_vllm_mlx.kernels import api"),
        ("patch/apply.py", "from pion_vllm_mlx.kernels import api"),
        ("cache/layers.py", "from mlx_lm.models.cache import KVCache"),
        ("patch/apply.py", "from pion_vllm_mlx.cache import layers"),
        ("config.py", "import os\nos.environ['X']"),
        ("__main__.py", "from pion_vllm_mlx.cli import main"),
    ],
)
def test_what_the_rule_allows_is_not_reported(tmp_path: Path, file: str, source: str) -> None:
    allowed = tmp_path / file
    allowed.parent.mkdir(parents=True, exist_ok=True)
    allowed.write_text(source)
    assert violations(tmp_path) == []
