"""What of mlx-lm's server is replaced or relied on, and the check that it is what we know.

Known are mlx-lm 0.31.3 and 0.32.2.  A name that is missing, or a function that takes other
parameters, is refused by name before a model is loaded.
"""

from __future__ import annotations

from pion_vllm_mlx.cache.vllm_mlx_backend_seams import Seam
from pion_vllm_mlx.errors import PionMlxCompatError

_SERVER, _GENERATE, _CACHE = "mlx_lm.server", "mlx_lm.generate", "mlx_lm.models.cache"

SEAMS = (
    Seam(_SERVER, "run", ("host", "port", "model_provider", "server_class", "handler_class")),
    Seam(_SERVER, "main", ()),
    Seam(_SERVER, "ResponseGenerator.__init__", ("self", "model_provider", "prompt_cache")),
    Seam(_SERVER, "ResponseGenerator._tokenize", ("self", "tokenizer", "request", "args")),
    Seam(_SERVER, "ResponseGenerator._generate", ("self",)),
    Seam(_SERVER, "ResponseGenerator._next_request", ("self", "timeout")),
    Seam(_SERVER, "ResponseGenerator._is_batchable", ("self", "args")),
    Seam(_SERVER, "ResponseGenerator._make_state_machine"),
    Seam(_SERVER, "ResponseGenerator._serve_single"),
    Seam(_SERVER, "ResponseGenerator._log_cache_stats", ("self",)),
    Seam(_SERVER, "ResponseGenerator.stop_and_join", ("self",)),
    Seam(
        _SERVER,
        "ResponseGenerator.generate",
        ("self", "request", "generation_args", "progress_callback"),
    ),
    Seam(_SERVER, "ModelProvider.load_default", ("self",)),
    Seam(_SERVER, "APIHandler.do_GET", ("self",)),
    Seam(_SERVER, "APIHandler.do_POST", ("self",)),
    Seam(_SERVER, "APIHandler.handle_completion", ("self", "request", "stop_words")),
    Seam(_SERVER, "APIHandler.handle_health_check", ("self",)),
    Seam(_SERVER, "APIHandler.handle_models_request", ("self",)),
    Seam(
        _SERVER,
        "APIHandler.generate_response",
        (
            "self",
            "text",
            "finish_reason",
            "prompt_token_count",
            "completion_token_count",
            "prompt_cache_count",
            "token_logprobs",
            "top_tokens",
            "tokens",
            "tool_calls",
            "reasoning_text",
        ),
    ),
    Seam(
        _SERVER,
        "APIHandler.completion_usage_response",
        ("self", "prompt_token_count", "completion_token_count", "prompt_cache_count"),
    ),
    Seam(_SERVER, "stream_generate"),
    Seam(_SERVER, "_parse_size", ("x",)),
    Seam(_SERVER, "_make_sampler", ("args", "tokenizer")),
    Seam(_SERVER, "ModelDescription.__init__", ("self", "model", "draft", "adapter")),
    Seam(_GENERATE, "maybe_quantize_kv_cache"),
    Seam(_CACHE, "LRUPromptCache.fetch_nearest_cache", ("self", "model", "tokens")),
    Seam(
        _CACHE,
        "LRUPromptCache.insert_cache",
        ("self", "model", "tokens", "prompt_cache", "cache_type"),
    ),
    Seam(_CACHE, "LRUPromptCache.trim_to", ("self", "n_sequences", "n_bytes")),
    Seam(_GENERATE, "BatchGenerator.extract_cache", ("self", "uids")),
    Seam(_GENERATE, "BatchGenerator.next", ("self",)),
)


def check_seams() -> None:
    """Raises PionMlxCompatError that names every seam which is not as known."""
    differing = [f"{seam.label} {told}" for seam in SEAMS if (told := seam.difference())]
    if differing:
        raise PionMlxCompatError(
            "this mlx-lm's server is another than the known ones: " + "; ".join(differing)
        )
