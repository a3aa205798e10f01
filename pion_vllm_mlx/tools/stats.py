"""``pion-vllm-mlx stats``: what a running server did and holds, once or again and again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence

from pion_vllm_mlx.cache.connection import RespConnection, info_fields
from pion_vllm_mlx.errors import GreetingRefused, PermissionRefused, StoreUnavailable
from pion_vllm_mlx.tools.store_access import (
    Access,
    add_url,
    duration_text,
    seconds,
    size_text,
    store,
)

Numbers = Mapping[str, str]
ALONE = "stats_of_one_worker_because"
"""The name under which stands why only one worker of several could be asked."""
DOWN = "no_answer_of_worker_"
"""Before a worker's number the name under which stands why it did not answer."""

_OWN = (
    "kvprefix_", "registered_prefixes", "total_prefix_tokens", "vstore_", "disk_", "used_memory",
    "memory_store_bytes", "connected_clients", "total_co", "attend_bytes", "in_flight_bytes",
    "housekeeping_errors",
)  # fmt: skip
_OF_ONE = ("worker_id", "worker_process_id", "affinity_port")
_CLEAR = "\x1b[H\x1b[2J"


def main(arguments: Sequence[str]) -> int:
    """Print the report; with ``--watch`` until it is interrupted, whoever restarts the server."""
    options = _parser().parse_args(arguments)
    watching = _Watching(options)
    while not watching.over:
        try:
            with store(options, start=False) as access:
                watching.report(access)
        except StoreUnavailable as error:
            watching.wait(error)
    return 0


