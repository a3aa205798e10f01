"""Places in memory and the objects they held when read: seen again in microseconds."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import FunctionType
from typing import Any


class Watch:
    """The places, added one by one, with what each holds at that time."""

    """Places in memory and the objects they held when read: seen again in microseconds."""

    def __init__(self) -> None:
        self._functions: list[FunctionType] = []
        self._parts: list[Any] = []
        self._cells: list[Any] = []
        self._contents: list[Any] = []
        self._kept: list[Any] = []
        self._spaces: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._containers: list[tuple[Callable[[], Iterable[Any]], list[Any]]] = []

    def function(self, function: FunctionType) -> None:
        """Watches the code of a function, its defaults and what its closure holds."""
        self._functions.append(function)
        self._parts += _parts_of(function)
        for cell in function.__closure__ or ():
            try:
                self._contents.append(cell.cell_contents)
            except ValueError:  # not assigned yet
                continue
            self._cells.append(cell)

    def names(self, space: Mapping[str, Any], names: Iterable[str]) -> None:
        """Watches names of a module, those that are not there included."""
        known = self._spaces.setdefault(id(space), (space, {}))[1]
        known.update((name, space.get(name)) for name in names)

    def kind(self, kind: type) -> None:
        """Watches what a class defines, and its bases."""
        self._containers.append((vars(kind).values, list(vars(kind).values())))
        self._containers.append((lambda: kind.__mro__, list(kind.__mro__)))

    def container(self, value: Any) -> None:
        """Watches what a dict, list, tuple or set holds."""
        look = value.values if isinstance(value, dict) else value.__iter__
        self._containers.append((look, list(look())))

    def keep(self, value: Any) -> None:
        """Holds an object, so that its id is not given to another one."""
        self._kept.append(value)

    def same(self) -> bool:
        """Whether every place still holds the very object that it held."""
        is_ = operator.is_
        try:
            parts = chain.from_iterable(map(_parts_of, self._functions))
            if not all(map(is_, parts, self._parts)):
                return False
            if not all(map(is_, map(_content_of, self._cells), self._contents)):
                return False
        except ValueError:  # a cell that was emptied
            return False
        for space, names in self._spaces.values():
            if not all(map(is_, map(space.get, names), names.values())):
                return False
        for look, held in self._containers:
            now = list(look())
            if len(now) != len(held) or not all(map(is_, now, held)):
                return False
        return True


_parts_of = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_content_of = operator.attrgetter("cell_contents")
