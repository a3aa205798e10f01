"""What a command handler gets to see: the server and the client it serves."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pion_vllm_mlx.config import ADMIN_NAME
from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.attention.cache import AttentionCache, AttentionSettings
from pion_vllm_mlx.server.directory import Directory, Known
from pion_vllm_mlx.server.identifiers import ClientIds, RollbackIds
from pion_vllm_mlx.server.inbound import WindowPool
from pion_vllm_mlx.server.keyspace.data import Data
from pion_vllm_mlx.server.keyspace.keyspace import Keyspace, Watch
from pion_vllm_mlx.server.keyspace.view import View
from pion_vllm_mlx.server.ledger import Ledger
from pion_vllm_mlx.server.lineage_order import LineageOrder
from pion_vllm_mlx.server.long_arguments import LongArguments
from pion_vllm_mlx.server.memory import MemoryStores
from pion_vllm_mlx.server.memory_limit import MemoryLimit
from pion_vllm_mlx.server.shares import Shares
from pion_vllm_mlx.server.store.files import refusals
from pion_vllm_mlx.server.store.index import KEY_SUFFIX, VALUE_SUFFIX, Session, group_of
from pion_vllm_mlx.server.store.state import State
from pion_vllm_mlx.server.store.store import Store
from pion_vllm_mlx.server.store.totals import Totals
from pion_vllm_mlx.server.tenants import Tenant, owner_of, shown_name

if TYPE_CHECKING:
    from pion_vllm_mlx.server.transactions import Transaction


@dataclass(frozen=True)
class TlsConfig:
    """The TLS port and its files; with a CA, clients have to show a certificate of it."""

    port: int
    cert_file: Path
    key_file: Path
    ca_cert_file: Path | None = None


@dataclass(frozen=True)
class ServerConfig:
    """How a server runs; one field a flag. Sizes in bytes."""

    folder: Path
    port: int = 1974
    bind: str = ""
    unixsocket: Path | None = None
    tls: TlsConfig | None = None
    kvcache: bool = False
    password: str = ""
    tenants: Mapping[bytes, Tenant] = field(default_factory=dict)
    ns_prefix: bytes = b""
    wal: bool = True
    wal_size: int = 64 << 20
    appendfsync: str = "everysec"
    max_sessions: int = 256
    disk_budget: int = 0
    share_equal: bool = True
    repair: bool = False
    ephemeral: bool = False
    embedded: bool = False
    budget_follows_disk: bool = False
    export_dir: Path | None = None
    max_connections: int = 10_000
    stall_seconds: float = 30.0
    metrics_port: int = 0
    metrics_bind: str = "127.0.0.1"
    log_format: str = "text"
    idle_seconds: float = 0.0
    output_seconds: float = 60.0
    output_limit: int = 0
    maxmemory: int = 0
    attention: AttentionSettings = AttentionSettings()
    workers: int = 1
    worker: int = 0
    launcher_pid: int = 0

    @property
    def address(self) -> str:
        """Where TCP listeners bind: loopback unless there is a password or a choice."""
        return self.bind or ("0.0.0.0" if self.password else "127.0.0.1")

    def password_matches(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self.password.encode())

    def identity(self, user: bytes, password: bytes) -> bytes | None:
        """The tenant that these credentials name, empty for the admin, None for wrong ones."""
        if user in (b"", ADMIN_NAME.encode()):
            return b"" if self.password_matches(password) else None
        tenant = self.tenants.get(user)
        if tenant is None or not hmac.compare_digest(password, tenant.password.encode()):
            return None
        return user


@dataclass
class Client:
    """One connection as commands see it; ``tenant`` is empty on the admin's."""

    client_id: int
    address: str
    local: bool
    proto: int = 2
    name: bytes = b""
    lib_name: bytes = b""
    lib_ver: bytes = b""
    authenticated: bool = False
    tenant: bytes = b""
    last_command: str = ""
    connected: float = field(default_factory=time.monotonic)
    active: float = field(default_factory=time.monotonic)
    close_after_reply: bool = False
    transaction: Transaction | None = None
    watch: Watch = field(default_factory=Watch)


@dataclass(frozen=True)
class Export:
    """A file of V.EXPORT, its checksum, and the runs it was made from."""

    path: Path
    version: tuple[int, ...]
    crc: int


