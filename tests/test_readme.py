"""What the READMEs say about code and tests is true of them."""

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


def named_tests() -> dict[str, list[str]]:
    """Per fault of the table in ``tests/README.md`` the tests that are named there."""
    named: dict[str, list[str]] = {}
    for line in (ROOT / "tests" / "README.md").read_text().splitlines():
        number, _, told = line.removeprefix("| ").partition(" | ")
        if number.isdigit():
            file, named[number] = "", []
            for before, test in re.findall(r"`([\w/]*(?:\.py)?)::(\w+)`", told):
                file = before or file
                named[number].append(f"{file}::{test}")
    return named


def test_every_test_that_the_table_of_faults_names_is_there() -> None:
    named = named_tests()
    assert list(named) == [str(number) for number in range(1, 19)]
    for number, tests in named.items():
        assert tests, number
        for file, _, test in (name.partition("::") for name in tests):
            assert re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.M), test