class _Watching:
    """The reports so far; a server that had answered and does not any more is waited for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._before: Numbers = {}
        self._printed = 0
        self._waiting = False

    @property
    def over(self) -> bool:
        """Whether everything is printed that was asked for."""
        once = self._options.watch is None
        return bool(self._printed) and (once or self._printed == self._options.count)

    def report(self, access: Access) -> None:
        """Print reports to the last one. Raises what the connection raises."""
        while not self.over:
            now = read(access)
            if self._waiting:
                self._waiting = False
                print(f"{access.url} answers again", file=sys.stderr, flush=True)
            print(_text(self._options, access, now, self._before), flush=True)
            self._before = now
            self._printed += 1
            if not self.over:
                time.sleep(self._options.watch)

    def wait(self, error: StoreUnavailable) -> None:
        """Let some time pass; says once why. Raises the error where waiting does not help."""
        if not self._printed or isinstance(error.__cause__ or error, GreetingRefused):
            raise error
        if not self._waiting:
            print(f"waiting for the server: {error}", file=sys.stderr, flush=True)
        self._waiting = True
        time.sleep(self._options.watch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pion-vllm-mlx stats", description="What a running server did and holds."
    )
    add_url(parser)
    parser.add_argument(
        "--watch",
        type=seconds,
        nargs="?",
        const=2.0,
        metavar="SECONDS",
        help="print again every so many seconds (2), with rates",
    )
    parser.add_argument("--count", type=_count, metavar="N", help="stop after N reports")
    parser.add_argument("--json", action="store_true", help="the numbers as one JSON object a line")
    return parser


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of reports, 1 or more")
    return int(text)


def read(access: Access) -> Numbers:
    """INFO and KV.PREFIX.INFO as one mapping; names are unique over both.

    A server without ``--kvcache`` has the first alone. Raises what the connection raises.
    """
    endpoint = access.endpoint
    numbers = _of_one(endpoint.connection())
    if _number(numbers, "workers") < 2:
        return numbers
    try:
        doors = [endpoint.door_of(worker) for worker in range(endpoint.workers())]
    except StoreUnavailable as error:
        return {**numbers, ALONE: str(error)}
    found, silent = [], {}
    for worker, door in enumerate(doors):
        try:
            found.append(door.through(_of_one))
        except StoreUnavailable as error:
            silent[f"{DOWN}{worker}"] = str(error)
    if not found:
        return {**numbers, ALONE: next(iter(silent.values()))}
    return {**added_up(found), **silent}


def added_up(workers: Sequence[Numbers]) -> dict[str, str]:
    """The numbers of a server from those of its workers: what each has of its own is added."""
    total = {name: value for numbers in workers for name, value in numbers.items()}
    for name in total:
        values = [numbers[name] for numbers in workers if name in numbers]
        if name == "db0":
            keys = sum(int(value.partition(",")[0].removeprefix("keys=")) for value in values)
            total[name] = f"keys={keys}"
        elif name.startswith("prefill_seconds_"):
            total[name] = f"{sum(map(float, values)):.6f}"
        elif name.startswith(_OWN) or name.endswith("wal_bytes"):
            total[name] = str(sum(int(value) for value in values if value.isdigit()))
    for name in _OF_ONE:
        total.pop(name, None)
    return {**total, "stats_scope": "server"}


def _of_one(connection: RespConnection) -> dict[str, str]:
    """Raises PermissionRefused for a tenant, who is told next to nothing by INFO."""
    numbers = dict(info_fields(connection.command("INFO")))
    held = connection.pipeline([("KV.PREFIX.INFO",)])[0]
    if isinstance(held, PermissionRefused):
        raise held
    if not isinstance(held, Exception):
        numbers.update(info_fields(held))
    return numbers


def _text(options: argparse.Namespace, access: Access, now: Numbers, before: Numbers) -> str:
    if options.json:
        return json.dumps(now)
    report = "\n".join(report_lines(access.url, now, before))
    if options.watch is None:
        return report
    return _CLEAR + report if sys.stdout.isatty() else report + "\n"


def report_lines(url: str, now: Numbers, before: Numbers) -> list[str]:
    """The report; ``before`` adds rates where it is from the same process."""
    if before.get("process_id") != now.get("process_id"):
        before = {}
    seconds = _number(now, "uptime_in_seconds") - _number(before, "uptime_in_seconds")

    def rate(name: str) -> str:
        if not before or seconds <= 0:
            return ""
        return f" ({(_number(now, name) - _number(before, name)) / seconds:,.0f}/s)"

    hits, misses = _number(now, "kvprefix_hits"), _number(now, "kvprefix_misses")
    share = f", {100 * hits / (hits + misses):.1f} % hits" if hits + misses else ""
    saved = float(now.get("prefill_seconds_avoided", "0"))
    measured = float(now.get("prefill_seconds_avoided_measured", "0"))
    workers = _number(now, "workers")
    silent = {name.removeprefix(DOWN): now[name] for name in now if name.startswith(DOWN)}
    count = f"{workers - len(silent)} of its" if silent else "its"
    which = f", {count} {workers} workers added up" if workers > 1 else ""
    if ALONE in now:
        which = f", worker {now.get('worker_id', '?')} of 0 to {workers - 1} alone ({now[ALONE]})"
    lines = [
        f"pion-server {now.get('pion_version', '?')} at {url}: process "
        f"{now.get('process_id', '?')}, up {duration_text(_number(now, 'uptime_in_seconds'))}"
        f"{which}",
        *(f"  worker {worker} does not answer: {why}" for worker, why in silent.items()),
        f"  lookups   {hits:,} hits, {misses:,} misses{share}{rate('kvprefix_hits')}",
        f"  prefill   {saved:,.1f} s avoided, {measured:,.1f} s of it measured, "
        f"{_number(now, 'kvprefix_tokens_served'):,} tokens",
        f"  fetched   {size_text(_number(now, 'kvprefix_bytes_served'))} of rows "
        "over sockets; mapped files are not counted",
    ]
    if "registered_prefixes" in now:
        lines += _held(now)
    lines += [
        f"  memory    {size_text(_number(now, 'used_memory'))} resident, "
        f"{size_text(_number(now, 'memory_store_bytes'))} in stores that live in memory alone",
        f"  clients   {_number(now, 'connected_clients'):,} connected, "
        f"{_number(now, 'total_commands_processed'):,} commands"
        f"{rate('total_commands_processed')}",
    ]
    errors = _number(now, "housekeeping_errors")
    if errors:
        lines.append(f"  upkeep    ended {errors:,} times by a bug: the server's log has it")
    if now.get("db0"):
        lines.append(f"  keys      {now['db0'].partition(',')[0].removeprefix('keys=')}")
    return lines


def _held(now: Numbers) -> list[str]:
    """What is stored: only a server with --kvcache has it."""
    logs = sum(_number(now, f"{log}wal_bytes") for log in ("", "ssm_", "keyspace_"))
    lines = [
        f"  prefixes  {_number(now, 'registered_prefixes'):,} of "
        f"{_number(now, 'total_prefix_tokens'):,} tokens; sessions "
        f"{_number(now, 'vstore_sessions'):,} of at most {_number(now, 'vstore_max_sessions'):,}",
        f"  stored    {size_text(_number(now, 'vstore_bytes'))} of rows, "
        f"{size_text(_number(now, 'vstore_disk_bytes'))} on disk, {size_text(logs)} in logs",
    ]
    budget = _number(now, "disk_budget_bytes")
    if budget:
        used = _number(now, "disk_used_bytes")
        lines.append(f"  disk      {size_text(used)} of at most {size_text(budget)}")
    evicted, damaged = _number(now, "vstore_evictions"), _number(now, "vstore_damaged")
    if evicted or damaged:
        lines.append(f"  lost      {evicted:,} sessions evicted for room, {damaged:,} damaged")
    if files := _number(now, "start_damaged_files"):
        lines.append(f"  damaged   {files:,} files were set aside at the start: its log says why")
    return lines


def _number(numbers: Numbers, name: str) -> int:
    text = numbers.get(name, "0")
    return int(text) if text.isdigit() else 0
