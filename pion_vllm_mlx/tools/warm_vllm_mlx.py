"""warm for ``serve --engine vllm-mlx``: through vllm-mlx's own application, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pion_vllm_mlx.cache.leading_system import ANOTHER_USER, OTHER_USER
from pion_vllm_mlx.cache.lineage import LineageStore, anchor_length
from pion_vllm_mlx.errors import ConfigError, PionError
from pion_vllm_mlx.serve.engine_vllm_mlx_app import asked_of, on_mlx_thread
from pion_vllm_mlx.serve.pion_flags import PionFlags
from pion_vllm_mlx.tools.vllm_mlx_app import SCOPE, rendered, text_of, with_vllm_mlx
from pion_vllm_mlx.tools.warming import NotWarmed, Warmed, refuse_short, stored_as, why_not_stored

WRITE_SECONDS = 600.0

Json = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """A file's name, and its chat body: system part and a user message."""

    file: str
    body: Json


def warm_all(
    flags: PionFlags, api_key: str | None, words: Sequence[str], wanted: Sequence[Wanted], pin: bool
) -> list[Warmed | PionError]:
    """What became of each file. Raises ConfigError, PionMlxCompatError; code 2 for a wrong use."""

    async def use(app: Any, model: str) -> list[Warmed | PionError]:
        found: list[Warmed | PionError] = []
        for one in wanted:
            try:
                found.append(await _warm(app, model, one, pin))
            except PionError as error:
                found.append(error)
        return found

    return with_vllm_mlx(flags, api_key, words, use)


async def _warm(app: Any, model: str, wanted: Wanted, pin: bool) -> Warmed:
    began = time.perf_counter()
    body = {"temperature": 0, **wanted.body, "model": model}
    leading = [one for one in body["messages"] if one["role"] != "user"]
    mine = await rendered(app, {**body, "messages": [*leading, ANOTHER_USER]})
    other = await rendered(app, {**body, "messages": [*leading, OTHER_USER]})
    cache = mine.core.scheduler.memory_aware_cache
    store: LineageStore | None = cache.store_or_none()
    if store is None or store.bypass is not None:
        why = store.bypass if store is not None else "no store"
        raise ConfigError(f"prefixes of this model are not stored: {why}")
    anchor = anchor_length(other.tokens, mine.tokens)
    refuse_short(anchor, store.options.min_gain)
    match = await on_mlx_thread(mine.core, lambda: store.match(mine.tokens[: anchor + 1]))
    computed = anchor - match.length
    if computed:
        asked = {**body, "messages": [*leading, ANOTHER_USER], "max_tokens": 1, "stream": False}
        said = await asked_of(app, SCOPE, asked)
        if said[0]["status"] != 200:
            raise NotWarmed(f"vllm-mlx answers {said[0]['status']}: {text_of(said)}")
        if not await asyncio.to_thread(store.flush, WRITE_SECONDS):
            raise NotWarmed("the store takes too long to write it")
        match = await on_mlx_thread(mine.core, lambda: store.match(mine.tokens[: anchor + 1]))
    if match.length < anchor:
        raise NotWarmed(f"it was not stored: {why_not_stored(store) or match.why}")
    conversation = stored_as(match)
    if pin:
        await on_mlx_thread(mine.core, lambda: store.pin(conversation))
    pinned = await on_mlx_thread(mine.core, lambda: store.is_pinned(conversation))
    seconds = round(time.perf_counter() - began, 3)
    return Warmed(wanted.file, conversation, anchor, computed, seconds, pinned)
