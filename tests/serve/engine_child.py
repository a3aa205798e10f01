"""An engine process of one test, started and asked as the front does, ended by its process id."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.serve.front import ROOT

Json = dict[str, Any]
KEY = "the key of the test"
#: the real model takes minutes for a long prompt beside other work.
ANSWER_SECONDS = 600


@dataclass
class EngineChild:
    """A running engine; it ends when ``lifeline`` is closed."""

    port: int
    model: str
    process: subprocess.Popen[bytes]
    lifeline: int

    @staticmethod
    def started(log: Path, *words: str) -> EngineChild:
        """``python -m words`` once it says that it is ready; what it prints is added to ``log``.

        Raises RuntimeError, with what it has printed, where it ends before.
        """
        ready, ready_write = os.pipe()
        lifeline_read, lifeline = os.pipe()
        links = ["--ready-fd", str(ready_write), "--lifeline-fd", str(lifeline_read)]
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        env |= {"PION_ENGINE_KEY": KEY, "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", *words, *links],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(ready_write, lifeline_read),
            )
        os.close(ready_write)
        os.close(lifeline_read)
        with os.fdopen(ready, "rb") as pipe:
            line = pipe.readline()
        child = EngineChild(0, "", process, lifeline)
        if not line:
            child.end(signal.SIGKILL)
            raise RuntimeError(f"the engine did not start:\n{log.read_text(errors='replace')}")
        told = json.loads(line)
        child.port, child.model = int(told["port"]), str(told["model"])
        return child

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal it, unless it has ended, and wait; the exit code. May be called again."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return code

    def open(self, path: str, body: object = None, key: str = KEY) -> Any:
        """The open answer of one request. Raises urllib's HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        return urllib.request.urlopen(asked, timeout=ANSWER_SECONDS)

    def request(self, path: str, body: object = None, key: str = KEY) -> tuple[int, Json]:
        """One request: the status and the JSON."""
        try:
            with self.open(path, body, key) as answer:
                return answer.status, json.loads(answer.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")
