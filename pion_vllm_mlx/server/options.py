"""The server's command line: every flag of the protocol, understood, accepted or refused."""

from __future__ import annotations

import difflib
import ipaddress
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pion_vllm_mlx.config import AFFINITY_OFFSET, EmbeddedDefaults, ServerEnvironment, as_utf8
from pion_vllm_mlx.errors import ConfigError
from pion_vllm_mlx.server.attention.cache import AttentionSettings
from pion_vllm_mlx.server.attention.placement import HOST
from pion_vllm_mlx.server.attention.resident import DTYPES
from pion_vllm_mlx.server.log_format import FORMATS as LOG_FORMATS
from pion_vllm_mlx.server.memory_limit import limit, size
from pion_vllm_mlx.server.session import ServerConfig, TlsConfig
from pion_vllm_mlx.server.tenants import parse_tenant, tenant_table


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and low <= int(text) <= high):
            raise ValueError(f"'{text}' is not a number of {low} to {high}")
        return int(text)

    return parse


def _quota(text: str) -> tuple[str, int]:
    name, equals, amount = text.partition("=")
    if not equals or size(amount) < 1:
        raise ValueError(f"'{text}' is not NAME=BYTES")
    return name, size(amount)


def _address(text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(text))
    except ValueError:
        raise ValueError(f"'{text}' is not a valid IPv4 address") from None


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"'{text}' is not one of {', '.join(allowed)}")
        return text

    return parse


def _switch(text: str) -> bool:
    return _choice("on", "off")(text) == "on"


def _policy(text: str) -> str:
    if text in _EVICTING:
        raise ValueError(
            f"'{text}' is not supported, only noeviction is: plain keys are durable and lead to "
            "prefixes, so none is evicted; prefixes leave by --disk-budget and --max-sessions"
        )
    return _choice("noeviction")(text)


def _tls(fields: dict[str, Any]) -> TlsConfig | None:
    """The TLS flags taken out of ``fields``. Raises ConfigError unless they belong together."""
    port = fields.pop("tls_port", 0)
    cert, key, ca = (fields.pop(name, None) for name in ("tls_cert", "tls_key", "tls_ca"))
    if not port:
        if cert or key or ca:
            raise ConfigError("--tls-cert-file, --tls-key-file, --tls-ca-cert-file need --tls-port")
        return None
    if cert is None or key is None:
        raise ConfigError("--tls-port needs --tls-cert-file and --tls-key-file")
    return TlsConfig(port, cert, key, ca)


def _attention(fields: dict[str, Any]) -> AttentionSettings:
    """The flags of attention taken out of ``fields``."""
    half = fields.pop("attend_fp16", False)
    return AttentionSettings(
        budget=fields.pop("attend_budget", 0),
        dtype=fields.pop("attend_dtype", "fp16" if half else "fp32"),
        device=fields.pop("attend_device", "metal" if half else HOST),
        window=fields.pop("attend_window", 0),
    )


def _password_file(text: str) -> str:
    try:
        content = Path(text).read_text(encoding="utf-8").removesuffix("\n")
    except UnicodeDecodeError:
        raise ValueError(f"password file {text} is not UTF-8 text") from None
    if not content:
        raise ValueError(f"password file {text} is empty")
    return content


@dataclass(frozen=True)
class Flag:
    """A flag: its config field ('' = accepted, no effect), its parser (None = no value).

    ``many``: it may be given several times; the field is a list.
    """

    field: str = ""
    parse: Callable[[str], Any] | None = None
    many: bool = False
    value: Any = True
    help: str = ""
    metavar: str = ""


def _text(text: str) -> str:
    return text


def _password(text: str) -> str:
    if not text:
        raise ValueError("an empty password would leave the server open")
    return as_utf8(text, "a password")


