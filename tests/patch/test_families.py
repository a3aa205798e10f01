"""Every family of mlx-lm that a tiny model can be built of: right over each lane, or refused.

The ordinary run takes the families below; ``pytest --long`` all of the installed mlx-lm, but for
those that ``families.LEFT_OUT`` names with its reasons.
"""

from __future__ import annotations

import contextlib

import pytest

import pion_vllm_mlx
from pion_vllm_mlx import PionMlxCompatError
from tests.models import token_ids
from tests.patch.conftest import LANES, Opener, alone, forwards, furthest
from tests.patch.families import LEFT_OUT, build, is_model, names

IDS, STEPS = token_ids(40), 20

#: grouped queries, windows, shared K and V, loops, keys in another type, odd windows, scales.
ALWAYS = (
    "cohere2", "exaone4", "gear", "gemma3", "gemma3n", "gemma4", "gemma4_text", "gpt2", "granite",
    "iquestloopcoder", "llama", "llama4_text", "mimo_v2_flash", "mistral3", "muse_glimmer",
    "olmo3", "phi3", "plamo3", "qwen3", "smollm3", "stablelm", "step3p5",
)  # fmt: skip

#: experts behind the attention.
EXPERTS = ("glm4_moe", "granitemoe", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe")

#: what the wire lanes refuse by name: K and V of other widths, another layer's, or others than the
#: cache's; sinks; chunks.
IN_PROCESS_ONLY = (
    "afm7", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "gpt_oss", "llama4",
    "longcat_flash", "minicpm3", "plamo", "youtu_llm",
)  # fmt: skip

#: what both refuse: other attention than the seam's, recurrent layers.
NEVER = ("deepseek_v41", "gemma2", "plamo2")

LISTED = (*ALWAYS, *EXPERTS, *IN_PROCESS_ONLY, *NEVER)

#: models that came with mlx-lm 0.32.
NEW = ("deepseek_v41", "gear", "muse_glimmer", "plamo3")

pytestmark = pytest.mark.usefixtures("patched")


@pytest.mark.parametrize("family", names())
def test_a_family_says_what_it_says_unpatched_or_is_refused_by_name(
    opened: Opener, family: str, long_run: bool
) -> None:
    if family in LEFT_OUT:
        pytest.skip(LEFT_OUT[family])
    if family not in LISTED:
        if not long_run:
            pytest.skip("--long runs it")
        if not is_model(family):
            pytest.skip("no model, but what models share")
    model = build(family)
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


def test_what_is_listed_is_there_and_nothing_of_it_is_left_out() -> None:
    known = set(names())
    assert {one for one in LISTED if one not in known} <= set(NEW)
    assert not set(LISTED) & set(LEFT_OUT)


def pc_slots(model: object) -> list[object]:
    """The caches of a model, those of CacheLists too."""
    from mlx_lm.models.cache import make_prompt_cache

    from pion_vllm_mlx.patch.model_check import flattened

    return list(flattened(make_prompt_cache(model)))
