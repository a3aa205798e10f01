"""How the server's log lines look: for people, or one JSON object a line.

A JSON line has ``time`` (UTC, RFC 3339), ``level``, ``logger`` and ``message``, and for an
internal error ``traceback``. The lines of a start (``ready on …``) are part of the protocol
and stay as they are, on standard output; the log goes to standard error.
"""

from __future__ import annotations

import json
import logging
import time

FORMATS = ("text", "json")
_TEXT = "%(asctime)s %(levelname)s %(message)s"


class JsonLines(logging.Formatter):
    """One record as one JSON object, without a line break."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure(kind: str) -> None:
    """Send the log of this process to standard error in one of ``FORMATS``."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if kind == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
