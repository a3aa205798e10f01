"""--metrics-port and --log-format: true numbers, in a form that other programs read."""

from __future__ import annotations

import json
import logging
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pion_vllm_mlx.server.log_format import JsonLines
from pion_vllm_mlx.server.main import main
from tests.conftest import RunningServer, free_port_block
from tests.server.wire import Wire

ROW = bytes(16)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose metrics are on its port + 3."""
    one = RunningServer(free_port_block(), tmp_path_factory.mktemp("metrics") / "data")
    try:
        yield one.start("--metrics-port", str(one.port + 3))
    finally:
        one.stop()


def get(server: RunningServer, path: str, method: str = "GET") -> tuple[str, str]:
    """Content type and body of one page."""
    request = urllib.request.Request(f"http://127.0.0.1:{server.port + 3}{path}", method=method)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def numbers(server: RunningServer) -> dict[str, float]:
    """The metrics as Prometheus' own parser reads them."""
    _, text = get(server, "/metrics")
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_metrics_are_the_numbers_of_the_receipt_and_of_the_store(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "secret-name", 4, "fp32", "PREFILL_MS", 1200)
        for side in ("_pk", "_pv"):
            wire.ok("V.STOREBATCH", f"secret-name{side}", 0, 0, 2, ROW * 2)
        for _ in range(3):
            assert wire.ask("KV.PREFIX.LOOKUP", "secret-name") == "HIT"
        assert wire.ask("KV.PREFIX.LOOKUP", "other") == "MISS"
        disk = int(wire.info("KV.PREFIX.INFO")["wal_bytes"])
    found = numbers(server)
    assert found["pion_prefix_hits_total"] == 3 and found["pion_prefix_misses_total"] == 1
    assert found["pion_prefill_avoided_seconds_total"] == 3.6
    assert found["pion_sessions"] == 2 and found["pion_row_bytes"] == 4 * len(ROW)
    assert found["pion_wal_bytes"] == disk > 0
    assert found["pion_shared_bytes_total"] == 0
    assert found["pion_resident_memory_bytes"] > 1 << 20


#: what INFO and KV.PREFIX.INFO tell as numbers, and the metric that has it.
METRIC_OF = {
    "uptime_in_seconds": "uptime_seconds",
    "used_memory": "resident_memory_bytes",
    "used_memory_peak": "resident_memory_peak_bytes",
    "memory_store_bytes": "memory_store_bytes",
    "attend_bytes": "attention_bytes",
    "attend_budget_bytes": "attention_budget_bytes",
    "maxmemory": "memory_limit_bytes",
    "maxmemory_refusing_writes": "memory_limit_refusing",
    "connected_clients": "connected_clients",
    "maxclients": "clients_limit",
    "in_flight_bytes": "in_flight_bytes",
    "keyspace_wal_bytes": "keyspace_wal_bytes",
    "wal_bytes": "wal_bytes",
    "disk_used_bytes": "disk_bytes",
    "disk_budget_bytes": "disk_budget_bytes",
    "start_damaged_files": "start_damaged_files",
    "start_skipped_records": "start_skipped_records",
    "start_cut_bytes": "start_cut_bytes",
    "total_connections_received": "connections_total",
    "total_commands_processed": "commands_total",
    "housekeeping_errors": "housekeeping_errors_total",
    "kvprefix_hits": "prefix_hits_total",
    "kvprefix_misses": "prefix_misses_total",
    "kvprefix_hits_measured": "prefix_hits_measured_total",
    "kvprefix_tokens_served": "prefix_tokens_served_total",
    "kvprefix_bytes_served": "prefix_bytes_served_total",
    "prefill_seconds_avoided": "prefill_avoided_seconds_total",
    "prefill_seconds_avoided_measured": "prefill_avoided_measured_seconds_total",
    "registered_prefixes": "prefixes",
    "total_prefix_tokens": "prefix_tokens",
    "vstore_sessions": "sessions",
    "vstore_max_sessions": "sessions_limit",
    "vstore_total_fetches": "fetches_total",
    "vstore_bytes": "row_bytes",
    "vstore_disk_bytes": "segment_bytes",
    "vstore_copied_bytes": "copied_bytes_total",
    "vstore_shared_bytes": "shared_bytes_total",
    "vstore_evictions": "evictions_total",
    "vstore_damaged": "damaged_total",
    "wal_replayed": "replayed_records",
    "sdpa_warm": "attention_slots",
    "sdpa_cold": "attention_cold_slots",
    "sdpa_demotions": "attention_demotions_total",
    "sdpa_rehydrates": "attention_rehydrates_total",
    "sdpa_bytes": "attention_bytes",
    "sdpa_queries": "attention_queries_total",
    "sdpa_shared_passes": "attention_shared_passes_total",
}
#: numbers that need no metric: addresses and constants, parts and other units of what has one.
NO_METRIC = {
    *("process_id", "tcp_port", "tls_port", "binary_port", "affinity_port", "worker_id"),
    *("worker_process_id", "workers", "loading", "semantic_hits", "semantic_misses", "moe_hits"),
    *("moe_misses", "vector_queries", "kvprefix_prefill_us_saved", "directory_enabled"),
    *("kvprefix_prefill_us_measured", "ssm_wal_bytes", "ssm_wal_replayed", "wal_appended"),
    *("used_memory_anonymous", "directory_entries"),
}
#: what another command or the look at it changes
MOVING = {"uptime_in_seconds", "used_memory", "used_memory_peak", "total_commands_processed"}


