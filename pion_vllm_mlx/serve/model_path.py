"""Whether a model that is named by a path is there, asked before anything is loaded."""

from __future__ import annotations

from pathlib import Path


def why_no_model(model: str) -> str | None:
    """Why a path is no model: it would be taken for a repository's name. None for any other.

    Nor is an empty name one, which would be the current folder.
    """
    if not model:
        return "the model has no name: --model PATH_OR_REPOSITORY"
    names_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if names_path and not Path(model).exists():
        return f"the model {model} cannot be loaded: there is no such folder"
    return None
