"""Sampling settings that are out of their range are refused by name, for every API and engine."""

from __future__ import annotations

from typing import Any

import pytest

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.sampling import check_sampling
from tests.serve.front import running_front

Json = dict[str, Any]
HI = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
BODIES: dict[str, Json] = {
    "/v1/chat/completions": HI,
    "/v1/completions": {"prompt": "hi"},
    "/v1/messages": HI,
    "/v1/responses": {"input": "hi"},
}
WRONG: list[tuple[Json, str]] = [
    ({"temperature": -0.1}, "temperature must be a number that a float32 can hold, not below 0"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": 1e-40}, "temperature must be 0, or at least 1e-30"),
    ({"temperature": "hot"}, "temperature must be a number"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.01}, "top_p must be from 0 to 1"),
    ({"min_p": 5}, "min_p must be from 0 to 1"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"presence_penalty": float("inf")}, "presence_penalty must be a number that a float32"),
    ({"frequency_penalty": -(10**400)}, "frequency_penalty"),
    ({"xtc_probability": 3}, "xtc_probability"),
    ({"xtc_threshold": 0.6}, "xtc_threshold must be from 0 to 0.5"),
    ({"logit_bias": "x"}, "logit_bias must be an object"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: '-1' is no token id"),
    ({"logit_bias": {"\u0665": 1}}, "is no token id"),
    ({"logit_bias": {"7": "x"}}, "logit_bias: the bias of token 7 must be a number"),
    ({"logit_bias": {"7": float("inf")}}, "logit_bias: the bias of token 7 is too large"),
]


@pytest.mark.parametrize(("body", "named"), WRONG)
def test_what_is_out_of_its_range_is_refused_by_its_name(body: Json, named: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_sampling(body)
    assert (refused.value.status, named in refused.value.message) == (400, True)


def test_what_engines_can_do_goes_through() -> None:
    check_sampling({})
    check_sampling({"temperature": 0, "top_p": 0, "min_p": 1.0, "repetition_penalty": 1.1})
    check_sampling({"presence_penalty": -2, "frequency_penalty": 2.0, "logit_bias": {"0": -100}})
    check_sampling({"temperature": None, "logit_bias": None, "xtc_threshold": 0.5, "top_k": -1})
    check_sampling({"temperature": 1e-10})


@pytest.mark.parametrize("stream", [False, True])
def test_every_api_refuses_it_before_the_engine_sees_it(tmp_path: Any, stream: bool) -> None:
    with running_front(tmp_path) as front:
        for path, body in BODIES.items():
            for wrong, named in ({"temperature": -1}, "temperature"), ({"top_p": 2}, "top_p"):
                status, told = front.request(path, {**body, **wrong, "stream": stream})
                assert (status, named in told["error"]["message"]) == (400, True), (path, told)
        assert front.request("/v1/pion/stats")[1]["requests"] == 0
