"""Typed access to the fields of a JSON request: what has the wrong type is refused by its name."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from pion_vllm_mlx.serve.api_errors import bad_request

Json = dict[str, Any]


def parse_object(raw: bytes) -> Json:
    """The JSON object in ``raw``.

    Raises ``ApiError`` 400 for anything else, NaN and Infinity included: they are no JSON, and
    pass every comparison of a range check.
    """
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_request(f"the body is not JSON: {reason}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def text(holder: Json, name: str, where: str = "") -> str:
    """A string that must be there."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}{name} must be a string")
    return value


def optional_text(holder: Json, name: str, where: str = "") -> str | None:
    """A string, or None where the field is absent or null."""
    return None if holder.get(name) is None else text(holder, name, where)


def flag(holder: Json, name: str) -> bool:
    """A boolean; absent or null is False."""
    value = holder.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad_request(f"{name} must be true or false")
    return value


def objects(holder: Json, name: str, where: str = "") -> list[Json]:
    """A list of objects; absent or null is empty."""
    value = holder.get(name)
    if value is None:
        return []
    return object_list(value, f"{where}{name}")


def object_list(value: object, name: str) -> list[Json]:
    """``value`` if it is a list of objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise bad_request(f"{name} must be a list of objects")
    return value


def count(holder: Json, name: str, least: int = 1) -> int | None:
    """A whole number of at least ``least``, or None where the field is absent or null."""
    value = holder.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_request(f"{name} must be an integer")
    if value < least:
        raise bad_request(f"{name} must be at least {least}")
    return value


def numbers(holder: Json, *names: str) -> Json:
    """Those of the named fields that are there; each must be a number."""
    found = {name: holder[name] for name in names if holder.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_request(f"{name} must be a number")
    return found


def stops(holder: Json, name: str) -> list[str]:
    """Stop sequences: a string or a list of strings; absent or null is none."""
    value = holder.get(name)
    if value is None:
        return []
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_request(f"{name} must be a list of strings")
    return [word for word in words if word]
