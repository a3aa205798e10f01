"""PionPromptCache: a filled mlx-lm cache for a prefix, from wherever it already is."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx import config
from pion_vllm_mlx.cache import identity_names
from pion_vllm_mlx.cache.attend_client import AttendClient
from pion_vllm_mlx.cache.attend_methods import AttendMethods
from pion_vllm_mlx.cache.attend_request import Slot
from pion_vllm_mlx.cache.attend_stored import content_session
from pion_vllm_mlx.cache.boundary_settings import check_settings
from pion_vllm_mlx.cache.completion import TokenIds, token_ids
from pion_vllm_mlx.cache.connection import Address, RespConnection
from pion_vllm_mlx.cache.prompt_cache_stats import Counters
from pion_vllm_mlx.cache.store_client import StoreClient
from pion_vllm_mlx.cache.store_client_endpoint import Endpoint, Place, parse_url
from pion_vllm_mlx.errors import ConfigError, PionError, UnsupportedCache
from pion_vllm_mlx.formats import storage_format

if TYPE_CHECKING:
    from pion_vllm_mlx.cache.attend_source import AttendSource
    from pion_vllm_mlx.cache.prompt_cache_engine import Engine

log = logging.getLogger("pion_vllm_mlx")

_MAPPED = "mapped"  # of lanes, which need MLX
_VERIFY = (None, "always")
_LONGEST_DEADLINE_SECONDS = 86_400


class PionPromptCache(AttendMethods):
    """Prefixes of one model, shared through a store.

    ``get_or_prefill`` returns an ordinary mlx-lm cache list of batch size 1, filled with
    the prefix, for ``mlx_lm.generate(..., prompt_cache=cache)``. It is the caller's own:
    generating with it changes nothing that is stored.

    The store never fails a call: when it is absent, slow, full or wrong, the prefix is
    prefilled locally, one warning is logged, and ``stats`` counts it.

    Calls are serialised by a lock; several threads may share an object, as far as MLX
    lets them share the model. Reading the weights for the key takes about a second for
    2 GB on a CPU; the constructor does it, unless there is no model.
    """

    def __init__(  # noqa: PLR0913  (the published signature, in its order)
        self,
        model: Any = None,
        vquant: str | None = None,
        host: str = config.DEFAULT_HOST,
        port: int = config.DEFAULT_PORT,
        stage2: bool = False,
        admission_threshold: int = 1,
        boundary_protect: int = 0,
        prefill_chunk_size: int | None = None,
        softmax_bitexact: bool = False,
        strict: bool = False,
        *,
        url: str | None = None,
        password: str | None = None,
        username: str | None = None,
        deadline_seconds: float = 2.0,
        key_parts: Mapping[str, str] | None = None,
        verify: str | None = None,
        inproc_bytes: int | None = None,
    ) -> None:
        """``url`` replaces host and port: tcp://, tls://, unix://, embedded:///path, embedded:.

        ``username`` is that of a tenant, who sees only its own prefixes; the URL may name it
        instead (``tcp://team@host:1974``). ``password`` defaults to PION_REQUIREPASS.

        ``vquant`` is a storage format, None the cache's own dtype. With
        ``boundary_protect=N`` the keys of every layer, and the values of the first and the
        last N, are stored in fp16, and only the values between in ``vquant``. ``key_parts`` are
        further parts of the key, such as a tokenizer, an adapter or a tenant.
        ``verify="always"`` hashes mapped rows again. ``inproc_bytes`` caps the prefixes
        that this process keeps, for all objects together. ``stage2`` also makes K and V
        resident at the server, for ``attend_query`` and its like.

        Raises ConfigError, a ValueError, for a setting that does not exist.
        """
        if verify not in _VERIFY:
            raise ConfigError(f"verify is None or 'always', not {verify!r}")
        if prefill_chunk_size is not None and prefill_chunk_size < 1:
            raise ConfigError("prefill_chunk_size must be at least 1")
        if not 0 < deadline_seconds <= _LONGEST_DEADLINE_SECONDS:
            raise ConfigError("deadline_seconds lies between 0 and 86,400")
        self.model = model
        self.vquant = storage_format(vquant) if vquant is not None else None
        check_settings(model, self.vquant, boundary_protect)
        self.host, self.port = host, port
        self.stage2 = stage2
        self.admission_threshold = max(1, admission_threshold)
        self.boundary_protect = boundary_protect
        self.prefill_chunk_size = prefill_chunk_size
        self.softmax_bitexact = softmax_bitexact
        self.strict = strict
        place = parse_url(url) if url is not None else Place(Address(host=host, port=port))
        known = password or config.ServerEnvironment.from_environment().password
        self._endpoint = Endpoint(place, known, deadline_seconds, username=username)
        self._client = StoreClient(self._endpoint, deadline_seconds)
        self._counters = Counters()
        # An object that is dropped without close must not leave its socket open.
        weakref.finalize(self, self._client.close)
        switches = config.ClientSwitches.from_environment()
        # the binary lane takes the server's own password alone
        no_binary = switches.no_binary or self._endpoint.tenant
        self._attend = AttendClient(self._client, known, no_binary=no_binary)
        self._attend_tokens: dict[str, int] = {}
        self._attend_sids: dict[str, str] = {}
        self._attend.debug_sparse = switches.debug_sparse_auto
        self.attend_unfused = switches.no_fused_attend
        weakref.finalize(self, self._attend.close)
        self._lock = threading.RLock()
        self._engine: Engine | None = None
        self._source: AttendSource | None = None
        if model is not None:
            self._engine = self._new_engine(key_parts, verify == "always", inproc_bytes)
            self._source = self._new_source(self._engine, no_inproc=switches.no_inproc)

    make_namespace = staticmethod(identity_names.make_namespace)

    def get_or_prefill(self, prefix_token_ids: Sequence[int] | Any, namespace: str) -> list[Any]:
        """The model's cache, filled with the prefix.

        ``prefix_token_ids`` is one flat list or array of at least one token id.
        ``namespace`` only addresses: other tokens or another key under it are a miss.

        Raises ValueError for bad ids or an empty namespace, and what the model raises.
        """
        ids = token_ids(prefix_token_ids)
        if not isinstance(namespace, str) or not namespace:
            raise ValueError("the namespace must be a text that is not empty")
        if self._engine is None:
            raise ValueError("get_or_prefill needs a model: PionPromptCache(model)")
        with self._lock:
            cache = self._engine.get_or_prefill(ids, namespace)
            if self._source is not None:
                self._source.note(namespace, ids, mapped=self._counters.last_lane == _MAPPED)
            if self.stage2:
                self._make_resident(namespace, cache, ids)
            return cache

    @property
    def source(self) -> AttendSource | None:
        """The prefixes that this object knows of, None without a model."""
        return self._source

    def lookup(self, namespace: str) -> bool:
        """Whether the store has both sides of a namespace; False where there is no store.

        With ``stage2`` its attention must be resident too.
        """
        with self._lock:
            try:
                found = self._client.look_up(namespace)
                return found and (not self.stage2 or self._attention_resident(namespace))
            except PionError as error:
                self._counters.no_answer(error)
                return False

    def stats(self) -> dict[str, Any]:
        """Counters, times, lanes and the reason of the last miss, as plain values."""
        with self._lock:
            return {
                **self._counters.as_dict(),
                "admission_threshold": self.admission_threshold,
                "lane": self._counters.last_lane,
                "attended": self._attend.attended(),
            }

    @property
    def resp(self) -> RespConnection:
        """The connection, for commands of your own."""
        return self._endpoint.connection()

    @property
    def hits(self) -> int:
        return self._counters.hits

    @property
    def misses(self) -> int:
        return self._counters.misses

    @property
    def admission_skips(self) -> int:
        return self._counters.admission_skips

    @property
    def fetch_ms_total(self) -> float:
        return self._counters.fetch_ms_total

    @property
    def store_ms_total(self) -> float:
        return self._counters.store_ms_total

    @property
    def last_prefill_ms(self) -> float:
        return self._counters.last_prefill_ms

    @property
    def last_miss_reason(self) -> str | None:
        """Why the last call was no hit; None after a hit."""
        return self._counters.last_miss_reason

    def close(self) -> None:
        """Closes the connections; an embedded server stops when nobody else uses it."""
        self._attend.close()
        self._client.close()

    def __enter__(self) -> PionPromptCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _new_engine(
        self, key_parts: Mapping[str, str] | None, verify_always: bool, inproc_bytes: int | None
    ) -> Engine:
        try:
            from pion_vllm_mlx.cache import inproc
            from pion_vllm_mlx.cache.prompt_cache_engine import Engine, EngineOptions
        except ModuleNotFoundError as error:
            raise ImportError(
                f"a model needs the Python module {error.name}, which is not installed: "
                "pip install 'pion-vllm-mlx[mlx]'"
            ) from error
        if not callable(self.model):
            kind = type(self.model).__name__
            raise ConfigError(f"a model is the first of what mlx_lm.load returns, not a {kind}")
        if inproc_bytes is not None:
            inproc.PROCESS.set_cap(inproc_bytes)
        options = EngineOptions(
            vquant=self.vquant,
            boundary_protect=self.boundary_protect,
            chunk_tokens=self.prefill_chunk_size,
            admission_threshold=self.admission_threshold,
            verify_always=verify_always,
            key_parts=key_parts,
            switches=config.ClientSwitches.from_environment(),
        )
        engine = Engine(self.model, self._client, self._counters, options)
        try:
            engine.prepare()
            self._endpoint.greet()
        except UnsupportedCache:
            pass  # named again, and counted, by every call
        return engine


    @staticmethod
    def _new_source(engine: Engine, *, no_inproc: bool) -> AttendSource:
        from pion_vllm_mlx.cache.attend_source import AttendSource

        return AttendSource(engine.client, engine.identity, engine.hold, no_inproc=no_inproc)

    def _make_resident(self, namespace: str, cache: list[Any], ids: TokenIds) -> None:
        """Stage 2: K and V of a plain model at the server; a failure is counted, not raised.

        Under the session id of their content: another prefix is never taken for this one.
        """
        from pion_vllm_mlx.cache.attend_stage2 import plain_layers

        assert self._source is not None
        self._attend_tokens[namespace] = int(ids.size)
        # a model without a key has nothing under this id, nor has anybody else
        self._attend_sids[namespace] = content_session(namespace, {}, ids)
        try:
            sid = self._attend_sids[namespace] = self._source.session(namespace, ids)
            states = self._attend.states(namespace, sid, len(cache))
            if all(state == "HIT" for state in states):
                return
            for layer, (keys, values) in enumerate(plain_layers(cache, int(ids.size))):
                if states[layer] != "HIT":
                    self._attend.store(Slot(namespace, sid, layer), keys, values)
        except PionError as error:
            self._counters.store_failures += 1
            log.warning("the attention of a prefix is not resident: %s", error)
