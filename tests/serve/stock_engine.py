"""mlx-lm's own server as an engine: the smallest adapter to the engine protocol.

It has no store, so it answers no ``/v1/pion/stats``; it counts tokens by its own tokenizer.
"""

from __future__ import annotations

import json
import sys
from http.server import ThreadingHTTPServer
from typing import Any

from mlx_lm import server

from pion_vllm_mlx.serve import engine_child
from pion_vllm_mlx.serve.pion_flags import take_pion_flags


class Handler(server.APIHandler):
    link: engine_child.EngineLink

    def do_GET(self) -> None:
        if self._authorized():
            super().do_GET()

    def do_POST(self) -> None:
        if not self._authorized():
            return
        if self.path == "/v1/pion/count_tokens":
            self._count_tokens()
        else:
            super().do_POST()

    def _authorized(self) -> bool:
        if engine_child.authorized(self.link, self.headers.get("Authorization")):
            return True
        self._set_completion_headers(401)
        self.end_headers()
        return False

    def _count_tokens(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokenizer = self.response_generator.model_provider.tokenizer
        rendered = tokenizer.apply_chat_template(
            body["messages"], tools=body.get("tools"), add_generation_prompt=True
        )
        self._set_completion_headers(200)
        self.end_headers()
        self.wfile.write(json.dumps({"input_tokens": len(rendered)}).encode())

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Listening(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


def run(host: str, port: int, response_generator: Any) -> None:
    httpd = Listening(
        ("127.0.0.1", 0), lambda *args, **kwargs: Handler(response_generator, *args, **kwargs)
    )
    engine_child.report_ready(Handler.link, httpd.server_address[1], "tiny")
    httpd.serve_forever()


def main() -> None:
    Handler.link, rest = engine_child.take_link(sys.argv[1:])
    engine_child.watch_lifeline(Handler.link)
    _, rest = take_pion_flags(rest)
    server._run_http_server = run
    sys.argv[1:] = rest
    server.main()


if __name__ == "__main__":
    main()
