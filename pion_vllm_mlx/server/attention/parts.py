"""A query of many tokens is computed in parts, so that others need not wait for all of it.

Letters: H_q query heads, H_kv KV heads, M query tokens, S suffix tokens, D head dimension. What
a part takes beside its result is bounded, whatever M is: kernels hold the scores of all rows
over some tokens or over all, and partial outputs of all rows a few times. Where a query is cut
depends on its shape alone: equal queries give equal bytes, on either lane.
"""

from __future__ import annotations

from dataclasses import dataclass

from pion_vllm_mlx.kernels import api

#: scores of a part: a processor computes them in about a tenth of a second, a GPU has more of them.
_SCORES, _DEVICE_SCORES = 1 << 23, 1 << 25
#: values of the output of a part.
_VALUES = 1 << 18
#: query rows of a KV head in a part, at least: a pass over K and V has to be worth it.
_LEAST_ROWS = 32

Span = tuple[int, int]
"""Query tokens [first, end)."""


@dataclass(frozen=True)
class Extent:
    """How much there is to compute: H_q, H_kv, M, S, D, and ``seen`` tokens of the prefix."""

    heads: int
    kv_heads: int
    queries: int
    suffix: int
    dim: int
    seen: int
    on_host: bool = True

    @property
    def most(self) -> int:
        """Query tokens of a part, at most."""
        scores = _SCORES if self.on_host else _DEVICE_SCORES
        fit = min(scores // (self.seen + self.suffix), _VALUES // self.dim) // self.heads
        return max(fit, -(-_LEAST_ROWS * self.kv_heads // self.heads))

    @property
    def is_long(self) -> bool:
        """Whether there are several parts."""
        return self.queries > self.most

    def spans(self) -> list[Span]:
        """The parts, of about equal length.

        Where queries outnumber the suffix, those that see all of it are apart from the others.
        """
        edges = [0, self.queries]
        if self.queries > self.most and 0 < self.suffix < self.queries:
            edges.insert(1, self.suffix)
        return [
            span
            for first, end in zip(edges, edges[1:], strict=False)
            for span in _evenly(first, end, self.most)
        ]


def _evenly(first: int, end: int, most: int) -> list[Span]:
    count = -(-(end - first) // most)
    at = [first + (end - first) * n // count for n in range(count + 1)]
    return list(zip(at, at[1:], strict=False))


def suffix_of(suffix: api.Suffix, queries: int, span: Span) -> api.Suffix | None:
    """The tokens of a suffix that the queries of ``span``, of M = ``queries``, see between them.

    Query m sees ``t <= max(0, S - M) + m``; by the same rule the span alone sees the same of
    what is returned. None where each query of the span sees the whole suffix. A span in which
    only some do is none that ``Extent.spans`` makes: ValueError.
    """
    tokens = suffix.num_tokens
    first, end = (max(0, tokens - queries) + edge for edge in span)
    if end > tokens:
        if first + 1 < tokens:
            raise ValueError(f"queries {span} see different parts of {tokens} tokens")
        return None
    return api.Suffix(suffix.keys[:, :end], suffix.values[:, :end])
