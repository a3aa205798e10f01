"""One request of the prompt cache: this process, the store, or a local prefill.

The steps: 1. the key of the model, 2. prefixes of this process, 3. one round trip to the
store, whose completion record must match key and tokens, 4. the lanes, in order, 5. else
a local prefill, 6. stored for the next one. Whatever fails in 2 to 4 or 6 is counted and
named, never raised.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pion_vllm_mlx.cache import evaluation, inproc
from pion_vllm_mlx.cache.boundary import storage_leaves
from pion_vllm_mlx.cache.boundary_settings import asked_format
from pion_vllm_mlx.cache.completion import CompletionRecord, TokenIds
from pion_vllm_mlx.cache.identity import ModelIdentity, identity_digest
from pion_vllm_mlx.cache.lanes import (
    IN_PROCESS,
    LANE_ERRORS,
    LANES,
    MAPPED,
    STORED,
    RowSource,
    Wanted,
    load_states,
)
from pion_vllm_mlx.cache.layers import StoredCache, cache_arrays, dismantle, rebuild
from pion_vllm_mlx.cache.leaf import dtype_of
from pion_vllm_mlx.cache.prefill import Prefilled, prefill
from pion_vllm_mlx.cache.prompt_cache_slots import array_specs, classes, conversion_of
from pion_vllm_mlx.cache.prompt_cache_stats import Counters
from pion_vllm_mlx.cache.prompt_cache_store import OtherWriter, Prefix, write_prefix
from pion_vllm_mlx.cache.store_client import Probe, StoreClient
from pion_vllm_mlx.cache.store_client_endpoint import what_helps
from pion_vllm_mlx.config import ClientSwitches
from pion_vllm_mlx.errors import DamagedData, NewerFormat, PionError, UnsupportedCache

log = logging.getLogger("pion_vllm_mlx")

_MOST_NAMESPACES = 4096

_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, MemoryError)
"""What the parts of a record that only another program can have written may end in."""


@dataclass(frozen=True)
class EngineOptions:
    """The settings of a prompt cache that its requests depend on."""

    vquant: str | None = None
    boundary_protect: int = 0
    chunk_tokens: int | None = None
    admission_threshold: int = 1
    verify_always: bool = False
    key_parts: Mapping[str, str] | None = None
    switches: ClientSwitches = ClientSwitches()


@dataclass(frozen=True)
class Request:
    """A prefix that is asked for, and its key."""

    namespace: str
    ids: TokenIds
    identity: dict[str, Any]
    key: inproc.Key


class Engine:
    """Serves the prefixes of one model. Not thread-safe: its owner holds a lock."""

    def __init__(
        self, model: Any, client: StoreClient, counters: Counters, options: EngineOptions
    ) -> None:
        self._model = model
        self.client = client
        self._counters = counters
        self._options = options
        asked = asked_format(options.vquant, options.boundary_protect)
        self.identity = ModelIdentity(model, vquant=asked, extra=options.key_parts)
        self._misses_of: OrderedDict[str, int] = OrderedDict()
        self._warned = False
        self._told: set[str] = set()

    def prepare(self) -> None:
        """Reads the weights for the key. Raises UnsupportedCache."""
        self.identity.fields()

    def get_or_prefill(self, ids: TokenIds, namespace: str) -> list[Any]:
        """A cache of the model that holds ``ids``.

        Raises what the model raises, and ConfigError for a cache that ``boundary_protect``
        cannot be had for.
        """
        try:
            request = self._request(ids, namespace)
        except UnsupportedCache as error:
            self._refuse(error)
            return self._prefill(ids).cache
        cache = self._from_process(request)
        if cache is not None:
            return cache
        probe = self._probe(request)
        cache = self._from_store(request, probe) if probe is not None else None
        if cache is not None:
            return cache
        prefilled = self._prefill(ids)
        if self._admitted(namespace):
            self._keep(request, prefilled, probe)
        return prefilled.cache

    def hold(self, ids: TokenIds, namespace: str) -> None:
        """Has this process keep a stored prefix, if it has room. Raises UnsupportedCache."""
        request = self._request(ids, namespace)
        probe = None if self._options.switches.no_inproc else self._probe(request)
        if probe is None or probe.record is None:
            return
        try:
            record = CompletionRecord.decode(probe.record)
            wanted = Wanted(namespace, record, probe.mapping, self._options.verify_always)
            if record.mismatch(request.identity, ids) is not None:
                return
            if wanted.num_bytes() <= inproc.PROCESS.cap_bytes:
                loaded = self._through_lanes(wanted)
                if loaded is not None:
                    inproc.PROCESS.put(request.key, dismantle(loaded[1]))
        except (DamagedData, NewerFormat, *_MALFORMED) as error:
            log.info("prefix %s is not kept: %s", namespace, error)

    def _request(self, ids: TokenIds, namespace: str) -> Request:
        """What is asked for. Raises UnsupportedCache."""
        identity = self.identity.fields()
        key = (namespace, identity_digest(identity), ids.tobytes())
        return Request(namespace, ids, identity, key)

    # -- hits -------------------------------------------------------------------

    def _from_process(self, request: Request) -> list[Any] | None:
        if self._options.switches.no_inproc:
            return None
        started = time.perf_counter()
        cache = inproc.PROCESS.get(request.key)
        if cache is not None:
            self._evaluate(cache)
            self._fetched(started)
            self._pay(request, cache)
            self._counters.hit(IN_PROCESS, inproc.PROCESS.size_of(request.key))
        return cache

    def _probe(self, request: Request) -> Probe | None:
        try:
            probe = self.client.probe(
                request.namespace, request.ids.size, mapped=not self._options.switches.no_mapped
            )
        except PionError as error:
            self._unavailable(error)
            return None
        self._warned = False
        return probe

    def _from_store(self, request: Request, probe: Probe) -> list[Any] | None:
        started = time.perf_counter()
        record = self._matching(request, probe)
        if record is None:
            return None
        wanted = Wanted(request.namespace, record, probe.mapping, self._options.verify_always)
        try:
            loaded = self._through_lanes(wanted)
            num_bytes, conversion = wanted.num_bytes(), conversion_of(record.slots, record.leaves)
        except DamagedData as error:
            self._unverified(request.namespace, str(error), probe)
            return None
        except _MALFORMED as error:
            self._damaged(request.namespace, f"completion record: {error!r}")
            return None
        if loaded is None:
            self._gone(request.namespace)
            return None
        lane, cache = loaded
        self._counters.hit(lane, num_bytes)
        self._fetched(started)
        self._counters.conversion = conversion
        self._share(request, cache, lane)
        return cache

    def _matching(self, request: Request, probe: Probe) -> CompletionRecord | None:
        """The completion record, if it makes this request a hit; else the reason is kept."""
        if probe.record is None:
            stored = "an unfinished or foreign prefix is" if probe.present else "nothing is"
            self._counters.last_miss_reason = f"{stored} stored under this namespace"
            return None
        try:
            record = CompletionRecord.decode(probe.record)
        except DamagedData as error:
            self._damaged(request.namespace, str(error))
            return None
        except NewerFormat as error:
            self._counters.last_miss_reason = str(error)
            return None
        why = record.mismatch(request.identity, request.ids)
        if why is None and not probe.present:
            why = "the rows of this prefix are gone"
        self._counters.last_miss_reason = why
        return record if why is None else None

    def _through_lanes(self, wanted: Wanted) -> tuple[str, list[Any]] | None:
        """The first lane that delivers, and the cache. Raises DamagedData."""
        for name in self._lanes(wanted):
            try:
                return name, self._load(name, wanted)
            except DamagedData:
                raise
            except LANE_ERRORS as error:
                self._counters.lane_failures[name] += 1
                self._counters.last_miss_reason = f"{name} lane: {error}"
                log.info("the %s lane failed: %s", name, error)
        return None

    def _lanes(self, wanted: Wanted) -> Iterator[str]:
        switches = self._options.switches
        usable = self.client.endpoint.local and not switches.no_mapped
        for name in LANES:
            if name == MAPPED and not (usable and wanted.record.runs):
                continue
            if name == STORED and switches.no_batch:
                continue
            yield name

    def _load(self, lane: str, wanted: Wanted) -> list[Any]:
        record = wanted.record
        if classes(record.slots) != classes(record.identity["cache"]):
            raise DamagedData("completion record: its slots are not those of the model's cache")
        arrays = LANES[lane](self.client, wanted)
        states = load_states(self.client, wanted)
        dtypes = {
            (spec.layer, spec.side): dtype_of(spec.dtype)
            for spec in array_specs(wanted.record.slots)
        }
        cache = rebuild(wanted.record.slots, RowSource(arrays, dtypes).fetch, states)
        self._evaluate(cache)
        return cache

    def _evaluate(self, cache: list[Any]) -> None:
        if not self._options.switches.no_explicit_eval:
            evaluation.finish(cache_arrays(cache))

    def _share(self, request: Request, cache: list[Any], lane: str) -> None:
        """Keeps what crossed a socket, or what was mapped before, for this process.

        The first time, the page cache serves as well, and sharing would cost the caller's
        first append a copy.
        """
        if self._options.switches.no_inproc:
            return
        again = inproc.PROCESS.seen_before(request.key)
        if lane != MAPPED or again:
            inproc.PROCESS.put(request.key, dismantle(cache))

    # -- misses -----------------------------------------------------------------

    def _prefill(self, ids: TokenIds) -> Prefilled:
        self._counters.miss()
        prefilled = prefill(self._model, ids, chunk_tokens=self._options.chunk_tokens)
        self._counters.last_prefill_ms = prefilled.elapsed_ms
        return prefilled

    def _admitted(self, namespace: str) -> bool:
        """Whether this many misses of a namespace are enough to store it."""
        count = self._misses_of.pop(namespace, 0) + 1
        self._misses_of[namespace] = count
        if len(self._misses_of) > _MOST_NAMESPACES:
            self._misses_of.popitem(last=False)
        if count >= self._options.admission_threshold:
            return True
        self._counters.admission_skips += 1
        return False

    def _keep(self, request: Request, prefilled: Prefilled, probe: Probe | None) -> None:
        try:
            stored = dismantle(prefilled.cache)
        except UnsupportedCache as error:
            self._refuse(error)
            return
        # a setting that this cache cannot have is the caller's error
        prefix = self._prefix(request, stored, prefilled.elapsed_ms)
        if not self._options.switches.no_inproc:
            inproc.PROCESS.put(request.key, stored)
        try:
            if probe is not None:
                self._store(prefix, probe)
                return
        except PionError as error:
            self._counters.store_failures += 1
            self._warned |= str(error) in self._told
            self._told |= {str(error)} if isinstance(error, OtherWriter) else set()
            self._warn("the prefix was not stored: %s", error)
        inproc.PROCESS.owe(request.key, prefilled.elapsed_ms)

    def _pay(self, request: Request, cache: list[Any]) -> None:
        """Stores what could not be stored when it was prefilled; else the store is told."""
        elapsed_ms = inproc.PROCESS.owed(request.key)
        if elapsed_ms is None:
            self.client.note_hit(request.namespace, request.ids.size)
            return
        try:
            probe = self.client.probe(request.namespace, request.ids.size, mapped=False)
            prefix = self._prefix(request, dismantle(cache), elapsed_ms)
            self._store(prefix, replace(probe, record=None))
        except PionError as error:
            log.info("the prefix was not stored: %s", error)
            return
        inproc.PROCESS.settle(request.key)

    def _prefix(self, request: Request, stored: StoredCache, elapsed_ms: float) -> Prefix:
        options = self._options
        leaves = storage_leaves(stored.leaves, options.vquant, options.boundary_protect)
        what = (request.namespace, request.ids, request.identity)
        return Prefix(*what, stored, leaves, elapsed_ms)

    def _store(self, prefix: Prefix, probe: Probe) -> None:
        started = time.perf_counter()
        there = self.client.record(prefix.namespace)
        if there is not None:
            try:
                record = CompletionRecord.decode(there)
                if record.mismatch(prefix.identity, prefix.ids) is None and there != probe.record:
                    return  # another process was faster: the same bytes are not written twice
            except NewerFormat:
                return
            except DamagedData:
                self._counters.damaged += 1
        sent = write_prefix(self.client, prefix, drop_first=probe.present or there is not None)
        leaves = [leaf.as_json() for leaf in prefix.leaves]
        self._counters.conversion = conversion_of(prefix.stored.slots, leaves)
        self._counters.bytes_stored += sent
        self._counters.last_bytes = sent
        self._counters.store_ms_total += (time.perf_counter() - started) * 1000
        self.client.publish(prefix.namespace)

    # -- counting ---------------------------------------------------------------

    def _fetched(self, started: float) -> None:
        self._counters.fetch_ms_total += (time.perf_counter() - started) * 1000

    def _refuse(self, error: UnsupportedCache) -> None:
        self._counters.refused += 1
        self._counters.last_miss_reason = str(error)
        self._warn("%s", error)

    def _unavailable(self, error: PionError) -> None:
        self._counters.no_answer(error)
        advice = what_helps(error)
        text = f"{error}; {advice}" if advice else str(error)
        self._warn("no prefix store, prefilling locally: %s", text)

    def _damaged(self, namespace: str, why: str) -> None:
        """A prefix that does not verify is dropped whole, counted, and a miss."""
        self._counters.damaged += 1
        self._counters.last_miss_reason = why
        log.warning("prefix %s dropped: %s", namespace, why)
        try:
            self.client.drop(namespace)
        except PionError as error:
            log.info("prefix %s could not be dropped: %s", namespace, error)

    def _unverified(self, namespace: str, why: str, probe: Probe) -> None:
        """Rows that do not fit their record: damage, unless another process replaced them."""
        self._counters.last_miss_reason = why
        try:
            replaced = self.client.record(namespace) != probe.record
        except PionError as error:
            self._unavailable(error)
            return
        if replaced:
            self._gone(namespace)
        else:
            self._damaged(namespace, why)

    def _gone(self, namespace: str) -> None:
        """No lane delivered: asks the server why; damage that it found counts as damage."""
        try:
            why = self.client.explain(namespace)
        except PionError as error:
            self._unavailable(error)
            return
        if why.startswith("damaged"):
            self._counters.damaged += 1
            self._counters.last_miss_reason = why

    def _warn(self, text: str, what: object) -> None:
        """One warning until the store works again."""
        level = logging.INFO if self._warned else logging.WARNING
        self._warned = True
        log.log(level, text, what)
