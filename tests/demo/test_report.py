"""Whatever is not as promised is a problem by name, and the JSON has its promised fields."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from pion_vllm_mlx.demo.flip import FlippedByte
from pion_vllm_mlx.demo.report import DemoResult, as_json, receipt_text, table, where_the_time_went

GOOD = {
    "question": "How high is it?",
    "tokens": [5, 6, 7],
    "text": " 26 m",
    "warm_ms": 100.0,
    "restore_ms": 12.0,
    "cold_ms": 2000.0,
    "hit": True,
    "lane": "mapped",
    "bytes": 9_000_000,
    "miss_reason": None,
    "same_bits": True,
    "difference": None,
}
FLIPPED = FlippedByte("pion.segments.0/1.safetensors", "k", 4096)


def _report(**changes: Any) -> dict[str, Any]:
    return {"prefix_tokens": 512, "questions": [copy.deepcopy(GOOD) | changes]}


def _result(b: dict[str, Any], c: dict[str, Any], d: dict[str, Any]) -> DemoResult:
    result = DemoResult()
    result.take_questions(b)
    result.take_after_kill(c, [5, 6, 7])
    result.take_flipped(d, FLIPPED, [5, 6, 7])
    return result


MISS = {"hit": False, "miss_reason": "checksum of layer 3", "lane": "none"}


def test_what_is_as_promised_is_no_problem() -> None:
    result = _result(_report(), _report(), _report(**MISS))
    assert result.problems == []


def test_the_json_carries_the_promised_fields() -> None:
    found = json.loads(json.dumps(as_json(_result(_report(), _report(), _report(**MISS)))))
    expected = {
        "prefix_tokens": 512,
        "cold_ms": 2000.0,
        "warm_ms": 100.0,
        "ratio": 20.0,
        "lane": "mapped",
        "bytes": 9_000_000,
        "identical": True,
        "after_kill": "hit",
        "flipped_byte": "miss",
        "flipped_byte_reason": "checksum of layer 3",
        "problems": [],
    }
    assert {name: found[name] for name in expected} == expected
    assert found["questions"][0]["ratio"] == 20.0


def test_an_empty_result_can_still_be_written() -> None:
    assert json.loads(json.dumps(as_json(DemoResult())))["identical"] is False


@pytest.mark.parametrize(
    ("process", "changes", "named"),
    [
        ("b", {"hit": False, "miss_reason": "other ids"}, "B, question 1: a miss (other ids)"),
        ("b", {"lane": "RANGE"}, "B, question 1: lane RANGE"),
        ("b", {"same_bits": False}, "B, question 1: other tokens (logits differ"),
        ("b", {"difference": [2, 0.5]}, "B, question 1: other tokens (parts at token 2"),
        ("c", {"hit": False, "miss_reason": "gone"}, "C: a miss after the kill (gone)"),
        ("c", {"lane": "stored"}, "C: lane stored"),
        ("c", {"tokens": [5, 6, 8]}, "C: other tokens"),
        ("d", {"hit": True}, "D: a hit on a damaged prefix"),
        ("d", {"miss_reason": None}, "D: a miss without a reason"),
        ("d", {"tokens": [1]}, "D: other tokens"),
    ],
)
def test_each_broken_promise_is_named(process: str, changes: dict[str, Any], named: str) -> None:
    reports = {"b": _report(), "c": _report(), "d": _report(**MISS)}
    reports[process]["questions"][0].update(changes)
    problems = _result(**reports).problems
    assert [problem for problem in problems if problem.startswith(named)], problems


def test_a_difference_between_two_nearly_equal_tokens_is_printed_and_no_problem() -> None:
    result = _result(_report(difference=[2, 0.0004]), _report(), _report(**MISS))
    assert result.problems == []
    assert "yes (parts at token 2, gap 4.0e-04)" in table(result.rows)


def test_the_table_has_a_line_a_question_with_its_figures() -> None:
    result = _result(_report(question="Why? " * 20), _report(), _report(**MISS))
    header, line = table(result.rows).splitlines()
    assert "identical" in header
    for figure in ("512", "2000 ms", "100 ms", "20.0x", "mapped", "9,000,000", "yes"):
        assert figure in line


def test_the_time_to_fetch_is_told_apart_from_the_questions_own() -> None:
    result = _result(_report(), _report(), _report(**MISS))
    assert "12 ms fetch the prefix and 88 ms" in where_the_time_went(result.rows)


def test_the_receipt_shows_the_prefix_fields() -> None:
    text = receipt_text({"worker_id": 0, "kvprefix_hits": 6, "prefill_seconds_avoided": "9.1"})
    assert text.splitlines() == [
        "  kvprefix_hits            6",
        "  prefill_seconds_avoided  9.1",
    ]
