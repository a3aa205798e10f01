"""The page of flags and limits says what the server does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pion_vllm_mlx.config import ServerEnvironment
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.option_docs import manual
from pion_vllm_mlx.server.options import options, parse, usage

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_in_docs_is_the_one_of_the_tables() -> None:
    written = (DOCS / "server.md").read_text(encoding="utf-8")
    assert written == manual(), "make docs writes it anew"


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_flag_is_in_the_page_and_known(option: tuple[str, ...]) -> None:
    name, _, metavar, text = option
    assert f"`{name}" in manual()
    assert (name in usage()) is bool(text)
    # a flag that is said to take a value takes one
    if metavar:
        with pytest.raises(ConfigError, match="requires a value"):
            parse([name], ServerEnvironment())


def test_links_of_the_page_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", manual())
    assert targets and all((DOCS / target).is_file() for target in targets)


def test_every_redis_cli_of_the_documents_names_the_port() -> None:
    pages = [*DOCS.glob("*.md"), DOCS.parent / "README.md"]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines()]
    asking = [line for line in lines if re.search(r"(^|do )redis-cli ", line)]
    assert asking and all(" -p " in line for line in asking), asking
