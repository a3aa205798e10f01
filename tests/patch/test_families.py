"""Every family of mlx-lm that a tiny model can be built of: right over each lane, or refused.

The ordinary run takes the families below; ``pytest --long`` all of the installed mlx-lm.
"""

from __future__ import annotations

import contextlib

import pytest

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError
from tests.models import token_ids
from tests.patch.conftest import LANES, Opener, alone, forwards, furthest
from tests.patch.families import build, names

IDS, STEPS = token_ids(40), 20

#: grouped queries, windows, shared K and V, loops, keys in another type, odd windows, scales.
ALWAYS = (
    "cohere2", "exaone4", "gear", "gemma3n", "gemma4_text", "gpt2", "granite", "iquestloopcoder",
    "llama", "muse_glimmer", "olmo3", "phi3", "plamo3", "qwen3", "smollm3", "stablelm", "step3p5",
)  # fmt: skip

#: what the wire lanes refuse by name: K and V of other widths, or another layer's; sinks.
IN_PROCESS_ONLY = (
    "afm7", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "gpt_oss", "llama4",
    "llama4_text", "longcat_flash", "mimo_v2_flash", "minicpm3", "youtu_llm",
)  # fmt: skip

#: what both refuse: other attention than the seam's, recurrent layers.
NEVER = ("gemma2", "olmo", "plamo2")

pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.parametrize("family", names())
def test_a_family_says_what_it_says_unpatched_or_is_refused_by_name(
    opened: Opener, family: str, long_run: bool
) -> None:
    if not long_run and family not in (*ALWAYS, *IN_PROCESS_ONLY, *NEVER):
        pytest.skip("--long runs it")
    model = build(family)
    if model is None:
        pytest.skip("needs other settings, or is no model")
    wanted = alone(model, IDS, STEPS)
    for lane in LANES:
        pc = opened(model, lane)
        pc.get_or_prefill(IDS, family)
        with contextlib.ExitStack() as refusal:
            if family in NEVER or any("ArraysCache" in str(type(c)) for c in pc_slots(model)):
                refusal.enter_context(pytest.raises((PionMlxCompatError, NotImplementedError)))
            elif family in IN_PROCESS_ONLY and lane != "in-process":
                refusal.enter_context(pytest.raises((PionMlxCompatError, NotImplementedError)))
            cache = pion_vllm_mlx.make_pion_prompt_cache(model, family, pc, len(IDS))
            refusal.close()  # what cannot be attended is refused when the cache is made
            assert furthest(forwards(model, cache, STEPS), wanted) < 1e-5


def pc_slots(model: object) -> list[object]:
    """The caches of a model, those of CacheLists too."""
    from mlx_lm.models.cache import make_prompt_cache

    from pion_vllm_mlx.patch.model_check import flattened

    return list(flattened(make_prompt_cache(model)))
