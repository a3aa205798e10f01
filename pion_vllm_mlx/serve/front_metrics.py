"""``/metrics``: what the front saw of its requests, and the engine's own numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass
class RequestRecord:
    """One request, for its log line and the metrics. Times are of ``time.monotonic``."""

    method: str
    path: str
    client: str
    began: float
    endpoint: str = "other"
    status: int = 0
    first_token: float | None = None
    outcome: Any = None  # pieces.Outcome of what the engine answered
    note: str = ""


@dataclass(frozen=True, eq=False)
class _EngineNumbers:
    """The numbers of the engine's last stats as gauges."""

    numbers: dict[str, float]

    def collect(self) -> Iterator[Metric]:
        for name, value in self.numbers.items():
            yield GaugeMetricFamily(f"pion_engine_{name}", "From /v1/pion/stats.", value=value)


@dataclass
class FrontMetrics:
    """The front's metrics; one registry of their own."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        registry = self.registry
        labels = ["endpoint", "status"]
        self.requests = Counter("pion_requests", "Requests.", labels, registry=registry)
        self.in_flight = Gauge("pion_requests_in_flight", "Open requests.", registry=registry)
        self.tokens = Counter("pion_tokens", "Tokens by kind.", ["kind"], registry=registry)
        self.first = Histogram(
            "pion_first_token_seconds",
            "From a request to the first token of its reply.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.seconds = Histogram(
            "pion_request_seconds",
            "From a request to the end of its reply.",
            ["endpoint"],
            buckets=_SECONDS,
            registry=registry,
        )
        for kind in ("prompt", "cached", "completion"):
            self.tokens.labels(kind)

    def count(self, record: RequestRecord, seconds: float) -> None:
        """Enter a request that is over; a probe's refusal while a model loads is no failure."""
        if record.endpoint == "probe":
            return
        self.requests.labels(record.endpoint, str(record.status)).inc()
        self.seconds.labels(record.endpoint).observe(seconds)
        if record.first_token is not None:
            self.first.observe(record.first_token - record.began)
        if record.outcome is not None:
            self.tokens.labels("prompt").inc(record.outcome.prompt_tokens)
            self.tokens.labels("cached").inc(record.outcome.cached_tokens)
            self.tokens.labels("completion").inc(record.outcome.generated)

    def render(self, engine: dict[str, float]) -> bytes:
        """The text of ``/metrics``; ``engine``: numbers to show beside the front's own."""
        numbers = CollectorRegistry()
        numbers.register(_EngineNumbers(engine))
        return generate_latest(self.registry) + generate_latest(numbers)


def numbers_of(stats: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers in a JSON object under names that Prometheus takes; nested ones joined by _."""
    found: dict[str, float] = {}
    for name, value in stats.items():
        clean = "".join(c if c.isascii() and c.isalnum() else "_" for c in f"{prefix}{name}")
        if isinstance(value, dict):
            found |= numbers_of(value, f"{clean}_")
        elif isinstance(value, (bool, int, float)):
            found[clean] = float(value)
    return found