def test_every_number_of_info_is_a_metric_of_the_same_value(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "shown", 4, "fp32")
        for side in ("_pk", "_pv"):
            wire.ok("V.STOREBATCH", f"shown{side}", 0, 0, 2, ROW * 2)
        told = {**wire.info("INFO"), **wire.info("KV.PREFIX.INFO")}
        found = numbers(server)
    counted = {name: text for name, text in told.items() if text.replace(".", "", 1).isdigit()}
    assert counted.keys() - NO_METRIC == METRIC_OF.keys()
    for name in METRIC_OF.keys() - MOVING:
        assert found[f"pion_{METRIC_OF[name]}"] == float(counted[name]), name
    assert all(f"pion_{METRIC_OF[name]}" in found for name in MOVING)


def test_the_page_shows_the_receipt_and_no_name(server: RunningServer) -> None:
    with Wire.tcp(server.port) as wire:
        wire.ok("KV.PREFIX.REGISTER", "secret-name", 4, "fp32")
        wire.ok("SET", "secret-key", "x")
        receipt = dict(zip(*[iter(wire.ask("PION.STATS"))] * 2, strict=True))
    kind, page = get(server, "/")
    assert kind.startswith("text/html")
    assert f"<b>{receipt[b'prefill_seconds_avoided'].decode()} s</b>" in page
    assert all(name.decode() in page for name in receipt)
    assert "secret" not in page and "secret" not in get(server, "/metrics")[1]


def test_other_paths_and_methods_are_refused(server: RunningServer) -> None:
    for path, method, code in (("/etc", "GET", 404), ("/metrics", "POST", 405)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, path, method)
        assert refused.value.code == code
        refused.value.close()
    assert get(server, "/metrics", "HEAD")[1] == ""


@pytest.mark.parametrize("sent", [b"", b"\x00" * 100_000, b"GET / HTTP/1.1\r\nX: " + b"x" * 99_999])
def test_nonsense_closes_its_connection_and_nothing_else(
    server: RunningServer, sent: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port + 3), timeout=20) as client:
        try:
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            assert client.recv(100) == b""
        except ConnectionError:
            pass  # closed while it still talked
    assert numbers(server)["pion_uptime_seconds"] >= 0
    assert server.answers() and "Traceback" not in server.output()


def test_metrics_listen_on_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        # with a password the commands listen everywhere; the metrics still do not
        one.start("--requirepass", "x", "--metrics-port", str(one.port + 3))
        assert get(one, "/metrics")[1]
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", one.port + 3), timeout=5)
        one.restart("--metrics-port", str(one.port + 3), "--metrics-bind", "127.0.0.2")
        socket.create_connection(("127.0.0.2", one.port + 3), timeout=5).close()
    finally:
        one.stop()


def test_a_metrics_port_that_is_taken_is_named_by_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port_block()
    with socket.create_server(("127.0.0.1", port + 3)):
        flags = ["-p", str(port), "--dir", str(tmp_path), "--metrics-port", str(port + 3)]
        assert main(flags) == 1
    error = capsys.readouterr().err
    assert error == f"FATAL --metrics-port: 127.0.0.1:{port + 3}: Address already in use\n"


def test_a_missing_prometheus_client_is_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    port = free_port_block()
    flags = ["-p", str(port), "--dir", str(tmp_path), "--metrics-port", str(port + 3)]
    assert main(flags) == 1
    assert "pip install 'pion-vllm-mlx[metrics]'" in capsys.readouterr().err


def test_json_log_lines_are_objects_and_the_ready_line_stays(tmp_path: Path) -> None:
    one = RunningServer(free_port_block(), tmp_path / "data")
    try:
        one.start()
        with Wire.tcp(one.port) as wire:
            wire.ok("KV.PREFIX.REGISTER", "a", 4, "fp32")
        one.kill()
        with (one.dir / "pion.vstore.wal.0").open("ab") as wal:
            wal.write(b"torn")
        one.start("--log-format", "json")
    finally:
        one.stop()
    lines = one.output().splitlines()
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    torn = [entry for entry in objects if "torn end of 4 bytes" in entry["message"]]
    assert len(torn) == 1 and torn[0]["level"] == "warning"
    assert set(torn[0]) == {"time", "level", "logger", "message"}
    assert sum(line.startswith("pion-server ") and "ready on" in line for line in lines) == 2


def test_a_traceback_is_one_field_of_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "what %s", ("now",), sys.exc_info())
    line = JsonLines().format(record)
    assert "\n" not in line
    fields = json.loads(line)
    assert fields["message"] == "what now" and "ValueError: two" in fields["traceback"]


def test_an_unknown_log_format_is_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-p", "0", "--log-format", "xml"]) == 1
    assert "text, json" in capsys.readouterr().err
