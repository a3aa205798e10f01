"""What a Redis client says to open, name and close a connection."""

from __future__ import annotations

import time

from pion_vllm_mlx.config import ADMIN_NAME
from pion_vllm_mlx.errors import (
    AuthenticationRequired,
    CommandError,
    UnsupportedProtocol,
    WrongPassword,
)
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import TABLE, Command, Reply, command
from pion_vllm_mlx.server.command_syntax import documented, parse
from pion_vllm_mlx.server.commands.server_info import REDIS_VERSION
from pion_vllm_mlx.server.keyspace.glob import matcher
from pion_vllm_mlx.server.memory_limit import limit
from pion_vllm_mlx.server.session import Client, Context, Server
from pion_vllm_mlx.wire.resp import Arg, Map, Simple, Value

OK = Simple("OK")


@command("PING", -1, "Answers PONG, or the given message.", syntax="[message]", tenant=True)
def ping(context: Context, args: list[Arg]) -> Reply:
    if len(args) > 2:
        raise CommandError("wrong number of arguments for 'ping' command")
    return arguments.word(args[1]) if len(args) == 2 else Simple("PONG")


@command("ECHO", 2, "Answers the given message.", syntax="message", tenant=True)
def echo(context: Context, args: list[Arg]) -> Reply:
    return arguments.word(args[1])


@command("SELECT", 2, "Selects database 0, the only one.", syntax="database", tenant=True)
def select(context: Context, args: list[Arg]) -> Reply:
    if arguments.word(args[1]) != b"0":
        raise CommandError("DB index is out of range")
    return OK


def _authenticate(context: Context, user: bytes, password: bytes) -> None:
    client = context.client
    tenant = context.server.config.identity(user, password)
    if tenant is None:
        raise WrongPassword("invalid username-password pair or user is disabled.")
    if tenant != client.tenant:
        # what somebody else's keys do is not for this one to know
        context.server.keyspace.unwatch(client.watch)
    client.authenticated, client.tenant = True, tenant


@command("AUTH", -2, "Authenticates the connection.", syntax="[user] password", no_auth=True)
def auth(context: Context, args: list[Arg]) -> Reply:
    if len(args) > 3:
        raise CommandError("wrong number of arguments for 'auth' command")
    if not context.server.config.password:
        raise CommandError(
            "AUTH <password> called without any password configured for the default user. "
            "Are you sure your configuration is correct?"
        )
    user = arguments.word(args[1]) if len(args) == 3 else b""
    _authenticate(context, user, arguments.word(args[-1]))
    return OK


@command(
    "HELLO",
    -1,
    "Selects the protocol version; may authenticate.",
    syntax="[proto [AUTH user password] [SETNAME name]]",
    no_auth=True,
)
def hello(context: Context, args: list[Arg]) -> Reply:
    client = context.client
    proto = client.proto
    if len(args) > 1:
        version = arguments.word(args[1])
        if version not in (b"2", b"3"):
            raise UnsupportedProtocol("unsupported protocol version")
        proto = int(version)
    given = arguments.options(args[2:], {"AUTH": 2, "SETNAME": 1}, "HELLO")
    name = client.name
    if "SETNAME" in given:
        name = _printable(arguments.word(given["SETNAME"][0]))
    if "AUTH" in given:
        user, password = (arguments.word(value) for value in given["AUTH"])
        # without passwords there is nobody but the server's own user: no tenant's name opens it
        if context.server.config.password or user not in (b"", ADMIN_NAME.encode()):
            _authenticate(context, user, password)
    if context.server.config.password and not client.authenticated:
        raise AuthenticationRequired(
            "HELLO must be called with the client already authenticated, otherwise the "
            "HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client "
            "and select the RESP protocol version at the same time"
        )
    client.name = name
    client.proto = proto
    return Map(
        [
            ("server", "pion"),
            ("version", REDIS_VERSION),
            ("proto", proto),
            ("id", client.client_id),
            ("mode", "standalone"),
            ("role", "master"),
            ("modules", []),
        ]
    )


