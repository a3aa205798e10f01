"""What the front refuses, in the shape and with the status that each API's clients expect."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest

from pion_vllm_mlx.serve.request_body import DROPPED_BYTES, MAX_BODY_BYTES
from tests.serve.front import Front, running_front, until

KEY = "sk-pion-ünicode"
POSTS = ("/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions", "/v1/responses")
LONG = "say these words are six exactly once"
HI = {"max_tokens": 5, "messages": [{"role": "user", "content": "say hi"}], "input": "say hi"}


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    """A front that wants a key."""
    with running_front(tmp_path_factory.mktemp("locked"), "--api-key", KEY) as running:
        yield running


def kind(path: str, body: Any) -> str:
    """The error's type, of a body in the shape that belongs to ``path``."""
    if path.startswith("/v1/messages"):
        assert body["type"] == "error"
    else:
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: str = body["error"]["type"]
    return found


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff", b"", b'{"max_tokens": NaN}', b"[" * 99_999])
def test_bad_json_is_a_400(front: Front, path: str, raw: bytes) -> None:
    status, body = front.request(path, raw)
    assert (status, kind(path, body)) == (400, "invalid_request_error")


@pytest.mark.parametrize("path", POSTS)
def test_a_huge_body_is_a_413_before_it_is_read(front: Front, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=30)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(MAX_BODY_BYTES + 1))
    connection.endheaders()
    answer = connection.getresponse()
    body = json.loads(answer.read())
    connection.close()
    wanted = "request_too_large" if path.startswith("/v1/messages") else "invalid_request_error"
    assert (answer.status, kind(path, body)) == (413, wanted)


def test_a_body_that_never_ends_is_refused_at_the_limit(front: Front) -> None:
    piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", front.port), timeout=60) as raw:
        head = b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\n"
        raw.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        # It answers and closes while we are still sending, or reads no further.
        with pytest.raises(OSError):
            for _ in range((DROPPED_BYTES + 3 * MAX_BODY_BYTES) >> 20):
                raw.sendall(piece)
    assert front.request("/health")[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_huge_body_first_is_told_413(
    front: Front, chunked: bool
) -> None:
    pieces = (MAX_BODY_BYTES >> 20) + 16
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    length = {} if chunked else {"Content-Length": str(pieces << 20)}
    body = (b" " * (1 << 20) for _ in range(pieces))
    connection.request("POST", POSTS[2], body, length)  # in chunks where no length is given
    answer = connection.getresponse()
    told = json.loads(answer.read())["error"]["message"]
    assert (answer.status, "longer than 64 MB" in told) == (413, True)
    connection.close()


def test_a_long_body_that_is_in_order_is_served(front: Front) -> None:
    said = "say " + "x" * (1 << 20)
    status, body = front.request(POSTS[2], {"messages": [{"role": "user", "content": said}]})
    assert (status, len(body["choices"][0]["message"]["content"])) == (200, 1 << 20)


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/messages/nothing", "/"])
def test_an_unknown_path_is_a_404(front: Front, path: str) -> None:
    status, body = front.request(path, {})
    assert (status, kind(path, body)) == (404, "not_found_error")


@pytest.mark.parametrize("path", POSTS)
def test_a_wrong_method_is_a_405(front: Front, path: str) -> None:
    status, body = front.request(path)
    assert (status, kind(path, body)) == (405, "invalid_request_error")


def test_the_supervisor_is_only_there_in_supervisor_mode(front: Front) -> None:
    assert front.request("/v1/pion/supervisor")[0] == 404


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": "Bearer"},
        {"x-api-key": ""},
        {"x-api-key": KEY[:-1]},
    ],
)
def test_without_the_key_there_is_a_401(locked: Front, path: str, headers: dict[str, str]) -> None:
    latin = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    status, body = locked.request(path, HI, latin)
    assert (status, kind(path, body)) == (401, "authentication_error")