_FLAGS: dict[str, Flag] = {
    "--port": Flag("port", _number(0, 65533), help="RESP port (default 1974, 0: any)", metavar="N"),
    "--workers": Flag("workers", _number(1, 256), help="worker processes (1)", metavar="N"),
    "--independent-workers": Flag("independent", help="needed with more than one worker"),
    "--kvcache": Flag("kvcache", help="serve KV.PREFIX.*, V.* and the attention commands"),
    "--dir": Flag("folder", Path, help="data folder (default: the current one)", metavar="PATH"),
    "--bind": Flag("bind", _address, help="IPv4 address to listen on", metavar="ADDR"),
    "--unixsocket": Flag("unixsocket", Path, help="also listen on this socket", metavar="PATH"),
    "--requirepass": Flag("password", _password, help="password of the server", metavar="PW"),
    "--requirepass-file": Flag("password", _password_file, help="file with it", metavar="PATH"),
    "--tenant": Flag(
        "tenants",
        parse_tenant,
        many=True,
        help="a tenant that sees only its own names",
        metavar="NAME=PW",
    ),
    "--tenant-quota": Flag(
        "quotas",
        _quota,
        many=True,
        help="bytes that a tenant may store, and keep for attention in memory; shared rows count "
        "for each prefix",
        metavar="NAME=BYTES",
    ),
    "--ns-prefix": Flag("ns_prefix", str.encode, help="namespaces start with this", metavar="S"),
    "--no-wal": Flag("wal", value=False, help="no logs: only SAVE keeps anything"),
    "--wal-size": Flag(
        "wal_size_mb",
        _number(1, 1 << 20),
        help="MB of a log before a SAVE; without a quiet moment up to four times that",
        metavar="MB",
    ),
    "--wal-max-segments": Flag("", _number(0, 1 << 31)),
    "--wal-full-policy": Flag("", _choice("refuse")),
    "--appendfsync": Flag(
        "appendfsync",
        _choice("always", "everysec", "no"),
        help="what a power cut may take: nothing, or what came since the last flush, "
        "with the prefix it belongs to",
        metavar="always|everysec|no",
    ),
    "--max-sessions": Flag(
        "max_sessions", _number(2, 1 << 24), help="sessions kept (256)", metavar="N"
    ),
    "--disk-budget": Flag(
        "disk_budget",
        size,
        help="bytes that the data folder may take, logs included (0: any); leaves half as much, "
        "5 GiB at most, of the disk free",
        metavar="BYTES",
    ),
    "--share-equal": Flag(
        "share_equal", _switch, help="store equal rows of a tenant once (on)", metavar="on|off"
    ),
    "--repair": Flag("repair", help="salvage damaged state files"),
    "--ephemeral": Flag("ephemeral", help="keep nothing past this process"),
    "--stall-timeout": Flag(
        "stall_seconds",
        _number(1, 86_400),
        help="close after half a command and so long a silence (30)",
        metavar="SECONDS",
    ),
    "--metrics-port": Flag(
        "metrics_port", _number(1, 65535), help="Prometheus text on /metrics", metavar="N"
    ),
    "--metrics-bind": Flag(
        "metrics_bind", _address, help="where it listens (127.0.0.1)", metavar="ADDR"
    ),
    "--log-format": Flag(
        "log_format", _choice(*LOG_FORMATS), help="how log lines look", metavar="text|json"
    ),
    "--timeout": Flag(
        "idle_seconds",
        _number(0, 31_536_000),
        help="close clients that are silent for so long (0: never)",
        metavar="SECONDS",
    ),
    "--maxclients": Flag(
        "max_connections", _number(1, 1 << 20), help="connections at once (10000)", metavar="N"
    ),
    "--output-timeout": Flag(
        "output_seconds",
        _number(1, 86_400),
        help="close when nothing of a reply is read for so long (60)",
        metavar="SECONDS",
    ),
    "--client-output-limit": Flag(
        "output_limit", size, help="unread bytes that close a client, 0: any", metavar="BYTES"
    ),
    "--maxmemory": Flag(
        "maxmemory", limit, help="refuse what needs more memory, 0: none", metavar="BYTES|N%"
    ),
    "--maxmemory-policy": Flag("", _policy, help="noeviction", metavar="P"),
    "--attend-budget": Flag(
        "attend_budget", size, help="bytes of attention K/V in memory, 0: none", metavar="BYTES"
    ),
    "--attend-dtype": Flag(
        "attend_dtype",
        _choice(*DTYPES),
        help="how they are kept (fp32)",
        metavar="|".join(DTYPES),
    ),
    "--fa-window": Flag(
        "attend_window",
        _number(0, (1 << 32) - 1),
        help="prefix tokens that attention sees, 0: all",
        metavar="W",
    ),
    "--metal-attention": Flag("attend_device", value="metal", help="attention on the GPU"),
    "--metal-attention-fp16": Flag("attend_fp16", help="the same, K/V kept as fp16"),
    "--cuda-attention": Flag("attend_device", value="cuda", help="attention on the GPU"),
    "--tls-port": Flag("tls_port", _number(0, 65535), help="RESP over TLS", metavar="N"),
    "--tls-cert-file": Flag("tls_cert", Path, help="certificate of the server", metavar="PATH"),
    "--tls-key-file": Flag("tls_key", Path, help="its key", metavar="PATH"),
    "--tls-ca-cert-file": Flag(
        "tls_ca", Path, help="clients need a certificate of this CA", metavar="PATH"
    ),
    "--embedded": Flag("embedded", help="end when the last client has left"),
}
_FLAGS |= {
    name: Flag()
    for name in (
        *("--no-auto-detect", "--no-auto-embed", "--auto-embed", "--nle-embed", "--inference"),
        *("--flare", "--emb-enabled", "--llm-enabled", "--no-crash-log", "--no-blob-tier"),
        *("--epoll", "--iouring", "--sqpoll", "--xdp", "--huge-pages"),
    )
}
_FLAGS |= {
    name: Flag("", _text)
    for name in (
        *("--moe-cache", "--moe-cache-mib", "--crash-log", "--status-file", "--rss-warn-pct"),
        *("--xdp-iface", "--io-threads", "--blob-threshold", "--lua-time-limit"),
        "--lua-memory-limit",
    )
}
_FLAGS["--profile"] = Flag(
    "profile",
    _choice("kv", "vector", "ai", "full"),
    help="ai: one worker, whatever -w says; the others change nothing",
    metavar="P",
)
_SHORT = {"-p": "--port", "-w": "--workers"}
_NOTICE = ("--inference", "--flare", "--emb-enabled", "--llm-enabled", "--nle-embed")
_LAST_PORT = 65535
#: what redis has beside noeviction.
_EVICTING = tuple(
    f"{keys}-{order}" for keys in ("allkeys", "volatile") for order in ("lru", "lfu", "random")
) + ("volatile-ttl",)


