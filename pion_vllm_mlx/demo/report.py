"""What the demo found: a table and a receipt for people, one JSON object for programs."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

from pion_vllm_mlx.demo.flip import FlippedByte

EXPECTED_LANE = "mapped"
# Kernels differ by about 1e-6 between cuts; this far apart is no rounding any more.
CLOSE_GAP = 1e-3

WorkerReport = dict[str, Any]
"""A process's report as it came: see ``worker.WorkerReport``."""


@dataclass(frozen=True)
class Row:
    """One question, warm and cold; times in milliseconds to the first token.

    ``restore_ms`` is the part of ``warm_ms`` until the prefix's cache was there.
    """

    question: str
    prefix_tokens: int
    cold_ms: float
    warm_ms: float
    restore_ms: float
    ratio: float
    lane: str
    bytes: int
    identical: bool
    note: str
    answer: str


@dataclass
class DemoResult:
    """Everything that was found; ``problems`` is empty if all of it was as promised."""

    rows: list[Row] = field(default_factory=list)
    stored: dict[str, float] = field(default_factory=dict)
    receipt: dict[str, Any] = field(default_factory=dict)
    after_kill: str = "not run"
    after_kill_ms: float = 0.0
    flipped_byte: str = "not run"
    flipped_byte_reason: str | None = None
    flipped: FlippedByte | None = None
    shortened: bool = False
    set_up_seconds: float = 0.0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    def expect(self, truth: bool, problem: str) -> None:
        """Note ``problem`` unless ``truth``."""
        if not truth:
            self.problems.append(problem)

    def take_questions(self, report: WorkerReport) -> None:
        """The rows of the process that asked warm and cold, and what is wrong with them."""
        for number, question in enumerate(report["questions"], 1):
            row = _row(report["prefix_tokens"], question)
            self.rows.append(row)
            reason = question["miss_reason"]
            self.expect(question["hit"], f"B, question {number}: a miss ({reason})")
            self.expect(row.lane == EXPECTED_LANE, f"B, question {number}: lane {row.lane}")
            self.expect(row.identical, f"B, question {number}: other tokens ({row.note})")

    def take_after_kill(self, report: WorkerReport, expected_tokens: list[int]) -> None:
        """Process C: it hits after the server's SIGKILL, with the tokens of before."""
        question = report["questions"][0]
        self.after_kill = "hit" if question["hit"] else "miss"
        self.after_kill_ms = question["warm_ms"]
        self.expect(question["hit"], f"C: a miss after the kill ({question['miss_reason']})")
        self.expect(question["lane"] == EXPECTED_LANE, f"C: lane {question['lane']}")
        self.expect(question["tokens"] == expected_tokens, "C: other tokens than before the kill")

    def take_flipped(
        self, report: WorkerReport, flipped: FlippedByte, expected_tokens: list[int]
    ) -> None:
        """Process D: it misses with a reason, and its own prefill gives the right tokens."""
        question = report["questions"][0]
        self.flipped = flipped
        self.flipped_byte = "hit" if question["hit"] else "miss"
        self.flipped_byte_reason = question["miss_reason"]
        self.expect(not question["hit"], "D: a hit on a damaged prefix")
        self.expect(bool(question["miss_reason"]), "D: a miss without a reason")
        self.expect(question["tokens"] == expected_tokens, "D: other tokens than before")


def _row(prefix_tokens: int, question: dict[str, Any]) -> Row:
    difference = question["difference"]
    note = ""
    close = difference is None or difference[1] < CLOSE_GAP
    if difference is not None:
        note = f"parts at token {difference[0]}, gap {difference[1]:.1e}"
    if not question["same_bits"]:
        note = "logits differ from an unstored cache's"
    return Row(
        question=question["question"],
        prefix_tokens=prefix_tokens,
        cold_ms=question["cold_ms"],
        warm_ms=question["warm_ms"],
        restore_ms=question["restore_ms"],
        ratio=question["cold_ms"] / question["warm_ms"],
        lane=question["lane"],
        bytes=question["bytes"],
        identical=bool(question["same_bits"]) and close,
        note=note,
        answer=question["text"],
    )


def table(rows: list[Row]) -> str:
    """One line a question."""
    lines = [
        f"{'question':<44} {'prefix':>6} {'cold TTFT':>10} {'warm TTFT':>10} {'ratio':>7} "
        f"{'lane':<8} {'bytes':>11} identical"
    ]
    for number, row in enumerate(rows, 1):
        question = f"{number} {row.question}"
        if len(question) > 44:
            question = f"{question[:41]}..."
        note = f" ({row.note})" if row.note else ""
        lines.append(
            f"{question:<44} {row.prefix_tokens:>6} {row.cold_ms:>7.0f} ms {row.warm_ms:>7.0f} ms "
            f"{row.ratio:>6.1f}x {row.lane:<8} {row.bytes:>11,} "
            f"{'yes' if row.identical else 'no'}{note}"
        )
    return "\n".join(lines)


def where_the_time_went(rows: list[Row]) -> str:
    """How much of the warm time is the store's, and how much the question's own tokens."""
    restore = statistics.median(row.restore_ms for row in rows)
    rest = statistics.median(row.warm_ms - row.restore_ms for row in rows)
    return (
        f"Of the warm time, {restore:.0f} ms fetch the prefix and {rest:.0f} ms are the "
        "question's own tokens (medians)."
    )


def receipt_text(receipt: dict[str, Any]) -> str:
    """The server's value receipt, one field a line, without the families it does not have."""
    shown = {name: value for name, value in receipt.items() if name.startswith(("kv", "prefill"))}
    width = max(map(len, shown), default=0)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in shown.items())


def as_json(result: DemoResult) -> dict[str, Any]:
    """The result as one object: medians over the questions, then everything else."""
    rows = result.rows
    cold = statistics.median(row.cold_ms for row in rows) if rows else None
    warm = statistics.median(row.warm_ms for row in rows) if rows else None
    everything = asdict(result)
    return {
        "prefix_tokens": rows[0].prefix_tokens if rows else None,
        "cold_ms": cold,
        "warm_ms": warm,
        "ratio": cold / warm if cold and warm else None,
        "lane": ",".join(sorted({row.lane for row in rows})),
        "bytes": max((row.bytes for row in rows), default=0),
        "identical": bool(rows) and all(row.identical for row in rows),
        "after_kill": everything.pop("after_kill"),
        "flipped_byte": everything.pop("flipped_byte"),
        "questions": everything.pop("rows"),
        **everything,
    }