@dataclass
class Server:
    """Everything that lives as long as the process."""

    config: ServerConfig
    store: Store
    ledger: Ledger
    pool: WindowPool
    long_arguments: LongArguments = field(default_factory=LongArguments)
    memory: MemoryStores = field(default_factory=MemoryStores)
    keyspace: Keyspace = field(default_factory=Keyspace)
    port: int = 0
    tls_port: int = 0
    binary_port: int = 0
    clients: dict[int, Client] = field(default_factory=dict)
    connections: dict[int, Any] = field(default_factory=dict)
    affinity_port: int = 0
    directory: Directory = field(default_factory=Directory)
    exports: dict[tuple[bytes, ...], Export] = field(default_factory=dict)
    _undeleted: list[Path] = field(default_factory=list)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    #: whether it was a signal to this process that stopped it, and no client.
    signalled: bool = False
    connections_total: int = 0
    commands_total: int = 0
    last_save: int = 0
    #: connections that are not clients yet: TLS has not been agreed on.
    handshakes: int = 0
    #: how often a bug has ended something that the server does by itself.
    housekeeping_errors: int = 0

    def __post_init__(self) -> None:
        self.client_ids = ClientIds(self.config.worker, self.config.workers)
        self.rollback_ids = RollbackIds(self.config.tenants)
        self.memory_limit = MemoryLimit(self.config.maxmemory)
        self.totals = Totals(self.store.state)
        self.store.on_change = self.sessions_changed
        if self.config.export_dir is None:
            self.store.space.spare = self._drop_an_export
        if self.keyspace.wal is not None:
            self.store.space.use.logs.append(self.keyspace.wal)
        tenants, space = self.config.tenants, self.store.space
        if tenants:
            space.pin_limits = replace(space.pin_limits, owner=lambda sid: owner_of(sid, tenants))
        space.policy = LineageOrder(space.pin_limits, self.keyspace)
        self.shares = Shares(tenants, self.store, self.keyspace, self.memory) if tenants else None
        self.attention = AttentionCache(self.config.attention, self.store.run)
        if tenants:
            self.attention.slots.owner = lambda sid: owner_of(sid, tenants)
            self.attention.slots.quota = lambda one: tenants[one].quota if one else 0
        self.attention.follow(self.store)
        self.memory_limit.cache = self.attention
        self.attention.short_of_memory = self.memory_limit.is_past

    @property
    def is_full(self) -> bool:
        """Whether there is no place for another client."""
        return len(self.clients) + self.handshakes >= self.config.max_connections

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for memory that arguments under way hold."""
        return self.pool.wanted or self.long_arguments.wanted

    def sessions_changed(self, sids: Iterable[bytes]) -> None:
        """Delete the exported files of sessions that changed; who has one open keeps it.

        A reported prefill time goes with its namespace.
        """
        changed = set(sids)
        self.totals.changed(changed)
        for key in [key for key in self.exports if changed & set(key[:2])]:
            self.delete_export(self.exports.pop(key).path)
        # one by one: a difference of keys would look at all sessions
        for sid in [sid for sid in changed if sid not in self.store.state.sessions]:
            self.directory.prefill_ms.pop(group_of(sid), None)
        self.directory.publish({sid: self.known(sid) for sid in changed})

    def stop_by_signal(self) -> None:
        """Whoever sent it means this process; SHUTDOWN means the server, all workers."""
        self.signalled = True
        self.stopping.set()

    def _drop_an_export(self) -> bool:
        """Delete the oldest exported file, for room; False when there is none."""
        for key in list(self.exports)[:1]:
            self.delete_export(self.exports.pop(key).path)
            return True
        return False

    def delete_export(self, path: Path) -> None:
        """Delete an exported file; ``mend`` tries again where the disk does not let go of it."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            refusals.tell("an exported file that is not needed any more", error)
            self._undeleted.append(path)

    async def mend(self) -> None:
        """Try again what the disk refused before. Raises CommandError."""
        waiting, self._undeleted = self._undeleted, []
        for path in waiting:
            self.delete_export(path)
        await self.store.mend()

    def known(self, sid: bytes) -> Known | None:
        """What other workers are told about a session; None when there is none."""
        session = self.store.state.sessions.get(sid)
        if session is None:
            return None
        first = session.layers.get(0)
        counts = first is not None and sid.endswith(KEY_SUFFIX)
        return Known(first.count if first and counts else 0, session.deadline_ms)


@dataclass(frozen=True)
class Context:
    """One command's surroundings. ``when_room`` resumes a paused connection.

    ``overlay`` stands for the keys inside of a transaction. ``answer_early`` may send a reply of
    the binary lane from the thread that made it.
    """

    server: Server
    client: Client
    when_room: Callable[[], None] = lambda: None
    overlay: Data | None = None
    answer_early: Callable[[list[bytes | memoryview]], None] = lambda pieces: None

    @property
    def keys(self) -> View:
        """The plain keys at this moment."""
        keyspace = self.server.keyspace
        return View(keyspace.data if self.overlay is None else self.overlay, keyspace.now)

    def connected(self) -> bool:
        """Whether the client is still there; any thread."""
        return self.client.client_id in self.server.clients

    def charge(self, nbytes: int) -> None:
        """Raise OutOfMemory where so many bytes more do not fit the tenant's quota."""
        if self.server.shares is not None:
            self.server.shares.charge(self.client.tenant, nbytes)

    def shown(self, name: bytes) -> bytes:
        """A stored key, namespace or session id as this connection knows it."""
        return shown_name(self.client.tenant, name)

    def stored(self, name: bytes) -> bytes:
        """The stored name of what this connection calls ``name``; the opposite of ``shown``."""
        tenant = self.client.tenant
        return tenant + b":" + name if tenant else name

    @property
    def store(self) -> Store:
        return self.server.store

    @property
    def state(self) -> State:
        return self.server.store.state

    def live(self, sid: bytes) -> Session | None:
        """The session of that id, unless it is past its deadline."""
        session = self.state.sessions.get(sid)
        if session is None or not session.deadline_ms:
            return session
        return session if session.deadline_ms > time.time() * 1000 else None

    def sides(self, namespace: bytes) -> list[Session]:
        """The K and V sessions of a namespace that exist and are not past their deadline."""
        sides = (self.live(namespace + KEY_SUFFIX), self.live(namespace + VALUE_SUFFIX))
        return [session for session in sides if session is not None]

    def overdue(self, namespace: bytes) -> bool:
        """Whether a namespace is past its deadline and has not been dropped yet."""
        return len(self.state.sides(namespace)) > len(self.sides(namespace))

    def session(self, sid: bytes, where: str) -> Session:
        """The session of that id. Raises CommandError when there is none."""
        session = self.live(sid)
        if session is None:
            raise CommandError(f"{where}: session not found")
        return session