def test_the_key_opens_as_bearer_token_and_as_x_api_key(locked: Front) -> None:
    wire = KEY.encode().decode("latin-1")
    for headers in ({"Authorization": f"Bearer {wire}"}, {"x-api-key": wire}):
        for path in POSTS:
            assert locked.request(path, HI, headers)[0] == 200
    for path in ("/metrics", "/v1/models", "/v1/pion/stats"):
        assert locked.request(path)[0] == 401
        assert locked.request(path, headers={"x-api-key": wire})[0] == 200
    assert locked.request("/health")[0] == 200


def test_the_sdks_send_the_key_where_it_is_looked_for(locked: Front) -> None:
    wrong = "sk-other"
    with anthropic.Anthropic(base_url=locked.url, api_key=wrong, max_retries=0) as claude:
        with pytest.raises(anthropic.AuthenticationError):
            claude.messages.create(model="c", max_tokens=5, messages=[])
    with openai.OpenAI(base_url=f"{locked.url}/v1", api_key=wrong, max_retries=0) as gpt:
        with pytest.raises(openai.AuthenticationError):
            gpt.models.list()


def test_the_key_is_neither_logged_nor_on_the_engines_command_line(locked: Front) -> None:
    (pid,) = locked.engine_pids()
    assert KEY not in " ".join(psutil.Process(pid).cmdline())
    assert KEY not in locked.output()


def test_nobody_else_can_ask_the_engine(front: Front) -> None:
    (pid,) = front.engine_pids()
    port = listening_port(pid)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/v1/models")
    assert connection.getresponse().status == 401
    connection.close()


def listening_port(pid: int) -> int:
    """The port of process ``pid``, whose sockets are among those of the system's table."""
    (found,) = [
        entry.laddr.port
        for entry in psutil.Process(pid).net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN
    ]
    return int(found)


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8080", 200),
    ],
)
def test_a_foreign_web_page_is_kept_out(front: Front, origin: str, status: int) -> None:
    assert front.request("/v1/chat/completions", HI, {"Origin": origin})[0] == status


def test_an_allowed_web_page_may_ask_and_read(tmp_path: Path) -> None:
    with running_front(tmp_path, "--allowed-origins", "https://a.example") as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        for method in ("OPTIONS", "GET"):
            connection.request(method, "/v1/models", headers={"Origin": "https://a.example"})
            answer = connection.getresponse()
            answer.read()
            assert answer.status in (200, 204)
            assert answer.headers["Access-Control-Allow-Origin"] == "https://a.example"
        connection.close()
        assert running.request("/v1/models", headers={"Origin": "https://b.example"})[0] == 403


def test_no_pion_stats_say_disabled(tmp_path: Path) -> None:
    with running_front(tmp_path, "--no-pion") as running:
        assert running.request("/v1/pion/stats") == (200, {"pion": "disabled"})


