"""The engine's process: started with its two pipes, told to end, and never outliving the front.

The lifeline is a pipe of which the front holds the only writing end: when the front dies, by
SIGKILL too, the engine reads end-of-file.  On the other pipe it says once where it listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pion_vllm_mlx import config
from pion_vllm_mlx.errors import PionError
from pion_vllm_mlx.serve.api_errors import ApiError
from pion_vllm_mlx.serve.engine_child import STOP_SECONDS, WRONG_USE
from pion_vllm_mlx.serve.engine_client import EngineClient

_HEALTH_PAUSE_SECONDS = 0.1
_HEALTH_SECONDS = 30.0
_SILENT_SECONDS = 5.0
_READY_BYTES = 64 << 10
_REFUSES = "refuses the flags that serve was started with; serve's log says which"
_FLAGS = "pion_vllm_mlx.serve.engine_flags"


class EngineFailed(PionError):
    """The engine did not come up."""


@dataclass(frozen=True)
class EngineCommand:
    """How to start an engine: ``python -m module arguments``.

    ``tenant``: whose prefixes it stores; ``model``: what it is called until it says itself.
    ``asked_by_name``: the engine answers only requests for the model by the name that it told,
    none for ``default_model``. ``logprobs``: it can tell log probabilities. ``steers``: it can
    have a model call a tool, and hold a reply to a form.
    """

    module: str
    arguments: tuple[str, ...] = ()
    tenant: str = field(default="", repr=False)
    model: str = "default_model"
    asked_by_name: bool = False
    logprobs: bool = True
    steers: bool = True


class EngineProcess:
    """A running engine. ``client`` talks to it; ``ended`` is set once the process is over."""

    def __init__(
        self, process: asyncio.subprocess.Process, client: EngineClient, lifeline: int
    ) -> None:
        self.process = process
        self.client = client
        self.ended = asyncio.Event()
        self._lifeline = lifeline
        self._waiting = asyncio.create_task(self._wait())

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        return self.process.returncode

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """SIGTERM, and SIGKILL for what is left after ``seconds``."""
        await _end(self.process, seconds)
        await self._waiting

    async def _wait(self) -> None:
        await self.process.wait()
        os.close(self._lifeline)
        self.ended.set()


async def start_engine(command: EngineCommand, seconds: float | None) -> EngineProcess:
    """Start an engine and wait until its ``/health`` is good, at most ``seconds``.

    Raises ``EngineFailed``; nothing of the engine is left then, nor when cancelled.
    """
    key = secrets.token_urlsafe(32)
    async with contextlib.AsyncExitStack() as undo:
        lifeline_read, lifeline = os.pipe()
        undo.callback(os.close, lifeline)
        ready, ready_write = os.pipe()
        undo.callback(os.close, ready)
        try:
            process = await _spawn(command, key, ready_write, lifeline_read)
        finally:
            os.close(lifeline_read)
            os.close(ready_write)
        undo.push_async_callback(_end, process, 0.0)
        try:
            client = await asyncio.wait_for(_until_healthy(process, ready, key), seconds)
            if command.asked_by_name:
                client = replace(client, asked_for=client.model)
        except asyncio.TimeoutError as error:
            raise EngineFailed(f"the engine was not ready within {seconds:g} s") from error
        undo.pop_all()
    os.close(ready)
    return EngineProcess(process, client, lifeline)


async def check_flags(command: EngineCommand) -> None:
    """Ask the engine whether it takes its flags; nothing is loaded.

    Raises ``EngineFailed`` where it refuses them, and has said why.
    """
    process = await _run([_FLAGS, command.module, *command.arguments])
    try:
        code = await process.wait()
    finally:
        await _end(process, 0.0)
    if code == WRONG_USE:
        raise EngineFailed(f"the engine {_REFUSES}")


async def _spawn(
    command: EngineCommand, key: str, ready: int, lifeline: int
) -> asyncio.subprocess.Process:
    shared = config.EngineEnvironment(key, command.tenant).variables()
    words = [command.module, "--ready-fd", str(ready), "--lifeline-fd", str(lifeline)]
    words.append("--front-logs")
    return await _run([*words, *command.arguments], shared, (ready, lifeline))


async def _run(
    words: Sequence[str], shared: Mapping[str, str] | None = None, pass_fds: tuple[int, ...] = ()
) -> asyncio.subprocess.Process:
    """``python -m words`` in a session of its own. Raises ``EngineFailed``."""
    try:
        return await asyncio.create_subprocess_exec(
            *config.module_command(words[0]),
            *words[1:],
            env={**config.module_environment(), **(shared or {})},
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=pass_fds,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineFailed(f"the engine cannot be started: {error}") from error


async def _end(process: asyncio.subprocess.Process, seconds: float) -> None:
    for number, patience in ((signal.SIGTERM, seconds), (signal.SIGKILL, None)):
        if process.returncode is not None:
            return
        if number == signal.SIGTERM and not seconds:
            continue
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(process.wait(), patience)


async def _until_healthy(process: asyncio.subprocess.Process, ready: int, key: str) -> EngineClient:
    ending = asyncio.create_task(process.wait())
    coming = asyncio.create_task(_knock(ready, key))
    try:
        await asyncio.wait({ending, coming}, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        raise EngineFailed(_why_ended(process.returncode))
    finally:
        await cancelled(ending, coming)


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks, and wait until they have ended.

    ``asyncio.wait_for`` loses a cancellation that comes as what it waits for fails (before
    Python 3.12): a task that goes on after an error is asked again.
    """
    while waiting := {task for task in tasks if not task.done()}:
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=_HEALTH_PAUSE_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)


def _why_ended(code: int | None) -> str:
    ended = f"the engine ended with code {code} before it was ready"
    if code == WRONG_USE:
        return f"{ended}: it {_REFUSES}"
    return ended


async def _knock(ready: int, key: str) -> EngineClient:
    async with _line(ready) as said:
        if not said:  # the end of the process is the better explanation, and about to be known
            await asyncio.sleep(_SILENT_SECONDS)
        try:
            told = json.loads(said)
            client = EngineClient(int(told["port"]), key, str(told.get("model") or ""))
        except (ValueError, TypeError, KeyError) as error:
            raise EngineFailed("the engine did not say where it listens") from error
    while True:
        with contextlib.suppress(ApiError, asyncio.TimeoutError):
            if (await asyncio.wait_for(client.get("/health"), _HEALTH_SECONDS)).status == 200:
                return client
        await asyncio.sleep(_HEALTH_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def _line(descriptor: int) -> AsyncIterator[bytes]:
    """The line that the engine writes; the descriptor stays its owner's."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=_READY_BYTES)
    pipe = os.fdopen(os.dup(descriptor), "rb", buffering=0)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        yield await reader.readline()
    finally:
        transport.close()
