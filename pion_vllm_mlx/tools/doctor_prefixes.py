"""The prefixes of a recovered store, a line each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crc32c import crc32c

from pion_vllm_mlx.cache.completion import COMPLETION_LAYER, CompletionRecord, looks_like_one
from pion_vllm_mlx.errors import DamagedData, NewerFormat
from pion_vllm_mlx.server.store.files import pread_exactly
from pion_vllm_mlx.server.store.index import place_file
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.tools.store_access import size_text


@dataclass(frozen=True)
class PrefixLine:
    """One namespace: its tokens by its completion record, its bytes, and what it lacks.

    ``damaged``: what it lacks, it had. ``worker``: who holds it, where there are several.
    """

    namespace: str
    tokens: int
    row_bytes: int
    fault: str = ""
    damaged: bool = False
    worker: int | None = None

    @property
    def complete(self) -> bool:
        """Whether a client may take it for a hit."""
        return not self.fault

    def text(self) -> str:
        where = "" if self.worker is None else f", worker {self.worker}"
        held = f"{self.namespace}: {size_text(self.row_bytes)} of rows{where}"
        return f"{held}, {self.fault}" if self.fault else f"{held}, {self.tokens:,} tokens"


def prefixes(state: State) -> list[PrefixLine]:
    """Every namespace whose both sides are there, the largest first. Reads the records."""
    found = []
    for namespace in state.namespaces():
        size = sum(session.row_bytes() for session in state.sides(namespace))
        shown = namespace.decode("utf-8", "backslashreplace")
        found.append(replace(_record(state, namespace), namespace=shown, row_bytes=size))
    return sorted(found, key=lambda prefix: (-prefix.row_bytes, prefix.namespace))


def _record(state: State, namespace: bytes) -> PrefixLine:
    """What a namespace's completion record tells, or why it tells nothing."""
    blob = state.states.get(namespace, {}).get(COMPLETION_LAYER)
    if blob is None:
        return PrefixLine("", 0, 0, "no completion record: not a hit")
    try:
        file = place_file(blob.place)  # held: it closes when nobody does
        data = pread_exactly(file.fd, blob.length, blob.place.offset)
    except OSError as error:
        return PrefixLine("", 0, 0, f"completion record: {error}: not a hit", damaged=True)
    try:
        return PrefixLine("", int(CompletionRecord.decode(data).ids.size), 0)
    except NewerFormat as error:
        return PrefixLine("", 0, 0, f"{error}: not a hit")
    except DamagedData as error:
        # bytes that another client keeps there are as it stored them
        damaged = crc32c(data) != blob.crc or looks_like_one(data)
        return PrefixLine("", 0, 0, f"{error}: not a hit", damaged=damaged)
