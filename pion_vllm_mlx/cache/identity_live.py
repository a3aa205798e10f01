"""The code that really runs: the functions a model's classes have now, and what those name.

Source text says what was installed; a function put in the place of another at run time says
something else. So the functions of the model's classes are followed through their globals,
closures and defaults, and each name is told with what it stands for now. Functions of our own
package count as the ones they replace: they compute the same numbers.
"""

from __future__ import annotations

import gc
import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property, partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import KVCache, RotatingKVCache

from pion_vllm_mlx.cache.identity_text import (
    all_names,
    bytecode_digest,
    global_names,
    source_file,
)
from pion_vllm_mlx.cache.identity_watch import Watch
from pion_vllm_mlx.cache.identity_weights import array_digest
from pion_vllm_mlx.errors import UnsupportedCache

_OURS = __name__.partition(".")[0]
_FOLLOWED = frozenset({"mlx", "mlx_lm", "vllm_mlx"})
_BY_NAME = frozenset(sys.stdlib_module_names - {"__main__"} | {"numpy", "nanobind", _OURS})
"""What these define counts by its name; so does what is built into MLX, with its version."""

_SET_ASIDE = "original"
"""The variable that holds what a function of ours replaces, where ``__wrapped__`` does not."""

_CONSTANTS = (bool, int, float, complex, str, bytes, range, slice, type(None), mx.Dtype)
_COMPILED: type = type(mx.compile(lambda x: x))
_BUILT_IN = (
    BuiltinFunctionType, type(mx.add), type(mx.array.sum), type(str.join), type(str.__len__)
)  # fmt: skip
_REFUSED = "the model's code cannot be compared"
_NATIVE = (mx, mx.fast)
"""Modules that hold no function of Python's own, unless one was put there."""


