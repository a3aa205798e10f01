"""The engine's life: it dies with the front, is started again, drains, is unloaded when idle."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import h11
import openai
import psutil
import pytest

from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.engine_child import EngineLink, report_ready
from pion_vllm_mlx.serve.engine_client import _broken_off
from tests.serve.front import Front, alive, refused_at_start, running_front, until

CHAT = "/v1/chat/completions"


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], **more}


def open_stream(front: Front, text: str) -> http.client.HTTPConnection:
    """A chat stream that was begun: its first bytes have come."""
    connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    connection.request("POST", CHAT, json.dumps(said(text, stream=True)))
    connection.stream = connection.getresponse()  # type: ignore[attr-defined]
    connection.stream.read1(1)  # type: ignore[attr-defined]
    return connection


def stats(front: Front) -> dict[str, Any]:
    return front.request("/v1/pion/stats")[1]


def test_the_engine_ends_when_the_front_is_killed(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        (engine,) = front.engine_pids()
        stream = open_stream(front, "slow 100000")
        os.kill(front.pid, signal.SIGKILL)
        until(lambda: not alive(engine), "the engine's end")
        stream.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_that_still_loads_ends_with_the_front(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running_front(tmp_path, "--load-seconds", "900", healthy=False) as front:
        until(lambda: "engine loading: pid " in front.output(), "the engine's start")
        engine = int(front.output().partition("loading: pid ")[2].split()[0])
        assert front.request("/health")[0] == 503
        assert front.stop(number) == (0 if number == signal.SIGTERM else -number)
        until(lambda: not alive(engine), "the engine's end")


def test_a_dead_engine_is_a_502_and_the_next_request_starts_another(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        (first,) = front.engine_pids()
        status, body = front.request(CHAT, said("die"))
        assert (status, body["error"]["code"]) == (502, "engine_gone")
        assert not alive(first)
        assert front.request(CHAT, said("say again"))[0] == 200
        second = front.engine_pids()[-1]
        assert second != first
        os.kill(second, signal.SIGKILL)
        until(lambda: "ended with code -9" in front.output().partition(str(second))[2], "its end")
        assert front.request("/v1/messages", said("say again", max_tokens=5))[0] == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/messages/count_tokens"])
def test_a_request_that_a_dead_engine_never_answered_is_answered_by_the_next(
    tmp_path: Path, path: str
) -> None:
    with running_front(tmp_path) as front, ThreadPoolExecutor() as pool:
        (first,) = front.engine_pids()
        os.kill(first, signal.SIGSTOP)  # it takes the connection and says nothing
        asked = pool.submit(front.request, path, said("say it again", max_tokens=5))
        until(lambda: connected(front.pid, first), "the front's connection")
        os.kill(first, signal.SIGKILL)
        status, body = asked.result(timeout=60)
        assert status == 200, body
        assert len(front.engine_pids()) == 2


def connected(front: int, engine: int) -> bool:
    """Whether the front has a connection to the engine, after those that asked for its health."""
    (port,) = [
        one.laddr.port
        for one in psutil.Process(engine).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]
    return any(
        one.raddr and one.raddr.port == port and one.status == psutil.CONN_ESTABLISHED
        for one in psutil.Process(front).net_connections("tcp")
    )


@pytest.mark.parametrize(
    "error",
    [
        h11.RemoteProtocolError("peer closed connection (incomplete chunked read)"),
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        json.JSONDecodeError("Expecting value", "x", 0),
    ],
)
def test_an_engine_that_breaks_off_is_told_of_in_plain_words(error: Exception) -> None:
    with pytest.raises(ApiError, match="^the engine broke off") as told, _broken_off():
        raise error
    assert told.value.status == 502
    assert not {"peer", "Expecting", "Errno"} & set(re.split(r"\W+", told.value.message))


def test_a_front_that_has_gone_costs_its_engine_no_traceback(tmp_path: Path) -> None:
    ready, ready_write = os.pipe()
    os.close(ready)
    report_ready(EngineLink(ready_fd=ready_write), 1, "m")
    with pytest.raises(OSError):
        os.fstat(ready_write)


def test_streams_of_a_dying_engine_end_with_an_error(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        messages: list[Any] = [{"role": "user", "content": "die"}]
        with anthropic.Anthropic(base_url=front.url, api_key="x", max_retries=0) as claude:
            with pytest.raises(anthropic.APIStatusError, match="engine"):
                with claude.messages.stream(model="c", max_tokens=9, messages=messages) as stream:
                    list(stream)
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as gpt:
            with pytest.raises(openai.APIError, match="engine"):
                list(gpt.chat.completions.create(model="g", messages=messages, stream=True))
            with pytest.raises(openai.APIError, match="engine"):
                list(gpt.responses.create(model="g", input="die", stream=True))
        assert front.request(CHAT, said("say again"))[0] == 200


def test_health_of_a_dead_engine_brings_another_up(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        os.kill(front.engine_pids()[0], signal.SIGKILL)
        until(lambda: "ended with code -9" in front.output(), "its end")
        assert front.request("/health") == (503, {"status": "unavailable", "engine": "starting"})
        until(lambda: front.request("/health")[0] == 200, "another engine")


def test_an_engine_that_says_it_cannot_serve_is_replaced(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        (first,) = front.engine_pids()
        assert front.request(CHAT, said("sick"))[0] == 500
        assert front.request(CHAT, said("say well"))[0] == 200
        assert front.engine_pids() != [first]
        assert not alive(first)


def test_an_error_alone_does_not_cost_the_engine(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        assert front.request(CHAT, said("refuse 500 once"))[0] == 500
        assert front.request(CHAT, said("say well"))[0] == 200
        assert len(front.engine_pids()) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_requests_finish_and_refuses_new_ones(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running_front(tmp_path) as front, ThreadPoolExecutor() as pool:
        (engine,) = front.engine_pids()
        whole = pool.submit(front.request, CHAT, said("slow 100"))
        stream = open_stream(front, "slow 100")
        until(lambda: stats(front)["running"] == 2, "both replies")
        os.kill(front.pid, number)
        until(lambda: front.request(CHAT, said("say hi"))[0] == 503, "a refusal")
        status, body = front.request("/v1/messages", said("say hi", max_tokens=1))
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        rest = stream.stream.read()  # type: ignore[attr-defined]
        stream.close()
        assert b"99 " in rest
        assert rest.endswith(b"data: [DONE]\n\n")
        assert whole.result()[1]["choices"][0]["message"]["content"].endswith("99 ")
        assert front.process.wait(timeout=30) == 0
        assert not alive(engine)


def test_an_idle_front_ends_at_once(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        assert front.stop() == 0
        assert not alive(front.engine_pids()[0])


def test_a_second_signal_ends_at_once_and_without_tracebacks(tmp_path: Path) -> None:
    with running_front(tmp_path) as front:
        (engine,) = front.engine_pids()
        streams = [open_stream(front, "slow 100000") for _ in range(3)]
        os.kill(front.pid, signal.SIGINT)
        until(lambda: "finishing 3 requests" in front.output(), "draining")
        os.kill(front.pid, signal.SIGINT)
        assert front.process.wait(timeout=30) == 0
        until(lambda: not alive(engine), "the engine's end")
        for stream in streams:
            stream.close()
        told = front.output().partition("finishing 3 requests")[2]
        for one in ("Traceback", "destroyed", "never retrieved", "Exception"):
            assert one not in told, told


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_engines_work(front: Front, path: str, stream: bool) -> None:
    before = stats(front)
    body = said("slow 100000", max_tokens=1, stream=stream)
    body |= {"input" if path.endswith("responses") else "prompt": "slow 100000"}
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", front.port, timeout=60)
    ) as connection:
        connection.request("POST", path, json.dumps(body))
        until(lambda: stats(front)["running"] == 1, "the reply")
    until(lambda: stats(front)["running"] == 0, "the reply's end")
    assert stats(front)["cut_off"] == before["cut_off"] + 1
    assert front.request(CHAT, said("say hi"))[0] == 200


def test_the_line_of_a_client_that_left_says_how_much_of_its_reply_had_come(
    tmp_path: Path,
) -> None:
    with running_front(tmp_path) as front:
        stream = open_stream(front, "slow 100000")
        taken = b""
        while taken.count(b'"content"') < 20:
            taken += stream.stream.read1()  # type: ignore[attr-defined]
        stream.close()
        until(lambda: "(the client left)" in front.output(), "the line")
        (line,) = [one for one in front.output().splitlines() if "(the client left)" in one]
        assert int(line.partition("generated=")[2].split()[0]) >= 20
        counted = front.request("/metrics")[1]["text"].partition('kind="completion"} ')[2]
        assert float(counted.split()[0]) >= 20


def test_fifty_streams_at_once_all_arrive_whole(front: Front) -> None:
    started = threading.Barrier(50)

    def one(number: int) -> str:
        with openai.OpenAI(base_url=f"{front.url}/v1", api_key="x", max_retries=0) as client:
            started.wait(timeout=60)
            messages: list[Any] = [{"role": "user", "content": f"say {number} " + "x " * 200}]
            chunks = client.chat.completions.create(model="m", messages=messages, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(50) as pool:
        got = list(pool.map(one, range(50)))
    assert got == [f"{number} " + "x " * 200 for number in range(50)]


def test_on_demand_the_engine_is_started_by_a_request_and_stopped_when_idle(
    tmp_path: Path,
) -> None:
    with running_front(tmp_path, "--unload-after", "0.5") as front:
        assert front.request("/health") == (200, {"status": "ok", "engine": "unloaded"})
        assert front.request("/v1/pion/stats") == (200, {"pion": "unloaded"})
        assert front.request("/v1/models")[0] == 200
        assert front.request("/v1/pion/supervisor")[1] == {
            "loaded": False,
            "pid": None,
            "loads": 0,
            "unloads": 0,
            "in_flight": 0,
        }
        assert front.request(CHAT, said("say hi"))[0] == 200
        (engine,) = front.engine_pids()
        until(lambda: not alive(engine), "the engine's end")
        until(lambda: front.request("/v1/pion/supervisor")[1]["unloads"] == 1, "the count")
        assert front.request(CHAT, said("say hi"))[0] == 200
        status = front.request("/v1/pion/supervisor")[1]
        assert (status["loads"], status["loaded"]) == (2, True)
        assert status["pid"] == front.engine_pids()[-1] != engine


def test_a_reply_that_lasts_longer_than_the_idle_time_is_not_cut(tmp_path: Path) -> None:
    with running_front(tmp_path, "--unload-after", "0.2") as front:
        status, body = front.request(CHAT, said("slow 50"))
        assert status == 200
        assert body["choices"][0]["message"]["content"].endswith("49 ")


def test_requests_that_come_while_an_engine_starts_share_it(tmp_path: Path) -> None:
    flags = ("--unload-after", "30", "--load-seconds", "1")
    with running_front(tmp_path, *flags) as front, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(front.request, CHAT, said(f"say {n}")) for n in range(8)]
        assert {one.result()[0] for one in asked} == {200}
        assert len(front.engine_pids()) == 1


def test_a_front_whose_engine_does_not_come_up_exits_1(tmp_path: Path) -> None:
    with running_front(tmp_path, "--fail-to-start", "7", healthy=False) as front:
        assert front.process.wait(timeout=60) == 1
        assert "ended with code 7 before it was ready" in front.output()


def test_on_demand_a_failed_start_is_a_502_that_says_so(tmp_path: Path) -> None:
    flags = ("--fail-to-start", "7", "--unload-after", "9")
    with running_front(tmp_path, *flags) as front:
        status, body = front.request(CHAT, said("say hi"))
        assert status == 502
        assert "code 7" in body["error"]["message"]
        assert front.stop() == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--prefill-step-size", "0"), "--prefill-step-size must be at least 1"),
        (("--prompt-cache-bytes", "lots"), "'lots' is no size"),
    ],
)
@pytest.mark.parametrize("unload", [(), ("--unload-after", "60")])
def test_flags_that_the_engine_refuses_end_serve_at_its_start(
    tmp_path: Path, unload: tuple[str, ...], flags: tuple[str, ...], told: str
) -> None:
    pytest.importorskip("mlx_lm")
    folder = tmp_path / "model"
    folder.mkdir()
    named = ("--model", str(folder), *flags)
    said = refused_at_start(tmp_path, "pion_vllm_mlx.serve.engine_mlx_lm", *unload, *named)
    assert told in said
    assert "refuses the flags that serve was started with" in said
    assert "engine ready" not in said and "Traceback" not in said
