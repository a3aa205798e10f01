"""``--metrics-port``: Prometheus text on ``/metrics``, the value receipt as a page on ``/``.

A few lines of HTTP/1.1 on the event loop, where every number is read: GET and HEAD, one
request a connection. Nothing that is served names a namespace, a key or a tenant. The
numbers are those of INFO, PION.STATS and KV.PREFIX.INFO.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pion_vllm_mlx import __version__
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.commands.server_info import resident_bytes
from pion_vllm_mlx.server.listening import bind
from pion_vllm_mlx.server.session import Server
from pion_vllm_mlx.server.store.findings import told

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

#: how long a client may take to send its request.
REQUEST_SECONDS = 5.0
MAX_REQUEST_BYTES = 8 << 10
PREFIX = "pion_"
_AT_START = {
    "start_damaged_files": "Set aside by the last start.",
    "start_skipped_records": "More damage in the same files.",
    "start_cut_bytes": "Cut off the ends of logs by the last start.",
}
_NO_ANSWER = (
    asyncio.TimeoutError,
    asyncio.IncompleteReadError,
    asyncio.LimitOverrunError,
    OSError,
)


class Sample(NamedTuple):
    """One metric without labels; a counter only grows, but for a reset."""

    name: str
    kind: Literal["counter", "gauge"]
    value: float
    help: str


def samples(server: Server) -> Iterator[Sample]:
    """Every metric of this worker. Read on the event loop."""
    yield from _receipt(server)
    yield from _process(server)
    yield from _store(server)
    yield from _files(server)
    yield from _attention(server)


def _receipt(server: Server) -> Iterator[Sample]:
    book = server.ledger
    yield Sample("prefix_hits", "counter", book.hits, "Lookups that found both sides.")
    yield Sample("prefix_misses", "counter", book.misses, "Lookups that did not.")
    yield Sample(
        "prefix_hits_measured", "counter", book.hits_measured, "Hits whose prefill was timed."
    )
    yield Sample("prefix_tokens_served", "counter", book.tokens_served, "Tokens of hits.")
    yield Sample("prefix_bytes_served", "counter", book.bytes_served, "Bytes of fetched rows.")
    yield Sample(
        "prefill_avoided_seconds",
        "counter",
        book.us_saved / 1e6,
        "Prefill that hits made unnecessary; estimated where nobody timed it.",
    )
    yield Sample(
        "prefill_avoided_measured_seconds",
        "counter",
        book.us_measured / 1e6,
        "The part of it that was timed.",
    )


def _process(server: Server) -> Iterator[Sample]:
    now, peak = resident_bytes()
    limit = server.memory_limit
    in_flight = server.pool.held + server.long_arguments.held
    yield Sample("uptime_seconds", "gauge", server.ledger.uptime(), "Since the server started.")
    yield Sample("resident_memory_bytes", "gauge", now, "Resident memory of the server.")
    yield Sample("resident_memory_peak_bytes", "gauge", peak, "The most it was.")
    yield Sample("memory_limit_bytes", "gauge", limit.maxmemory, "--maxmemory; 0: none.")
    yield Sample(
        "memory_limit_refusing", "gauge", limit.exceeded(), "1 while writes are refused for it."
    )
    yield Sample(
        "memory_store_bytes", "gauge", server.memory.stored_bytes, "Stores held in memory alone."
    )
    yield Sample("in_flight_bytes", "gauge", in_flight, "Bytes received and not yet stored.")
    yield Sample("connected_clients", "gauge", len(server.clients), "Open connections.")
    yield Sample("clients_limit", "gauge", server.config.max_connections, "How many may be.")
    yield Sample("connections", "counter", server.connections_total, "Connections so far.")
    yield Sample("commands", "counter", server.commands_total, "Commands so far.")
    yield Sample(
        "housekeeping_errors",
        "counter",
        server.housekeeping_errors,
        "Bugs that ended a round of upkeep; the log has them.",
    )


def _store(server: Server) -> Iterator[Sample]:
    store, state = server.store, server.store.state
    sums = server.totals.sums()
    yield Sample("prefixes", "gauge", sums.prefixes, "Namespaces whose both sides are there.")
    yield Sample("prefix_tokens", "gauge", sums.prefix_tokens, "Tokens of their first layers.")
    yield Sample("sessions", "gauge", len(state.sessions), "Sessions: one a side of a prefix.")
    yield Sample("sessions_limit", "gauge", store.config.max_sessions, "How many are kept.")
    yield Sample("row_bytes", "gauge", sums.row_bytes, "Rows in their storage formats.")
    yield Sample("evictions", "counter", store.space.evictions, "Sessions evicted for room.")
    yield Sample("damaged", "counter", store.counters.damaged, "Sessions that did not verify.")
    yield Sample("fetches", "counter", store.counters.fetches, "Fetches of rows.")
    yield Sample("stored_bytes", "counter", store.counters.bytes_stored, "Bytes stored.")
    yield Sample(
        "shared_bytes", "counter", store.counters.bytes_shared, "Equal rows that others hold too."
    )
    yield Sample(
        "copied_bytes", "counter", store.counters.bytes_copied, "Copied to give dead bytes back."
    )


def _files(server: Server) -> Iterator[Sample]:
    store = server.store
    wal = store.vstore_wal.size + store.ssm_wal.size
    yield Sample("disk_bytes", "gauge", store.space.used_bytes(), "What the data folder takes.")
    yield Sample("disk_budget_bytes", "gauge", store.space.disk_budget, "Its limit; 0: none.")
    yield Sample("segment_bytes", "gauge", store.space.disk_bytes(), "What segments take of it.")
    yield Sample("wal_bytes", "gauge", wal, "Logs of rows and states since the last save.")
    yield Sample("keyspace_wal_bytes", "gauge", server.keyspace.wal_bytes, "Log of plain keys.")
    replayed = store.replayed
    yield Sample(
        "replayed_records", "gauge", replayed.vstore + replayed.ssm, "Of the logs, at the start."
    )
    found = told([*replayed.notes, *server.keyspace.notes])
    for name, text in _AT_START.items():
        yield Sample(name, "gauge", found[name], text)


def _attention(server: Server) -> Iterator[Sample]:
    slots, engine = server.attention.slots, server.attention.engine
    counted = slots.counters
    yield Sample("attention_bytes", "gauge", slots.nbytes, "K/V resident for attention.")
    yield Sample("attention_budget_bytes", "gauge", slots.budget, "Their limit; 0: none.")
    yield Sample("attention_slots", "gauge", len(slots.warm), "Layers that are resident.")
    yield Sample("attention_cold_slots", "gauge", len(slots.cold), "Layers that left it.")
    yield Sample("attention_queries", "counter", engine.queries, "Queries answered.")
    yield Sample(
        "attention_shared_passes", "counter", engine.shared_passes, "Passes for several queries."
    )
    yield Sample("attention_demotions", "counter", counted.demotions, "Times that a layer had to.")
    yield Sample("attention_rehydrates", "counter", counted.rehydrates, "Layers that came back.")


@dataclass(frozen=True, eq=False)
class _Collector:
    """Reads the numbers when they are asked for, as prometheus-client's registry wants it."""

    server: Server

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, kind, value, text in samples(self.server):
            family: Any = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(PREFIX + name, text, value=value)