class LiveCode:
    """What the functions of a model are, for its key. Raises UnsupportedCache for what has no
    text that is the same in every process.

    ``digest`` is 32 hex digits; ``arrays`` are those that functions hold.
    """

    def __init__(self, roots: Iterable[type | FunctionType]) -> None:
        self.arrays: list[mx.array] = []
        self._watch = Watch()
        self._lines: set[str] = set()
        self._labels: dict[int, str] = {}
        self._open: list[FunctionType | type] = []
        roots = list(roots)
        self._near: set[str] = set()
        self._followed = _FOLLOWED | {_package(root.__module__) for root in roots}
        roots += [KVCache, RotatingKVCache]
        first = [self._label(root, root.__qualname__) for root in roots]
        for module in _NATIVE:
            self._native(module)
        while self._open:
            value = self._open.pop()
            if isinstance(value, type):
                self._class(value)
            else:
                self._globals(value)
        text = "\n".join([*first, *sorted(self._lines)])
        self.digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def unchanged(self) -> bool:
        """Whether every place still holds the very object that was read there."""
        return self._watch.same()

    # -- functions ------------------------------------------------------------------

    def _label(self, value: type | FunctionType, place: str) -> str:
        """The text of a function or class, the same in every process."""
        if isinstance(value, FunctionType):
            value = _replaced(value)
        known = self._labels.get(id(value))
        if known is not None:
            return known
        self._watch.keep(value)
        self._labels[id(value)] = f"{value.__qualname__}, itself"
        if isinstance(value, type):
            label = self._class_label(value)
        elif _package(_home(value)) in _BY_NAME:
            label = f"{_home(value)}.{value.__qualname__}"
        else:
            label = self._function_label(value, place)
        self._labels[id(value)] = label
        return label

    def _function_label(self, function: FunctionType, place: str) -> str:
        self._open.append(function)
        self._watch.function(function)
        self._near.add(_package(_home(function)))
        code = function.__code__
        source = source_file(code)
        strict = source is None or _package(_home(function)) not in self._followed
        parts = [source.digest + source.places[code] if source else bytecode_digest(code)]
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = [(name, c.cell_contents) for name, c in cells if not _is_empty(c)]
        held += [("defaults", function.__defaults__), ("keywords", function.__kwdefaults__)]
        for name, content in held:
            if content is not None:
                parts.append(f"{name}={self._value(content, f'{place}.{name}', strict)}")
        return hashlib.blake2b(";".join(parts).encode(), digest_size=16).hexdigest()

    def _globals(self, function: FunctionType) -> None:
        """One line for each global name of a function, with what it stands for."""
        code, own = function.__code__, function.__globals__
        source = source_file(code)
        skipped = source.reassigned if source else frozenset()
        wanted = sorted(global_names(code) - skipped)
        attributes = sorted(set(all_names(code)))
        self._watch.names(own, wanted)
        for name in wanted:
            if name in own:
                place = f"{self._labels[id(function)]}.{name}"
                self._named(place, own[name], attributes, typed=source is None)

    def _named(self, place: str, value: Any, names: list[str], *, typed: bool) -> None:
        if isinstance(value, ModuleType):
            self._module(place, value, names)
        elif typed or isinstance(value, _CONSTANTS) or self._is_code(value):
            self._lines.add(f"{place}={self._value(value, place, strict=False)}")

    def _module(self, place: str, module: ModuleType, names: list[str]) -> None:
        """The attributes of a module that a function may mean by its names."""
        inner, package = vars(module), _package(module.__name__)
        if package not in self._followed | self._near | _BY_NAME or package == _OURS:
            return
        found = [name for name in names if name in inner]
        self._watch.names(inner, found)
        for name in found:
            value = inner[name]
            if isinstance(value, ModuleType):
                if package in self._followed and f"{module.__name__}." in f"{value.__name__}.":
                    self._module(f"{place}.{name}", value, [n for n in names if n != name])
            elif self._is_code(value):
                text = self._value(value, f"{place}.{name}", strict=False)
                self._lines.add(f"{module.__name__}.{name}={text}")

    def _is_code(self, value: Any) -> bool:
        kinds = (FunctionType, type, MethodType, partial, _COMPILED, *_BUILT_IN)
        return isinstance(value, kinds)

    def _native(self, module: ModuleType) -> None:
        """Functions in the place of MLX's own, whoever calls them."""
        for space, name in ((vars(module), module.__name__), (vars(mx.array), "array")):
            names = [key for key, value in space.items() if callable(value)]
            self._watch.names(space, names)
            for key in names:
                value = space[key]
                if isinstance(value, (FunctionType, _COMPILED)) and not _is_native(value):
                    self._lines.add(f"{name}.{key}={self._value(value, key, strict=True)}")

    # -- classes --------------------------------------------------------------------

    def _class_label(self, kind: type) -> str:
        name = f"{kind.__module__}.{kind.__qualname__}"
        package = _package(kind.__module__)
        if package in _BY_NAME or package not in self._followed | self._near:
            return name
        self._open.append(kind)
        if package in _FOLLOWED:
            return name
        # Two classes of one name: what their functions are tells them apart.
        texts = [
            f"{key}={self._label(function, f'{kind.__qualname__}.{key}')}"
            for key, function in _functions(kind)
        ]
        made = hashlib.blake2b(";".join(texts).encode(), digest_size=16).hexdigest()
        return f"{kind.__qualname__} {made}"

    def _class(self, kind: type) -> None:
        """One line for each function and constant of a class, and for its bases."""
        label = self._labels[id(kind)]
        self._watch.kind(kind)
        bases = [self._label(base, base.__qualname__) for base in kind.__mro__[1:]]
        self._lines.add(f"{label}<{bases}")
        for key, function in _functions(kind):
            self._lines.add(f"{label}.{key}={self._label(function, f'{kind.__qualname__}.{key}')}")
        for key, value in vars(kind).items():
            place = f"{label}.{key}"
            if not key.startswith("__") and isinstance(value, _CONSTANTS):
                self._lines.add(f"{place}={value!r}")
            elif isinstance(value, (partial, _COMPILED, *_BUILT_IN)):
                self._lines.add(f"{place}={self._value(value, place, strict=False)}")

    # -- values ---------------------------------------------------------------------

    def _value(self, value: Any, place: str, strict: bool) -> str:
        """The text of what a function holds; of strict ones' objects, nothing is left out."""
        if isinstance(value, FunctionType | type):
            return self._label(value, place)
        if isinstance(value, mx.array):
            self.arrays.append(value)
            return array_digest(value).hex()
        if isinstance(value, _BUILT_IN):
            name = _built_in_name(value)
            if name is None and strict:
                raise UnsupportedCache(f"{_REFUSED}: {place} holds {value!r}")
            return name or "built in"
        if isinstance(value, Enum):
            return f"{_kind_name(value)}.{value.name}"
        if isinstance(value, _CONSTANTS):
            return repr(value)
        if isinstance(value, np.ndarray | np.generic):
            return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
        if isinstance(value, ModuleType):
            return value.__name__
        inner = self._inner(value)
        if inner is None:
            if strict:
                raise UnsupportedCache(f"{_REFUSED}: {place} holds a {_kind_name(value)}")
            return _kind_name(value)
        known = self._labels.get(id(value))
        if known is not None:
            return known
        self._watch.keep(value)
        self._labels[id(value)] = "itself"
        parts = sorted(
            f"{key}={self._value(item, f'{place}.{key}', strict)}" for key, item in inner.items()
        )
        text = f"{_kind_name(value)}({','.join(parts)})"
        self._labels[id(value)] = text
        return text

    def _inner(self, value: Any) -> Mapping[str, Any] | None:
        """What an object holds, by name; None where that is not known."""
        if isinstance(value, _COMPILED):
            found = [f for f in gc.get_referents(value) if isinstance(f, FunctionType)]
            return {"compiled": found[0]} if found else None
        if isinstance(value, partial):
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        if isinstance(value, MethodType):
            return {"func": value.__func__, "self": value.__self__}
        if isinstance(value, Module):  # its arrays are no setting of a function
            return None
        if isinstance(value, dict | list | tuple | set | frozenset):
            self._watch.container(value)
            if isinstance(value, dict):
                return {repr(key): item for key, item in value.items()}
            if isinstance(value, set | frozenset):
                return {self._value(item, "set", strict=True): None for item in value}
            return {f"{index}": item for index, item in enumerate(value)}
        if _package(type(value).__module__) in _BY_NAME | {"mlx", _OURS}:
            return None
        space = getattr(value, "__dict__", None)
        if not isinstance(space, dict):
            return None
        self._watch.container(space)
        return {**space, "<class>": type(value)}