#: fields of CLIENT INFO that clients read as numbers, and that have no meaning here.
_UNUSED_FIELDS = "db sub psub multi qbuf qbuf-free argv-mem obl oll omem tot-mem".split()


def _describe(client: Client) -> str:
    now = time.monotonic()
    fields = {
        "id": client.client_id,
        "addr": client.address,
        "name": client.name.decode(),
        "age": int(now - client.connected),
        "idle": int(now - client.active),
        "flags": "N",
        **dict.fromkeys(_UNUSED_FIELDS, 0),
        "events": "r",
        "cmd": client.last_command,
        "user": client.tenant.decode() or ADMIN_NAME,
        "resp": client.proto,
        "lib-name": client.lib_name.decode(),
        "lib-ver": client.lib_ver.decode(),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _printable(name: bytes) -> bytes:
    """A name that cannot break the lines of CLIENT LIST. Raises CommandError."""
    if any(byte < 33 or byte > 126 for byte in name):
        raise CommandError("Client names cannot contain spaces or special characters.")
    return name


@command(
    "CLIENT",
    -2,
    "Names and lists connections.",
    syntax="(ID|GETNAME|SETNAME name|SETINFO (LIB-NAME|LIB-VER) text|INFO|LIST|NO-EVICT "
    "(ON|OFF)|NO-TOUCH (ON|OFF))",
    tenant=True,
)
def client(context: Context, args: list[Arg]) -> Reply:
    me = context.client
    words = [arguments.word(arg) for arg in args[1:]]
    match words[0].upper(), words[1:]:
        case b"ID", []:
            return me.client_id
        case b"GETNAME", []:
            return me.name or None
        case b"SETNAME", [name]:
            me.name = _printable(name)
            return OK
        case b"SETINFO", [field, value] if field.upper() == b"LIB-NAME":
            me.lib_name = _printable(value)
            return OK
        case b"SETINFO", [field, value] if field.upper() == b"LIB-VER":
            me.lib_ver = _printable(value)
            return OK
        case b"INFO", []:
            return _describe(me)
        case b"LIST", []:
            known = context.server.clients.values()
            mine = [one for one in known if not me.tenant or one.tenant == me.tenant]
            return "".join(_describe(one) + "\n" for one in mine)
        case ((b"NO-EVICT" | b"NO-TOUCH"), [switch]) if switch.upper() in (b"ON", b"OFF"):
            return OK
    shown = words[0][:64].decode("utf-8", "replace")
    raise CommandError(f"unknown subcommand or wrong number of arguments for '{shown}'")


def _info(entry: Command) -> Value:
    flags = [Simple("write" if entry.write else "readonly")]
    first, last = entry.keys or (0, 0)
    step = entry.key_step if entry.keys else 0
    return [entry.name.lower(), entry.arity, flags, first, last, step]


def _doc(entry: Command) -> Map:
    pairs: list[tuple[Value, Value]] = [
        ("summary", entry.summary),
        ("since", entry.since),
        ("group", entry.group.lower()),
    ]
    if entry.extension:
        pairs.append(("doc_flags", [Simple("extension")]))
    if entry.syntax:
        pairs.append(("arguments", documented(parse(entry.syntax), entry.extensions)))
    return Map(pairs)


@command(
    "COMMAND",
    -1,
    "The command table: how many, their manual, or arity, flags and keys; an empty array without "
    "a word.",
    syntax="[COUNT|DOCS [name...]|INFO [name...]]",
)
def command_table(context: Context, args: list[Arg]) -> Reply:
    words = [arguments.word(arg).upper() for arg in args[1:]]
    if not words:
        return []
    names = words[1:] or list(TABLE)
    match words[0], words[1:]:
        case b"COUNT", []:
            return len(TABLE)
        case b"DOCS", _:
            known = [TABLE[name] for name in dict.fromkeys(names) if name in TABLE]
            return Map([(entry.name.lower(), _doc(entry)) for entry in known])
        case b"INFO", _:
            return [_info(TABLE[n]) if n in TABLE else None for n in names]
    raise CommandError(f"unknown subcommand '{words[0][:64].decode('utf-8', 'replace')}'")


@command(
    "CONFIG",
    -2,
    "Reads settings; sets the maxmemory of this worker, until it ends.",
    syntax="(GET pattern...|SET parameter text)",
)
def config(context: Context, args: list[Arg]) -> Reply:
    words = [arguments.word(arg) for arg in args[1:]]
    match words[0].upper(), words[1:]:
        case b"SET", [name, text] if name.lower() == b"maxmemory":
            return _set_maxmemory(context.server, text)
        case b"SET", _:
            raise CommandError("CONFIG SET is not supported for this parameter")
        case b"GET", [_, *_]:
            return _settings(context.server, words[1:])
    shown = words[0][:64].decode("utf-8", "replace")
    raise CommandError(f"unknown subcommand or wrong number of arguments for '{shown}'")


def _set_maxmemory(server: Server, text: bytes) -> Simple:
    try:
        server.memory_limit.maxmemory = limit(text.decode("utf-8", "replace"))
    except ValueError as error:
        raise CommandError(f"CONFIG SET maxmemory: {error}") from None
    return OK


def _settings(server: Server, patterns: list[bytes]) -> Map:
    """The settings whose names match one of the patterns."""
    known = {
        "appendfsync": server.config.appendfsync,
        "appendonly": "yes" if server.config.wal else "no",
        "dir": str(server.config.folder),
        "maxclients": str(server.config.max_connections),
        "maxmemory": str(server.memory_limit.maxmemory),
        "maxmemory-policy": server.memory_limit.policy,
        "port": str(server.port),
        "save": "",
        "timeout": str(int(server.config.idle_seconds)),
    }
    matchers = [matcher(pattern.lower()) for pattern in patterns]
    return Map(
        [
            (name, value)
            for name, value in known.items()
            if any(matches(name.encode()) for matches in matchers)
        ]
    )


@command("QUIT", 1, "Closes the connection.", no_auth=True, at_once=True)
def quit_connection(context: Context, args: list[Arg]) -> Reply:
    context.client.close_after_reply = True
    return OK


@command("RESET", 1, "Puts the connection back to its first state.", no_auth=True, at_once=True)
def reset(context: Context, args: list[Arg]) -> Reply:
    me = context.client
    me.proto, me.name, me.authenticated, me.transaction = 2, b"", False, None
    me.tenant = b""
    context.server.keyspace.unwatch(me.watch)
    return Simple("RESET")


@command("SHUTDOWN", -1, "Stops the server; everything acknowledged stays.", syntax="[NOSAVE|SAVE]")
def shutdown(context: Context, args: list[Arg]) -> Reply:
    arguments.options(args[1:], {"NOSAVE": 0, "SAVE": 0}, "SHUTDOWN")
    context.server.stopping.set()
    # as in Redis the end of the connection is the answer
    context.server.connections[context.client.client_id].close()
    return OK


@command("SAVE", 1, "Snapshots the keys; brings everything acknowledged to stable storage.")
async def save(context: Context, args: list[Arg]) -> Reply:
    await context.server.keyspace.save()
    await context.store.flush()
    context.server.last_save = int(time.time())
    return OK


@command("BGSAVE", -1, "As SAVE.", syntax="[SCHEDULE]")
async def bgsave(context: Context, args: list[Arg]) -> Reply:
    arguments.options(args[1:], {"SCHEDULE": 0}, "BGSAVE")
    await save(context, args)
    return Simple("Background saving started")


@command("LASTSAVE", 1, "Unix time of the last SAVE.")
def lastsave(context: Context, args: list[Arg]) -> Reply:
    return context.server.last_save
