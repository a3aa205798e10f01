"""What a model object is made of: arrays, settings and code, in one fixed order."""

from __future__ import annotations

import hashlib
import json
import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

_UNUSED = frozenset({"_training", "_no_grad"})
"""Attributes of every module that no K/V depends on."""

_LEAVES = frozenset({mx.array, mx.Dtype, type(None), bool, int, float, str})
"""What holds nothing: met a few thousand times a walk, so found by type."""

_AS_WRITTEN = (bool, int, float, complex, str, bytes, range, slice, mx.Dtype)
"""Values whose text says it all."""

_LIBRARIES = frozenset(sys.stdlib_module_names | {"mlx", "numpy"})
"""Objects and functions of these count by their name."""


def canonical_json(value: Any) -> str:
    """One text for equal values, in every process: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_type_name)


@dataclass
class Walk:
    """The result of a walk over a model.

    ``arrays`` are (path, array), arrays of attributes that begin with an underscore
    (RoPE frequencies) included; ``scalars`` one text per setting, class or function;
    ``code`` the module classes and functions that were met.
    """

    arrays: list[tuple[str, mx.array]] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    code: list[type | FunctionType] = field(default_factory=list)
    _open: set[int] = field(default_factory=set)

    def visit(self, value: Any, path: str) -> None:
        """Adds ``value`` and what it holds; an object inside itself is met only once."""
        if isinstance(value, mx.array):
            self.arrays.append((path, value))
        elif value is None or (isinstance(value, _AS_WRITTEN) and not isinstance(value, Enum)):
            self.scalars.append(f"{path}={value!r}")
        elif isinstance(value, np.ndarray | np.generic):
            self.scalars.append(f"{path}={_numpy_text(np.asarray(value))}")
        elif isinstance(value, set | frozenset):
            self.scalars.append(f"{path}={_set_text(value)}")
        elif id(value) not in self._open:
            self._open.add(id(value))
            self.scalars.append(f"{path}:{_name(value)}")
            if isinstance(value, Module):
                self.code.append(type(value))
            elif isinstance(value, FunctionType) and not _of_a_library(value):
                self.code.append(value)
            for key, item in sorted(_held_by(value).items(), key=_key_text):
                self.visit(item, f"{path}.{_key_text((key, None))}")
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
            held.append(type(value))
            stack.extend(item for key, item in vars(value).items() if key not in _UNUSED)
            stack.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset):
            stack.extend(value)
        elif isinstance(value, np.ndarray):
            held.append(value.copy())  # may be assigned into: never the very same object again
        elif isinstance(value, FunctionType):
            cells = value.__closure__ or ()
            held.append(value.__code__)
            stack += (value.__defaults__, value.__kwdefaults__, *map(_content, cells))
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
    if isinstance(value, partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"func": value.__func__, "self": value.__self__}
    if isinstance(value, type | Enum | BuiltinFunctionType) or _of_a_library(value):
        return {}
    if isinstance(value, FunctionType):
        return _function_parts(value)
    return _attributes(value)


def _of_a_library(value: Any) -> bool:
    module = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return str(module).partition(".")[0] in _LIBRARIES


def _function_parts(function: FunctionType) -> Mapping[str, Any]:
    """What tells apart functions of one name in one text: the text itself is in the key."""
    cells = function.__closure__ or ()
    inner = {f"<{index}>": _content(cell) for index, cell in enumerate(cells)}
    return {
        **inner,
        "line": function.__code__.co_firstlineno,
        "names": function.__code__.co_names,
        "constants": [c for c in function.__code__.co_consts if isinstance(c, _AS_WRITTEN)],
        "defaults": function.__defaults__,
        "keywords": function.__kwdefaults__,
    }


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _attributes(value: Any) -> Mapping[str, Any]:
    try:
        own: dict[str, Any] = vars(value)
        return own
    except TypeError:  # an object with slots
        names = (f.name for f in fields(value)) if is_dataclass(value) else ()
        return {name: getattr(value, name) for name in names}


def _name(value: Any) -> str:
    """The qualified name of a function, class or constant, else that of the value's class."""
    if isinstance(value, type | FunctionType | MethodType | BuiltinFunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    kind = type(value)
    member = f".{value.name}" if isinstance(value, Enum) else ""
    return f"{kind.__module__}.{kind.__qualname__}{member}"


def _key_text(pair: tuple[Any, Any]) -> str:
    key = pair[0]
    if isinstance(key, str):
        return key
    return repr(key) if isinstance(key, _AS_WRITTEN) else _name(key)


def _set_text(values: set[Any] | frozenset[Any]) -> str:
    texts = (repr(v) if isinstance(v, _AS_WRITTEN) else _name(v) for v in values)
    return "{" + ",".join(sorted(texts)) + "}"


def _numpy_text(array: np.ndarray[Any, Any]) -> str:
    digest = hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()
    return f"{array.dtype.str}{array.shape}{digest}"


def _type_name(value: Any) -> str:
    return f"<{_name(value)}>"
