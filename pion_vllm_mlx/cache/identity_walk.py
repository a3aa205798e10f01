"""What a model object is made of: arrays, scalar settings and classes, in one fixed order."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

_UNUSED = frozenset({"_training", "_no_grad"})
"""Attributes of every module that no K/V depends on."""

_LEAVES = frozenset({mx.array, mx.Dtype, type(None), bool, int, float, str, FunctionType})
"""What holds nothing: met a few thousand times a walk, so found by type."""


def canonical_json(value: Any) -> str:
    """One text for equal values, in every process: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_type_name)


@dataclass
class Walk:
    """The result of a walk over a model.

    ``arrays`` are (path, array), arrays of attributes that begin with an underscore
    (RoPE frequencies) included; ``scalars`` one text per setting or class name;
    ``classes`` the module classes that were met.
    """

    arrays: list[tuple[str, mx.array]] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    classes: list[type] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)
    _texts: dict[int, str] = field(default_factory=dict)

    def visit(self, value: Any, path: str) -> None:
        """Adds ``value`` and what it holds; an object inside itself is met only once."""
        if isinstance(value, mx.array):
            self.arrays.append((path, value))
        elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.scalars.append(f"{path}={value!r}")
        elif is_dataclass(value) and not isinstance(value, type):
            text = self._texts.get(id(value)) or canonical_json(asdict(value))
            self._texts[id(value)] = text
            self.scalars.append(f"{path}={text}")
        elif id(value) not in self._open:
            self._open.add(id(value))
            self.scalars.append(f"{path}:{_name(value)}")
            if isinstance(value, Module):
                self.classes.append(type(value))
            for key, item in sorted(_held_by(value).items(), key=_first_as_text):
                self.visit(item, f"{path}.{key}")
            self._open.discard(id(value))


def walk(model: Any) -> Walk:
    """Meets everything that a model holds. Evaluates nothing."""
    found = Walk()
    found.visit(model, "")
    return found


def held_objects(model: Any) -> list[Any]:
    """Every object that the walk would meet, fast: to see whether any was replaced.

    The list keeps the objects alive, so that an id cannot be given to another one.
    """
    held: list[Any] = []
    seen: set[int] = set()
    stack: list[Any] = [model]
    while stack:
        value = stack.pop()
        held.append(value)
        if type(value) in _LEAVES or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Module):
            stack.extend(item for key, item in vars(value).items() if key not in _UNUSED)
            stack.extend(value.values())
        elif isinstance(value, list | tuple):
            stack.extend(value)
        else:
            stack.extend(_held_by(value).values())
    return held


def same_objects(left: list[Any], right: list[Any]) -> bool:
    """Whether two lists hold the very same objects in the same order."""
    return len(left) == len(right) and all(map(operator.is_, left, right))


def _held_by(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, Module):
        own = {key: item for key, item in vars(value).items() if key not in _UNUSED}
        return {**own, **value}
    if isinstance(value, Mapping):
        return value
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if type(value).__module__.startswith("mlx_lm.") and not is_dataclass(value):
        return _attributes(value)
    return {}


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        own: dict[str, Any] = vars(value)
        return own
    except TypeError:  # an object with slots has no settings of its own to show
        return {}


def _name(value: Any) -> str:
    """The qualified name of a function or class, else that of the value's class."""
    if isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _first_as_text(pair: tuple[Any, Any]) -> str:
    return str(pair[0])


def _type_name(value: Any) -> str:
    return f"<{_name(value)}>"
