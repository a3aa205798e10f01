"""The seam: ``mlx_lm.models.base.scaled_dot_product_attention`` and its copies by name.

Every model of mlx-lm imports the function by name, so installing replaces the attribute of
each module that holds the very object, and uninstalling puts that object back wherever the
replacement is found: also in models that were imported in between.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from pion_vllm_mlx.errors import PionMlxCompatError

NAME = "scaled_dot_product_attention"
BASE = "mlx_lm.models.base"
_MODELS = "mlx_lm.models."
OLDEST, NEWEST = (0, 20, 1), (0, 32, 2)
TESTED_RANGE = ">=0.31.3,<0.33"
EXPECTED = ("queries", "keys", "values", "cache", "scale", "mask", "sinks")
#: what the patch uses of mlx-lm, by module.
SYMBOLS = {
    BASE: (NAME, "create_causal_mask"),
    "mlx_lm.models.cache": ("make_prompt_cache", "KVCache", "RotatingKVCache", "CacheList"),
}

Attention = Callable[..., Any]


def mlx_lm_seam_report() -> dict[str, Any]:
    """What is known of the installed mlx-lm and its attention function; never raises.

    ``mlx_lm_version`` is None where it is not installed.
    """
    version = _version()
    report: dict[str, Any] = {
        "mlx_lm_version": version,
        "tested_range": TESTED_RANGE,
        "max_tested": ".".join(map(str, NEWEST)),
        "sdpa_params": None,
        "expected_sdpa_params": list(EXPECTED),
        "missing_symbols": [],
        "signature_ok": False,
    }
    if version is None:
        return report
    for module, names in SYMBOLS.items():
        found = _module(module)
        missing = [name for name in names if found is None or name not in vars(found)]
        report["missing_symbols"] += [f"{module}.{name}" for name in missing]
    parameters = _parameters(SEAM.original or vars(_module(BASE) or types).get(NAME))
    report["sdpa_params"] = parameters
    report["signature_ok"] = bool(parameters) and parameters == [*EXPECTED][: len(parameters or ())]
    return report


def check_seam() -> None:
    """Raises PionMlxCompatError naming what differs; warns of an mlx-lm newer than tested."""
    report = mlx_lm_seam_report()
    version = report["mlx_lm_version"]
    if version is None:
        raise PionMlxCompatError("mlx-lm is not installed: pip install 'pion-vllm-mlx[mlx]'")
    numbers = _numbers(version)
    if numbers < OLDEST:
        raise PionMlxCompatError(f"mlx-lm {version} is older than 0.20.1")
    if report["missing_symbols"]:
        raise PionMlxCompatError(f"mlx-lm {version} lacks {', '.join(report['missing_symbols'])}")
    if not report["signature_ok"]:
        raise PionMlxCompatError(
            f"mlx-lm {version}: {NAME} takes {report['sdpa_params']}, "
            f"expected {report['expected_sdpa_params']}"
        )
    if numbers > NEWEST:
        warnings.warn(
            f"mlx-lm {version} is newer than the newest tested one, {report['max_tested']}",
            stacklevel=3,
        )


class Seam:
    """Which function is in place. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.original: Attention | None = None
        self.replacement: Attention | None = None

    def installed(self) -> bool:
        """Whether the replacement is in place."""
        return self.replacement is not None

    def is_seam(self, function: object) -> bool:
        """Whether a function is mlx-lm's own attention, or what replaces it."""
        base = _module(BASE)
        known = (self.original, self.replacement, vars(base).get(NAME) if base else None)
        return function is not None and any(function is one for one in known)

    def install(self, make: Callable[[Attention], Attention]) -> None:
        """Puts ``make(original)`` in place everywhere; nothing where that was done before.

        Raises PionMlxCompatError, and changes nothing, where another package was there first.
        """
        check_seam()
        with self._lock:
            if self.replacement is not None:
                return
            original = getattr(importlib.import_module(BASE), NAME)
            _refuse_replaced(original)
            self.original, self.replacement = original, make(original)
            _replace(original, self.replacement)

    def uninstall(self) -> None:
        """Puts the original back everywhere; nothing where it is in place."""
        with self._lock:
            if self.replacement is None or self.original is None:
                return
            _replace(self.replacement, self.original)
            self.original = self.replacement = None


SEAM = Seam()


def _refuse_replaced(original: Attention) -> None:
    """Raises PionMlxCompatError for models that hold another function than mlx-lm's base.

    They were imported before, or patched after, somebody else replaced it: whichever is put
    in place now, some of them would not get it.
    """
    for module in _modules():
        held = vars(module).get(NAME)
        if not module.__name__.startswith(_MODELS) or held is None or held is original:
            continue
        home = str(getattr(held, "__module__", None))
        if home == BASE or not home.startswith(_MODELS):
            whose = {str(getattr(one, "__module__", None)) for one in (held, original)} - {BASE}
            raise PionMlxCompatError(
                f"{module.__name__} and {BASE} hold different functions as {NAME}: another "
                f"package replaced one of them ({', '.join(sorted(whose)) or 'unknown'}); install "
                "this patch before it, or take that one back"
            )


def _replace(present: Attention, wanted: Attention) -> None:
    for module in _modules():
        for name, value in list(vars(module).items()):
            if value is present:
                setattr(module, name, wanted)


def _modules() -> Iterator[types.ModuleType]:
    """Modules of other packages; our own ones hold the objects to compare with."""
    own = __name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if isinstance(module, types.ModuleType) and name.partition(".")[0] != own:
            yield module


def _version() -> str | None:
    """The version of mlx-lm; None where it cannot be imported."""
    if _module(BASE) is None:
        return None
    try:
        return metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return str(vars(sys.modules["mlx_lm"]).get("__version__", "0"))


def _module(name: str) -> types.ModuleType | None:
    """The module, None where importing it fails: a report is wanted of broken ones too."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, AttributeError, TypeError, ValueError):
        return None


def _parameters(function: Any) -> list[str] | None:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
