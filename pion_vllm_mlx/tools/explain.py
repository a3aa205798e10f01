"""``pion-vllm-mlx explain NS``: what a store has under a namespace, and what a hit needs.

``explain --request`` and ``--last``, about a request of ``serve``, are in ``explain_request``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from pion_vllm_mlx.cache.completion import CompletionRecord
from pion_vllm_mlx.cache.connection import RespConnection
from pion_vllm_mlx.errors import DamagedData, NewerFormat, StoreUnavailable
from pion_vllm_mlx.tools.store_access import add_url, size_text, store

SHOWN_TOKENS = 8
REQUEST_FLAGS = ("--request", "--last")


def main(arguments: Sequence[str]) -> int:
    """Print the explanation; 0 for a prefix that can be a hit, 1 for any other."""
    if any(word.partition("=")[0] in REQUEST_FLAGS for word in arguments):
        return _of_request(arguments)
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx explain",
        usage="%(prog)s NAMESPACE [flags], or %(prog)s (--request BODY.json | --last) [flags]",
        description="What a store has under a namespace, and why a lookup hits or misses. "
        "Exit code 0: a whole prefix is there; 1: none is.",
        epilog="About a request of serve: --request BODY.json or --last, with --help for more.",
    )
    parser.add_argument("namespace")
    add_url(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    with store(options, start=False) as access:
        name = options.namespace
        found = access.client.ask(name, lambda connection: explanation(connection, name))
    if options.json:
        print(json.dumps(found))
    else:
        print("\n".join(lines(found)))
    return 0 if found["complete"] else 1


def _of_request(arguments: Sequence[str]) -> int:
    from pion_vllm_mlx.tools import explain_request  # needs more than a namespace does

    return explain_request.main(arguments)


def explanation(connection: RespConnection, namespace: str) -> dict[str, Any]:
    """The server's verdict, and what the completion record says.

    ``record`` is None where there is none; ``complete`` says that sides and record are
    there. Rows are not read. Raises what the connection raises.
    """
    answer = connection.command("KV.PREFIX.EXPLAIN", namespace)
    blob = connection.command("SSM.PREFIX.FETCH", namespace, 65535)
    try:
        verdict = json.loads(answer) if isinstance(answer, bytes | str) else None
    except ValueError:
        verdict = None
    if not isinstance(verdict, dict):
        raise StoreUnavailable("the server does not answer KV.PREFIX.EXPLAIN")
    found: dict[str, Any] = {**verdict, "record": None, "record_fault": None}
    if isinstance(blob, bytes):
        try:
            found["record"] = _summary(CompletionRecord.decode(blob))
        except (DamagedData, NewerFormat) as error:
            found["record_fault"] = str(error)
    found["complete"] = verdict.get("verdict") == "hit" and found["record"] is not None
    return found


def _summary(record: CompletionRecord) -> dict[str, Any]:
    classes: Counter[str] = Counter(str(slot.get("class")) for slot in record.slots)
    formats: Counter[str] = Counter(run.format for run in record.runs)
    return {
        "tokens": int(record.ids.size),
        "first_ids": record.ids[:SHOWN_TOKENS].tolist(),
        "last_ids": record.ids[-SHOWN_TOKENS:].tolist(),
        "identity": record.identity,
        "caches": dict(classes),
        "formats": dict(formats),
        "runs": len(record.runs),
        "states": len(record.states),
        "state_bytes": sum(state.length for state in record.states),
        "prefill_ms": record.prefill_ms,
    }


def lines(found: dict[str, Any]) -> list[str]:
    """The explanation for people."""
    out = [f"{found['namespace']}: {_verdict(found)}"]
    if found.get("since"):
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found["since"]))
        out.append(f"  since {moment}")
    for side in ("k", "v"):
        out.append(f"  {side} side   {_side(found.get(side) or {})}")
    record = found["record"]
    if record is None:
        why = found["record_fault"] or "without it the client takes nothing for a hit"
        return [*out, f"  record   no completion record: {why}"]
    caches = ", ".join(f"{count} {name}" for name, count in record["caches"].items())
    formats = ", ".join(f"{count} runs {name}" for name, count in record["formats"].items())
    out += [
        f"  record   complete: {record['tokens']:,} tokens, {caches}",
        f"  rows     {formats or 'none'}",
        f"  states   {record['states']}, {size_text(record['state_bytes'])}",
        f"  prefill  took {record['prefill_ms']:.0f} ms when it was stored",
        f"  ids      {_ids(record)}",
        "  a hit needs these very ids and this key:",
    ]
    return out + [f"    {name}: {_short(value)}" for name, value in record["identity"].items()]


def _verdict(found: dict[str, Any]) -> str:
    """What a lookup answers, and what that is to a client."""
    if found["verdict"] == "hit" and not found["complete"]:
        return (
            "registered, but not a whole prefix: KV.PREFIX.LOOKUP answers HIT "
            f"({found['reason']}), and the client prefills"
        )
    return f"lookup is a {found['verdict']}: {found['reason']}"


def _side(side: dict[str, Any]) -> str:
    if not side.get("present"):
        return "is missing"
    least, most = side.get("rows_least"), side.get("rows_most")
    rows = f"{most} rows" if least == most else f"{least} to {most} rows"
    checked = "verified since the start" if side.get("verified") else "not yet read since the start"
    return f"{side.get('layers')} layers, {rows}, {side.get('format')}, {checked}"


def _ids(record: dict[str, Any]) -> str:
    first = " ".join(map(str, record["first_ids"]))
    if record["tokens"] <= SHOWN_TOKENS:
        return first
    return f"{first} … {' '.join(map(str, record['last_ids']))}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 100 else text[:97] + "..."