def _replaced(function: FunctionType) -> FunctionType:
    """The function that one of our own package stands for, or itself."""
    while _package(_home(function)) == _OURS:
        original = getattr(function, "__wrapped__", None)
        if original is None:
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            original = next((c.cell_contents for name, c in cells if name == _SET_ASIDE), None)
        if not isinstance(original, FunctionType):
            break
        function = original
    return function


def _functions(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The functions in a class's own namespace, those of properties and the like included."""
    found: list[Any]
    generated = "__dataclass_fields__" in vars(kind)
    for key, value in list(vars(kind).items()):
        if isinstance(value, staticmethod | classmethod):
            found = [value.__func__]
        elif isinstance(value, property):
            found = [value.fget, value.fset]
        else:
            found = [value.func if isinstance(value, cached_property) else value]
        for function in found:
            if isinstance(function, FunctionType) and not (
                generated and function.__code__.co_filename == "<string>"
            ):
                yield key, function


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell  # never: but reading it raises where nothing is held
    except ValueError:
        return True


def _package(module: str | None) -> str:
    return str(module).partition(".")[0]


def _home(function: FunctionType) -> str:
    """The module whose globals a function has: ``__module__`` is what a wrapper says."""
    return str(function.__globals__.get("__name__"))


def _is_native(value: object) -> bool:
    return isinstance(value, FunctionType) and _package(_home(value)) == "mlx"


def _kind_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _built_in_name(value: Any) -> str | None:
    """The name of a built-in function of a library; None where it is bound to an object."""
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, ModuleType | type):
        return None
    space = getattr(value, "__objclass__", owner if isinstance(owner, type) else None)
    name = getattr(value, "__qualname__", getattr(value, "__name__", None))
    module = getattr(space, "__module__", None) or getattr(value, "__module__", None)
    return f"{module}.{name}" if name is not None and module is not None else None
