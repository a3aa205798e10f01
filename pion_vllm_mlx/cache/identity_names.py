"""Names of prefixes, and what makes two identities differ. Needs no MLX."""

from __future__ import annotations

import hashlib
from typing import Any


def make_namespace(*parts: str) -> str:
    """The namespace of key parts: SHA-256 of the parts joined by ``|``, 32 hex digits."""
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:32]


def first_difference(stored: Any, wanted: Any, path: str = "") -> str | None:
    """The dotted path of the first field in which two identities differ, or None."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return _in_dicts(stored, wanted, f"{path}." if path else "")
    if isinstance(stored, list) and isinstance(wanted, list) and len(stored) == len(wanted):
        for index, (left, right) in enumerate(zip(stored, wanted, strict=True)):
            found = first_difference(left, right, f"{path}[{index}]")
            if found is not None:
                return found
        return None
    same = type(stored) is type(wanted) and stored == wanted
    return None if same else path or "identity"


def _in_dicts(stored: dict[str, Any], wanted: dict[str, Any], prefix: str) -> str | None:
    for key in sorted(stored.keys() | wanted.keys()):
        if key not in stored or key not in wanted:
            return f"{prefix}{key}"
        found = first_difference(stored[key], wanted[key], f"{prefix}{key}")
        if found is not None:
            return found
    return None