def _registry(server: Server) -> CollectorRegistry:
    """Raises ConfigError where prometheus-client is not installed."""
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError:
        raise ConfigError(
            "--metrics-port needs prometheus-client: pip install 'pion-vllm-mlx[metrics]'"
        ) from None
    registry = CollectorRegistry()
    registry.register(_Collector(server))
    return registry


async def listen(server: Server) -> list[asyncio.Server]:
    """The listener of ``--metrics-port``, none without it. Raises ConfigError, OSError."""
    config = server.config
    if not config.metrics_port:
        return []
    page = _Pages(server, _registry(server))
    sock = bind(config.metrics_bind, config.metrics_port, "--metrics-port: ")
    return [await asyncio.start_server(page.serve, sock=sock, limit=MAX_REQUEST_BYTES)]


@dataclass(frozen=True, eq=False)
class _Pages:
    """What is served, by path."""

    server: Server
    registry: CollectorRegistry

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close."""
        try:
            # a silent client, one that talks too much and one that goes away get no answer
            with contextlib.suppress(*_NO_ANSWER):
                reading = reader.readuntil(b"\r\n\r\n")
                request = await asyncio.wait_for(reading, REQUEST_SECONDS)
                writer.write(self._answer(request.partition(b"\r\n")[0]))
                await asyncio.wait_for(writer.drain(), REQUEST_SECONDS)
        finally:
            writer.close()

    def _answer(self, line: bytes) -> bytes:
        method, _, rest = line.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"GET or HEAD\n", True)
        body = method == b"GET"
        if path == b"/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            return _response("200 OK", CONTENT_TYPE_LATEST, generate_latest(self.registry), body)
        if path == b"/":
            page = receipt_page(self.server).encode()
            return _response("200 OK", "text/html; charset=utf-8", page, body)
        return _response("404 Not Found", "text/plain", b"/ and /metrics are here\n", body)


def _response(status: str, kind: str, content: bytes, with_body: bool) -> bytes:
    head = [
        f"HTTP/1.1 {status}",
        f"Content-Type: {kind}",
        f"Content-Length: {len(content)}",
        "Content-Security-Policy: default-src 'none'; style-src 'unsafe-inline'",
        "X-Content-Type-Options: nosniff",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    return "\r\n".join([*head, "", ""]).encode() + (content if with_body else b"")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="5">
<title>pion-server</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:2em auto;padding:0 1em}}
table{{border-collapse:collapse;width:100%}}td{{border-bottom:1px solid #8884;padding:.2em 0}}
td:last-child{{text-align:right;font-variant-numeric:tabular-nums}}b{{font-size:2em}}</style></head>
<body><h1>pion-server</h1><p><b>{seconds} s</b><br>of prefill avoided, {measured} s of it
measured, the rest estimated</p><table>{rows}</table><p>{version} ·
<a href="/metrics">/metrics</a></p></body></html>
"""


def receipt_page(server: Server) -> str:
    """The value receipt as HTML, its fields those of PION.STATS."""
    fields = dict(server.ledger.fields())
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in fields.items()
    )
    return _PAGE.format(
        seconds=fields["prefill_seconds_avoided"],
        measured=fields["prefill_seconds_avoided_measured"],
        rows=rows,
        version=html.escape(__version__),
    )
