"""Which models the patch serves: those whose attention goes through the seam, by their code.

A class of the model that appends to a cache (``update_and_fetch``), or one that it derives
from, must live in a module in which some function calls the seam by its name. What appends to
nothing we know, such as a recurrent layer, is refused by the class of its cache.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

from pion_vllm_mlx.errors import PionMlxCompatError
from pion_vllm_mlx.kernels.prefix import HEAD_DIMS, MAX_KV_HEADS
from pion_vllm_mlx.patch.seam import NAME, SEAM

_APPENDS = "update_and_fetch"
_ATTENTION = {"KVCache", "RotatingKVCache", "ConcatenateKVCache", "ChunkedKVCache"}
_AT_SERVER = {"KVCache", "RotatingKVCache", "ConcatenateKVCache"}
#: families whose layers attend to the K and V of others, with positions of the cache's own;
#: others may take positions from the number of keys, which lacks a prefix elsewhere
_SHARING = {"gemma3n", "gemma4_text", "gemma4", "iquestloopcoder"}


def shares_at_right_positions(model: Any) -> bool:
    """Whether it is known that shared K and V are attended to at their right positions."""
    return any(_name(module) in _SHARING for module in model.modules())


def refuse_bypassing(model: Any, cache: list[Any]) -> None:
    """Raises PionMlxCompatError naming the class that computes attention on its own."""
    for entry in flattened(cache):
        kind = type(entry)
        if kind.__module__ != "mlx_lm.models.cache" or kind.__name__ not in _ATTENTION:
            raise PionMlxCompatError(
                f"{_name(model)}: a layer with {kind.__name__} is no attention over K and V that "
                "can be computed elsewhere; use get_or_prefill"
            )
    for kind in {type(module) for module in model.modules()}:
        modules = {base.__module__ for base in kind.__mro__}
        if _appends(kind) and not any(_uses_seam(sys.modules.get(name)) for name in modules):
            raise PionMlxCompatError(
                f"{_name(model)}: {kind.__module__}.{kind.__qualname__} computes attention itself, "
                f"without mlx-lm's {NAME}; use get_or_prefill"
            )


def refuse_at_server(model: Any, cache: list[Any]) -> None:
    """Raises PionMlxCompatError for a cache whose attention a server cannot compute."""
    for entry in cache:
        name = type(entry).__name__
        if name not in _AT_SERVER:
            raise PionMlxCompatError(
                f"{_name(model)}: attention with {name} is computed in this process only, "
                "and the prefix is not in it"
            )
        if name == "RotatingKVCache" and entry.keep:
            raise PionMlxCompatError(f"{_name(model)}: a window that keeps its first tokens")


def refuse_shapes(model: Any, shapes: Sequence[tuple[int, int, int]]) -> None:
    """Raises PionMlxCompatError for a layer whose heads a server has no kernels for.

    ``shapes``: of each stored layer H_kv, and the dimensions of K and V.
    """
    for layer, (heads, keys, values) in enumerate(shapes):
        what = f"{_name(model)}: layer {layer} has"
        if keys != values:
            raise PionMlxCompatError(
                f"{what} keys of {keys} and values of {values}, which are attended in this "
                "process only, and the prefix is not in it"
            )
        if keys not in HEAD_DIMS or heads > MAX_KV_HEADS:
            known = ", ".join(map(str, sorted(HEAD_DIMS)))
            raise PionMlxCompatError(
                f"{what} {heads} KV heads of {keys}; a server attends to at most {MAX_KV_HEADS} "
                f"of {known}, and the prefix is not in this process"
            )


def flattened(cache: list[Any]) -> Iterator[Any]:
    """The caches with those of CacheLists, depth first."""
    for entry in cache:
        if type(entry).__name__ == "CacheList":
            yield from flattened(list(entry.caches))
        else:
            yield entry


def _name(model: Any) -> str:
    return str(type(model).__module__).rpartition(".")[2]


def _appends(kind: type) -> bool:
    return any(_APPENDS in code.co_names for code in _codes(vars(kind)))


def _uses_seam(module: types.ModuleType | None) -> bool:
    if module is None:
        return False
    own = [
        vars(value)
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    for code in (code for names in [vars(module), *own] for code in _codes(names, module)):
        for step in dis.get_instructions(code):
            if step.opname == "LOAD_GLOBAL" and SEAM.is_seam(vars(module).get(str(step.argval))):
                return True
    return False


def _codes(names: Any, module: types.ModuleType | None = None) -> Iterator[types.CodeType]:
    """The code of functions, those inside of them too; of one module, if one is given."""
    todo = [
        value.__code__
        for value in list(names.values())
        if isinstance(value, types.FunctionType)
        and (module is None or value.__module__ == module.__name__)
    ]
    while todo:
        code = todo.pop()
        yield code
        todo += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