def test_explain_takes_any_apis_body_and_none_at_all(front: Front) -> None:
    status, answer = front.request("/v1/pion/explain")
    assert (status, answer["asked"]) == (200, {})
    status, answer = front.request("/v1/pion/explain?api=messages", HI)
    assert answer["asked"]["messages"] == HI["messages"]
    status, answer = front.request("/v1/pion/explain?api=responses", {"input": "hi"})
    assert answer["asked"]["messages"] == [{"role": "user", "content": "hi"}]
    for body in (HI, {}):
        assert front.request("/v1/pion/explain?api=other", body)[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_refused_where_the_engine_has_none(
    tmp_path: Path, stream: bool
) -> None:
    body = {**HI, "logprobs": True, "stream": stream}
    with running_front(tmp_path, "--engine", "vllm-mlx") as running:
        status, answer = running.request(POSTS[2], body)
        assert (status, "logprobs" in answer["error"]["message"]) == (400, True)
        assert running.request(POSTS[2], {**body, "logprobs": False, "stream": False})[0] == 200
        for number in (0, 3):
            asked = {"prompt": "say hi", "max_tokens": 5, "logprobs": number, "stream": stream}
            status, answer = running.request("/v1/completions", asked)
            assert (status, "logprobs" in answer["error"]["message"]) == (400, True)


def test_an_empty_prompt_is_refused_before_the_engine(front: Front) -> None:
    status, body = front.request("/v1/completions", {"prompt": "", "max_tokens": 2})
    assert (status, "prompt" in body["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
        ("[localhost", 403),
        ("localhost:8080", 200),
        ("LOCALHOST.", 200),
        ("app.localhost", 200),
        ("127.0.0.1", 200),
        ("127.0.0.5:1", 200),
        ("10.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("host.docker.internal:8080", 200),
    ],
)
def test_a_name_that_was_rebound_to_this_machine_is_kept_out(
    front: Front, host: str, status: int
) -> None:
    for path in ("/v1/models", "/health"):
        assert front.request(path, headers={"Host": host})[0] == status


def test_a_host_is_anybody_s_where_a_key_is_asked_for_or_an_origin_names_it(
    locked: Front, tmp_path: Path
) -> None:
    assert locked.request("/health", headers={"Host": "a.example"})[0] == 200
    with running_front(tmp_path, "--allowed-origins", "https://a.example:8443") as running:
        assert running.request("/v1/models", headers={"Host": "A.example"})[0] == 200
        assert running.request("/v1/models", headers={"Host": "b.example"})[0] == 403


def test_a_probe_of_a_model_that_loads_is_no_failed_request(tmp_path: Path) -> None:
    with running_front(tmp_path, "--load-seconds", "900", healthy=False) as running:
        assert running.request("/health")[0] == 503
        running.request("/v1/models")
        wanted = 'pion_requests_total{endpoint="/v1/models",status="200"}'
        until(lambda: wanted in running.request("/metrics")[1]["text"], "the other's count")
        assert 'status="503"' not in running.request("/metrics")[1]["text"]


def test_metrics_count_requests_tokens_and_the_engines_numbers(front: Front) -> None:
    front.request("/v1/messages", HI)
    wanted = 'pion_requests_total{endpoint="/v1/messages",status="200"}'
    # A request is counted when it is over, which its client may know a moment before.
    until(lambda: wanted in front.request("/metrics")[1]["text"], "the request's count")
    text = front.request("/metrics")[1]["text"]
    assert 'pion_tokens_total{kind="cached"}' in text
    assert "pion_engine_requests " in text
    assert "pion_engine_loads 1.0" in text
    idle = "pion_requests_in_flight 0.0"  # the scrape itself is none
    until(lambda: idle in front.request("/metrics")[1]["text"], "that no request is open")


def test_each_request_is_one_log_line_and_a_path_cannot_forge_another(front: Front) -> None:
    def lines() -> list[str]:
        return [line for line in front.output().splitlines() if "forged" in line or said in line]

    said = "reused=0 computed=7 generated=6"
    front.request("/v1/x%0aINFO%20forged", {})
    front.request("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]})
    until(lambda: len(lines()) == 2, "both lines")
    assert "\\n" in lines()[0]
    assert "POST /v1/chat/completions 200" in lines()[1]
    assert "tier=memory" in lines()[1]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say a b c"}]}),
        ("/v1/completions", {"prompt": "say a b c"}),
    ],
)
def test_a_request_with_log_probabilities_is_noted_and_named_as_any_other(
    tmp_path: Path, path: str, asked: dict[str, Any]
) -> None:
    with running_front(tmp_path) as running:
        body = {**asked, "model": "as-i-call-it", "logprobs": True}
        status, answer = running.request(path, body)
        assert (status, answer["model"], answer["logprobs_asked"]) == (200, "as-i-call-it", True)
        line = f"POST {path} 200 reused=0 computed=4 generated=3 tier=memory"
        until(lambda: line in running.output(), "the line")
        text = running.request("/metrics")[1]["text"]
        assert 'pion_tokens_total{kind="prompt"} 4.0' in text
        assert 'pion_tokens_total{kind="completion"} 3.0' in text
