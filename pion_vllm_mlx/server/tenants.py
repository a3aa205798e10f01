"""Tenants: who they are, which names are theirs, and what the command table lets them use.

A tenant's connection sees a store of its own. Every argument that the table calls a key
is read as ``name:argument``; a command without the table's ``tenant`` mark is refused,
and so is one whose only form without a key is about the whole server. What an admin
stores under ``name:…`` is that tenant's. Names hold no colon, so no two of them can
begin the same stored name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from pion_vllm_mlx.config import ADMIN_NAME, as_utf8
from pion_vllm_mlx.errors import CommandError, ConfigError, PermissionRefused
from pion_vllm_mlx.server.command import Command
from pion_vllm_mlx.server.inbound import MemoryInbound
from pion_vllm_mlx.wire.resp import Arg

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: lineages of the server's own user lie under ``pps:``: they would be this tenant's.
_TAKEN = (ADMIN_NAME, "pps")


@dataclass(frozen=True)
class Tenant:
    """One tenant. ``quota`` in bytes, 0 for none."""

    name: bytes
    password: str
    quota: int = 0


def parse_tenant(text: str) -> Tenant:
    """A tenant from ``NAME=PASSWORD``. Raises ValueError."""
    name, equals, password = text.partition("=")
    if not equals or not password:
        raise ValueError("invalid --tenant argument: it must be NAME=PASSWORD")
    return Tenant(_checked(name).encode(), as_utf8(password, "a password"))


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name in _TAKEN:
        taken = "' or '".join(_TAKEN)
        raise ValueError(
            "invalid --tenant argument: a name has 1 to 64 letters, digits, '_' or '-' "
            f"and is not '{taken}'"
        )
    return name


def tenant_table(
    tenants: Iterable[Tenant], quotas: Iterable[tuple[str, int]], password: str
) -> dict[bytes, Tenant]:
    """Tenants by name, with their quotas. Raises ConfigError for what does not fit together."""
    table: dict[bytes, Tenant] = {}
    for tenant in tenants:
        if not password:
            raise ConfigError("--tenant requires --requirepass")
        if tenant.password == password:
            raise ConfigError("--tenant: a tenant cannot have the password of the server")
        if tenant.name in table:
            raise ConfigError(f"--tenant: {tenant.name.decode()} is given twice")
        table[tenant.name] = tenant
    for name, quota in quotas:
        known = table.get(name.encode())
        if known is None:
            raise ConfigError(f"--tenant-quota: there is no tenant {name}")
        table[known.name] = replace(known, quota=quota)
    return table


def owner_of(name: bytes, tenants: Collection[bytes]) -> bytes:
    """The tenant whose key, namespace or session a stored name is; empty for the admin's."""
    owner, colon, _ = name.partition(b":")
    return owner if colon and owner in tenants else b""


def check_allowed(tenant: bytes, command: Command | None, name: bytes, count: int) -> None:
    """Raise PermissionRefused unless a tenant may use this form of a command.

    ``count`` words, the name included, are known so far.
    """
    if command is not None and command.tenant:
        # without its key it is about the whole server; with a wrong number of words it is nothing
        if command.keys is None or count > command.keys[0] or not command.accepts(count):
            return
    shown = name[:128].decode("utf-8", "replace").lower()
    raise PermissionRefused(f"command '{shown}' is not allowed for tenant '{tenant.decode()}'")


def own_arguments(tenant: bytes, command: Command, args: list[Arg]) -> list[Arg]:
    """The arguments with each key as it is stored. Raises CommandError for one that is none."""
    if command.keys is None:
        return args
    own = list(args)
    first, last = command.keys
    for at in range(first, len(args) if last < 0 else min(len(args), last + 1), command.key_step):
        key = own[at]
        if isinstance(key, MemoryInbound):
            key = bytes(key.view)
        if not isinstance(key, bytes):
            raise CommandError("argument is too long")
        if not key and not command.keyspace:
            raise CommandError("a namespace or session id has 1 to 65535 bytes")
        own[at] = tenant + b":" + key
    return own


def shown_name(tenant: bytes, name: bytes) -> bytes:
    """A stored name as the connection that asks for it knows it."""
    return name.removeprefix(tenant + b":") if tenant else name
