"""The prefixes of a recovered store, a line each."""

from __future__ import annotations

from dataclasses import dataclass

from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord
from pion_vllm_mlx.errors import DamagedData, NewerFormat
from pion_vllm_mlx.server.store.files import pread_exactly
from pion_vllm_mlx.server.store.index import place_file
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.tools.store_access import size_text


@dataclass(frozen=True)
class PrefixLine:
    """One namespace: its tokens by its completion record, its bytes, and what it lacks."""

    namespace: str
    tokens: int
    row_bytes: int
    fault: str = ""

    @property
    def complete(self) -> bool:
        """Whether a client may take it for a hit."""
        return not self.fault

    def text(self) -> str:
        held = f"{self.namespace}: {size_text(self.row_bytes)} of rows"
        return f"{held}, {self.fault}" if self.fault else f"{held}, {self.tokens:,} tokens"


def prefixes(state: State) -> list[PrefixLine]:
    """Every namespace whose both sides are there, the largest first. Reads the records."""
    found = []
    for namespace in state.namespaces():
        size = sum(session.row_bytes() for session in state.sides(namespace))
        tokens, fault = _record(state, namespace)
        shown = namespace.decode("utf-8", "backslashreplace")
        found.append(PrefixLine(shown, tokens, size, fault))
    return sorted(found, key=lambda prefix: (-prefix.row_bytes, prefix.namespace))


def _record(state: State, namespace: bytes) -> tuple[int, str]:
    """Tokens of a completion record, or why there are none to tell."""
    blob = state.states.get(namespace, {}).get(COMPLETION_LAYER)
    if blob is None:
        return 0, "no completion record: not a hit"
    try:
        data = pread_exactly(place_file(blob.place).fd, blob.length, blob.place.offset)
        return int(CompletionRecord.decode(data).ids.size), ""
    except (DamagedData, NewerFormat, OSError) as error:
        return 0, f"{error}: not a hit"
