"""Typed access to the fields of a JSON request: what has the wrong type is refused by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from pion_vllm_mlx.serve.api_errors import bad_request

Json = dict[str, Any]

#: how an escape in JSON begins that is half of a character, unless its other half follows.
_MAYBE_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
_HALF = re.compile("[\ud800-\udfff]")


def parse_object(raw: bytes) -> Json:
    """The JSON object in ``raw``.

    Raises ``ApiError`` 400 for anything else, NaN and Infinity included: they are no JSON, and
    pass every comparison of a range check, and so is half of a surrogate pair, which no
    tokenizer takes.
    """
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise bad_request(f"the body is not JSON: {reason}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    if _MAYBE_HALF.search(raw):
        for where in halves(value):
            raise bad_request(f"{where} has half a surrogate pair, which is no character")
    return value


def halves(value: object, where: str = "") -> Iterator[str]:
    """The paths of those texts in a JSON value, names included, that hold half a character."""
    left = [(where, value)]
    while left:
        path, one = left.pop()
        if isinstance(one, dict):
            if any(_HALF.search(name) for name in one):
                yield path or "the body"
            left += [(f"{path}.{name}" if path else name, item) for name, item in one.items()]
        elif isinstance(one, list):
            left += [(f"{path}[{index}]", item) for index, item in enumerate(one)]
        elif isinstance(one, str) and _HALF.search(one):
            yield path


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


def mapping(holder: Json, name: str, where: str = "") -> Json:
    """An object; absent or null is empty."""
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise bad_request(f"{where}{name} must be an object")
    return value


def object_text(holder: Json, name: str, where: str = "") -> None:
    """An object, itself or as JSON text; absent, null or empty is fine too."""
    value = holder.get(name)
    if isinstance(value, str) and value:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{where}{name} is not JSON: {error}") from error
        for _ in halves(value):
            raise bad_request(f"{where}{name} has half a surrogate pair, which is no character")
    if value and not isinstance(value, dict):
        raise bad_request(f"{where}{name} must be a JSON object")


def seed(holder: Json, name: str) -> int | None:
    """A whole number of 64 bits, signed or not, as an unsigned one; None where there is none."""
    value = count(holder, name, least=-(1 << 63))
    if value is None:
        return None
    if value >= 1 << 64:
        raise bad_request(f"{name} must be below 2**64")
    return value % (1 << 64)


def numbers(holder: Json, *names: str) -> Json:
    """Those of the named fields that are there; each must be a number."""
    found = {name: holder[name] for name in names if holder.get(name) is not None}
    for name, value in found.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise bad_request(f"{name} must be a number")
    return found


def stops(holder: Json, name: str, *, lone: bool = False) -> list[str]:
    """Stop sequences: a list of strings, none of them empty; absent or null is none.

    ``lone``: a string stands for a list of it.
    """
    value = holder.get(name)
    if value is None:
        return []
    words = [value] if lone and isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise bad_request(f"{name} must be a list of strings")
    if "" in words:
        raise bad_request(f"{name} has an empty string, which would stop every reply at once")
    return words
