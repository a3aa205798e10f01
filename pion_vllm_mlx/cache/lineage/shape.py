"""What the caches of a model look like, and their metadata at any number of tokens.

Rows can be cut at every token. A recurrent state, and what depends on how a cache came
about, exists only where it was taken: such a model restores at checkpoints alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.layers import supported
from pion_vllm_mlx.cache.leaf import ArraySpec
from pion_vllm_mlx.cache.lineage.coverage import Ranges, Window, needed
from pion_vllm_mlx.cache.lineage.types import LineageOptions
from pion_vllm_mlx.errors import DamagedData, UnsupportedCache

Slot = dict[str, Any]

_ROWS_ANYWHERE = frozenset({"KVCache", "QuantizedKVCache", "ConcatenateKVCache", "RotatingKVCache"})


def flat(slots: Sequence[Slot]) -> Iterator[Slot]:
    """The slots of a cache, CacheLists opened, in order."""
    for slot in slots:
        if slot.get("class") == "CacheList":
            yield from flat(slot["caches"])
        else:
            yield slot


def classes_of(slots: Sequence[Slot]) -> list[Any]:
    """The nested class names of a cache."""
    return [(slot["class"], classes_of(slot.get("caches", []))) for slot in slots]


def window_of(slot: Slot) -> Window | None:
    """The window of a sliding-window slot, None of any other."""
    if slot["class"] != "RotatingKVCache":
        return None
    return Window(int(slot["max_size"]), int(slot["keep"]))


def chunks_of(slot: Slot) -> Window | None:
    """The chunk of a slot with chunked attention, None of any other.

    What it has dropped depends on how it was filled: only where it was taken its rows are known
    to be enough. They are stored as those of a window.
    """
    return Window(int(slot["chunk_size"]), 0) if slot["class"] == "ChunkedKVCache" else None


def needs_checkpoints(slots: Sequence[Slot]) -> bool:
    """Whether caches restore only where they were taken."""
    return any(slot["class"] not in _ROWS_ANYWHERE for slot in flat(slots))


def array_specs(slot: Slot) -> list[ArraySpec]:
    """The arrays of one slot that have rows."""
    specs = [ArraySpec.from_json(value) for value in slot.get("arrays", [])]
    return [spec for spec in specs if spec.dim]


@dataclass(frozen=True)
class Shape:
    """The caches of a model, before anything is in them.

    ``settings`` are those of its slots, nested; with ``kv_bits`` its plain caches are
    quantized ones of ``kv_group_size``.
    """

    settings: list[Slot]

    @staticmethod
    def of(model: Any, draft_model: Any, kv_bits: int | None, kv_group_size: int) -> Shape:
        """The shape of a model's caches. Raises UnsupportedCache naming what is unknown."""
        slots = supported(model) + (supported(draft_model) if draft_model is not None else [])
        if kv_bits is not None:
            slots = [_quantized(slot, kv_bits, kv_group_size) for slot in slots]
        return Shape(slots)

    @property
    def windows(self) -> tuple[Window, ...]:
        found = {window_of(slot) for slot in flat(self.settings)}
        return tuple(sorted(window for window in found if window is not None))

    @property
    def stateful(self) -> bool:
        """Whether a restore needs a checkpoint."""
        return needs_checkpoints(self.settings)

    @property
    def wants_cuts(self) -> bool:
        return self.stateful or bool(self.windows)

    def check(self, slots: Sequence[Slot], length: int) -> None:
        """Raises UnsupportedCache for slots of another make, or of other than ``length`` tokens."""
        if classes_of(slots) != classes_of(self.settings):
            raise UnsupportedCache("these caches are not of the classes that the model builds")
        for slot, setting in zip(flat(slots), flat(self.settings), strict=True):
            for name, value in setting.items():
                if slot.get(name) != value:
                    raise UnsupportedCache(
                        f"slot {slot['slot']}: {name} is {slot.get(name)}, the model's {value}"
                    )
            if slot.get("offset", length) != length:
                raise UnsupportedCache(
                    f"slot {slot['slot']} holds {slot['offset']} tokens of {length}"
                )


def refuse_late_quantizing(options: LineageOptions) -> None:
    """Raises UnsupportedCache where the same prompt has plain caches first, then others.

    Neither are the plain model's: what follows a quantized row was computed from it.
    """
    if options.kv_bits is not None and options.quantized_kv_start > 0:
        raise UnsupportedCache(
            f"KV caches that are quantized from token {options.quantized_kv_start:,} on: "
            "--quantized-kv-start 0 has them stored"
        )


def _quantized(slot: Slot, bits: int, group_size: int) -> Slot:
    """What mlx-lm's ``maybe_quantize_kv_cache`` makes of a slot: nested ones stay."""
    if slot["class"] != "KVCache":
        return slot
    return {"class": "QuantizedKVCache", "group_size": group_size, "bits": bits}


def slots_at(slots: Sequence[Slot], length: int) -> list[Slot]:
    """The metadata of a cache of rows at ``length`` tokens, from that at another length.

    A window's rows are in temporal order, as a prefill leaves them. At its own length the
    metadata stays as it is. Raises DamagedData for a slot that is not made of rows.
    """
    return [_slot_at(slot, length) for slot in slots]


def _slot_at(slot: Slot, length: int) -> Slot:
    if slot.get("class") == "CacheList":
        return {**slot, "caches": slots_at(slot["caches"], length)}
    if slot.get("class") not in _ROWS_ANYWHERE:
        raise DamagedData(f"a {slot.get('class')} slot has no rows to cut")
    if slot["offset"] == length:
        return slot
    window = window_of(slot)
    if window is None:
        return {**slot, "offset": length, "ranges": [[0, length]]}
    ranges = [list(pair) for pair in needed(window, length)]
    return {**slot, "offset": length, "index": min(length, window.size), "ranges": ranges}


def window_leaves(slots: Sequence[Slot]) -> dict[int, Window]:
    """Per leaf of which early rows may be missing, its window."""
    found: dict[int, Window] = {}
    for slot in flat(slots):
        window = window_of(slot) or chunks_of(slot)
        if window is not None:
            found.update((spec.layer, window) for spec in array_specs(slot))
    return found


def wanted_rows(slots: Sequence[Slot]) -> dict[tuple[int, str], Ranges]:
    """Per leaf and side the token ranges that slots consist of."""
    return {
        (spec.layer, spec.side): tuple((int(a), int(b)) for a, b in slot["ranges"])
        for slot in flat(slots)
        for spec in array_specs(slot)
    }