class Option(NamedTuple):
    """A flag as people are told of it; without ``help`` it is accepted and has no effect."""

    name: str
    short: str
    metavar: str
    help: str


def options() -> list[Option]:
    """Every flag, in the order of the table."""
    short = {long: name for name, long in _SHORT.items()}
    return [
        Option(name, short.get(name, ""), flag.metavar, flag.help) for name, flag in _FLAGS.items()
    ]


def usage() -> str:
    """The text of --help."""
    lines = ["usage: pion-server [options]", ""]
    for name, short, metavar, text in options():
        if text:
            names = f"{short}, {name}" if short else name
            lines.append(f"  {names} {metavar}".ljust(44) + text)
    return "\n".join(lines)


def _refusal(name: str) -> str:
    if name in _FLAGS:
        return f"{name} takes no value"
    if name.startswith("--cluster"):
        return f"{name}: clusters are not supported; run one server per host"
    close = difflib.get_close_matches(name, list(_FLAGS), n=1)
    hint = f", did you mean {close[0]}" if close else ""
    return f"unknown flag {name}{hint}"


def _values(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Config fields given by flags, and notices to print. Raises ConfigError."""
    fields: dict[str, Any] = {}
    notices = []
    words = iter(argv)
    for word in words:
        name, equals, attached = _SHORT.get(word, word).partition("=")
        flag = _FLAGS.get(name)
        if flag is None or (equals and flag.parse is None):
            raise ConfigError(_refusal(name))
        if name in _NOTICE:
            notices.append(f"{name} has no effect in this server")
        if flag.parse is None:
            if flag.field:
                fields[flag.field] = flag.value
            continue
        text = attached if equals else next(words, None)
        if text is None:
            raise ConfigError(f"{name} requires a value")
        try:
            value = flag.parse(text)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{name}: {error}") from None
        if flag.many:
            fields.setdefault(flag.field, []).append(value)
        elif flag.field:
            fields[flag.field] = value
    return fields, notices


def _workers(fields: dict[str, Any]) -> int:
    """How many workers run, after all that caps them. Raises ConfigError."""
    asked, independent = fields.pop("workers", 1), fields.pop("independent", False)
    workers: int = 1 if fields.pop("profile", "") == "ai" else asked
    if workers > 1 and not independent:
        raise ConfigError(
            f"-w {workers} needs --independent-workers: every worker has keys of its own"
        )
    if workers > 1 and fields.get("embedded"):
        raise ConfigError("--embedded runs one worker")
    last = fields.get("port", 1974) + AFFINITY_OFFSET + workers - 1
    if workers > 1 and last > _LAST_PORT:
        raise ConfigError(f"-w {workers}: the workers' own ports would go up to {last}")
    return workers


def parse(argv: Sequence[str], environment: ServerEnvironment) -> tuple[ServerConfig, list[str]]:
    """The configuration and notices of a command line. Raises ConfigError."""
    fields, notices = _values(argv)
    fields["workers"] = _workers(fields)
    if "wal_size_mb" in fields:
        fields["wal_size"] = fields.pop("wal_size_mb") << 20
    fields["tls"] = _tls(fields)
    fields["attention"] = _attention(fields)
    fields["tenants"] = tenant_table(
        fields.get("tenants", ()),
        fields.pop("quotas", ()),
        fields.get("password") or environment.password or "",
    )
    folder = fields.setdefault("folder", Path.cwd())
    fields["folder"] = folder.expanduser().absolute()
    fields.setdefault("password", environment.password or "")
    fields.setdefault("export_dir", environment.export_dir)
    if fields.get("embedded"):
        defaults = EmbeddedDefaults()
        fields.setdefault("max_sessions", defaults.max_sessions)
        fields["budget_follows_disk"] = "disk_budget" not in fields
        fields.setdefault("disk_budget", defaults.disk_budget_bytes(folder))
    return ServerConfig(**fields), notices
