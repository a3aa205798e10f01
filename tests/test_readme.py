"""What the README says about the code is true of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pion_vllm_mlx"
MOST_FILES, MOST_LINES = 6, 250


def steps() -> dict[str, list[str]]:
    """The numbered steps of a command: file, and the functions to read in it."""
    section = (ROOT / "README.md").read_text().partition("## The path of one command")[2]
    found = re.findall(r"^\d\. `([\w/]+\.py)` \(([^)]+)\)", section, re.MULTILINE)
    return {file: re.findall(r"`(\w+)`", names) for file, names in found}


def lines_of_code(file: Path) -> dict[str, int]:
    """Lines of every function, without blank ones and its docstring."""
    source = file.read_text()
    lines = source.splitlines()
    counted = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(word.lineno for word in node.decorator_list)])
            assert node.end_lineno is not None
            body = [line for line in lines[first - 1 : node.end_lineno] if line.strip()]
            docstring = ast.get_docstring(node) or ""
            counted[node.name] = len(body) - len([x for x in docstring.splitlines() if x.strip()])
    return counted


def test_a_newcomer_reads_the_path_of_a_command_in_few_lines_of_few_files() -> None:
    path = steps()
    assert 0 < len(path) <= MOST_FILES
    total = 0
    for file, functions in path.items():
        known = lines_of_code(PACKAGE / file)
        assert functions and set(functions) <= known.keys(), file
        total += sum(known[name] for name in functions)
    assert total <= MOST_LINES, total


def test_every_module_that_the_path_names_is_there() -> None:
    section = (ROOT / "README.md").read_text().partition("## The path of one command")[2]
    for name in re.findall(r"`((?:wire|server)/[\w/]+\.py)`", section):
        assert (PACKAGE / name).is_file(), name
