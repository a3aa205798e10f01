"""From serve's flags to the settings of the store, the same for every engine."""

from __future__ import annotations

from pion_vllm_mlx import config
from pion_vllm_mlx.cache.lineage import LineageOptions
from pion_vllm_mlx.serve.engine_child import EngineLink
from pion_vllm_mlx.serve.pion_flags import PionFlags


def store_options(flags: PionFlags, link: EngineLink) -> LineageOptions | None:
    """The settings of the store; None for ``--no-pion``. What one engine alone has, it adds."""
    if not flags.enabled:
        return None
    return LineageOptions(
        url=flags.url,
        budget_bytes=flags.budget_bytes,
        min_gain=max(1, flags.min_gain),
        vquant=flags.vquant,
        key_parts={"tenant": link.tenant} if link.tenant else {},
        checkpoints=config.ClientSwitches.from_environment().lineage,
        resume=flags.resume,
        durable=flags.durable_tokens > 0,
        preload_bytes=flags.preload_bytes,
    )
