"""Installing the patch, and caches whose prefix is attended where it lives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, RotatingKVCache, make_prompt_cache

from pion_vllm_mlx.cache.attend_request import check_namespace, whole_number
from pion_vllm_mlx.cache.lineage.attended import AttendedPrefix
from pion_vllm_mlx.cache.prompt_cache import PionPromptCache
from pion_vllm_mlx.errors import PionMlxCompatError
from pion_vllm_mlx.patch.attention import replacement
from pion_vllm_mlx.patch.model_check import (
    flattened,
    refuse_at_server,
    refuse_bypassing,
    refuse_shapes,
    shares_at_right_positions,
)
from pion_vllm_mlx.patch.prefix_cache import PionPrefixCache, PrefixGroup
from pion_vllm_mlx.patch.seam import SEAM
from pion_vllm_mlx.patch.sparse import checked_mode


def install_pion_attention_patch() -> None:
    """Puts our attention in place of mlx-lm's, for every model; nothing if it is there.

    Caches of others are attended by the original function. Raises PionMlxCompatError, and
    changes nothing, where mlx-lm is not one whose attention is known.
    """
    SEAM.install(replacement)


def uninstall_pion_attention_patch() -> None:
    """Puts the very functions back that were replaced; nothing if none were."""
    SEAM.uninstall()


def make_pion_prompt_cache(
    model: Any,
    namespace: str,
    prompt_cache: Any,
    prefix_len: int,
    sparse_full_layers: dict[str, Any] | bool | None = None,
    *,
    foreign: bool = False,
) -> list[Any]:
    """A cache for ``model(suffix, cache=…)``: the prefix of ``namespace``, attended elsewhere.

    The prefix is that which ``prompt_cache`` (a PionPromptCache) got or stored in this
    process, else the one at the server; which of them is chosen here, once. ``prefix_len``
    must be its number of tokens. For a stored conversation ``prompt_cache`` is what
    ``AttendedConversations.find`` found, the others are its ``namespace`` and ``length``.
    ``sparse_full_layers`` (True, or any of ``K_block``, ``K_blocks``, ``selector``) lets single
    queries of full-attention layers see the best blocks only. ``cache[0].lane`` says what was
    chosen.

    ``foreign=True`` takes a prefix without a completion record, too: what lies under
    ``<namespace>_attn``, put there by ``attend_store_layer`` or by another program. Of it
    layers and number of tokens are compared, and nothing else can be: that it is of this model
    and of the tokens that are meant is then the caller's word.

    Raises TypeError and ValueError naming what is wrong in the arguments, before anything
    else; PionMlxCompatError for a model whose attention does not go through mlx-lm's seam, or
    not in a way that a server can compute; ValueError where no prefix that fits is
    stored; StoreUnavailable where no server answers.
    """
    if not SEAM.installed():
        raise PionMlxCompatError("call install_pion_attention_patch() first")
    mode = checked_mode(sparse_full_layers)
    if not callable(model):
        raise TypeError(f"model is the first of what mlx_lm.load returns, not {model!r}")
    prefix_len = _checked(namespace, prompt_cache, prefix_len)
    if prompt_cache.model is not None and prompt_cache.model is not model:
        raise ValueError("the prompt cache belongs to another model")
    empty = make_prompt_cache(model)
    refuse_bypassing(model, empty)
    if not prefix_len:
        return list(empty)
    shares, slots = shares_at_right_positions(model), len(list(flattened(empty)))
    group = PrefixGroup(
        prompt_cache, namespace, prefix_len, shares=shares, foreign=slots if foreign else 0
    )
    if group.local is None:
        refuse_at_server(model, empty)
        refuse_shapes(model, group.remote.shapes)
    if group.local is None or mode is not None:
        _try_out(model, PrefixGroup(prompt_cache, namespace, 0, shares=shares), empty)
    return _Layers(group, prompt_cache, mode).all(group.local or empty)


def refuse_elsewhere(model: Any, prompt_cache: Any) -> None:
    """Whether prefixes of a model can be attended at a server; computes a few tokens.

    Raises PionMlxCompatError or NotImplementedError for one whose prefixes cannot.
    """
    empty, used = make_prompt_cache(model), make_prompt_cache(model)
    refuse_bypassing(model, empty)
    refuse_at_server(model, empty)
    model(mx.array([[0]]), cache=used)
    rows = [(one.keys, one.values) for one in used if one.keys is not None]
    refuse_shapes(model, [(k.shape[1], k.shape[3], v.shape[3]) for k, v in rows])
    group = PrefixGroup(prompt_cache, "", 0, shares=shares_at_right_positions(model))
    _try_out(model, group, empty)


def _checked(namespace: Any, prompt_cache: Any, prefix_len: Any) -> int:
    """The number of tokens. Raises TypeError and ValueError naming an argument that cannot be."""
    if not isinstance(prompt_cache, PionPromptCache | AttendedPrefix):
        raise TypeError(f"prompt_cache is a PionPromptCache, not {prompt_cache!r}")
    check_namespace(namespace)
    length = whole_number(prefix_len, "prefix_len")
    if length < 0:
        raise ValueError(f"prefix_len is the number of tokens of the prefix, not {length}")
    return length


def _try_out(model: Any, group: PrefixGroup, empty: list[Any]) -> None:
    """Has the model attend to nothing but a suffix, by caches as they will be used.

    Nothing travels and next to nothing is computed: what is wanted is what the model's code
    does. Raises PionMlxCompatError for a layer whose attention does not come by, the last one
    too, and what the attention raises of all that it refuses.
    """
    cache = _Layers(group, group.pc, None).all(empty)
    for tokens in ([0, 0], [0]):
        model(mx.array([tokens]), cache=cache)
        group.check()


class _Layers:
    """Makes the caches of a group, numbered as their rows are stored: depth first."""

    def __init__(self, group: PrefixGroup, prompt_cache: Any, mode: dict[str, Any] | None) -> None:
        self._group, self._pc, self._mode = group, prompt_cache, mode
        self._next = 0

    def all(self, entries: list[Any]) -> list[Any]:
        """A cache for each of a model's."""
        return [self.wrapped(entry) for entry in entries]

    def wrapped(self, entry: Any) -> Any:
        if type(entry) is CacheList:
            make: Any = CacheList
            return make(*(self.wrapped(inner) for inner in entry.caches))
        layer, self._next = self._next, self._next + 1
        group = self._group
        window = entry.max_size if type(entry) is RotatingKVCache else None
        return PionPrefixCache(
            layer,
            group.namespace,
            self._pc,
            group.prefix_len,
            window,
            None if window is not None else self._mode,
            group=group,
            native=entry if group.local is not None else None,
        )
