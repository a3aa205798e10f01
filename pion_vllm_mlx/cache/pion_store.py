"""Prefixes by layer as float32 arrays: the store as other projects' adapters know it.

A namespace may live on another worker of the same server; its error names it, and the
call goes on there. L is layers, n tokens, W a row's width (``kv_dim``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pion_vllm_mlx.cache.resp_client import Answer, RespClient, info_fields
from pion_vllm_mlx.config import AFFINITY_OFFSET
from pion_vllm_mlx.errors import ConfigError, ServerRefused, StoreUnavailable
from pion_vllm_mlx.formats import FORMATS
from pion_vllm_mlx.wire.resp import Part

# the names that tests of other projects import
_RESPClient = RespClient
_RESPError = ServerRefused

Floats = NDArray[np.float32]
T = TypeVar("T")

#: a longer run of rows is stored in several commands.
STORE_BYTES = 64 << 20
#: how long another worker has to accept a connection.
REDIRECT_SECONDS = 2.0

_LIVES_ON = re.compile(r"lives on worker (\d+)")
_SUFFIXES = {"K": "_pk", "V": "_pv"}


class PionStore:
    """Rows of prefixes. A context manager; not for several threads at once.

    ``client`` replaces the first connection. ``redirect_count`` counts changes of worker.
    Every method raises ServerRefused with the server's text, or StoreUnavailable.
    """

    def __init__(  # noqa: PLR0913 - the names of the published client
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        vquant: str = "fp16",
        client: RespClient | None = None,
        auto_redirect: bool = True,
        max_redirects: int = 16,
        tenant_prefix: str = "",
    ) -> None:
        _check_format(vquant)
        self.host = host
        self.port = port
        self.vquant = vquant
        self.auto_redirect = auto_redirect
        self.max_redirects = max_redirects
        self.tenant_prefix = tenant_prefix
        self.redirect_count = 0
        self._client = client or RespClient(host, port)

    def __enter__(self) -> PionStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the next call opens one again."""
        self._client.close()

    # -- namespaces ------------------------------------------------------------

    def register(self, namespace: str, kv_dim: int, vquant: str | None = None) -> None:
        """Create both sides, in ``vquant`` or the store's format."""
        fmt = vquant or self.vquant
        _check_format(fmt)
        answer = self._cmd("KV.PREFIX.REGISTER", self._ns(namespace), kv_dim, fmt)
        if answer != b"OK":
            raise ServerRefused(f"KV.PREFIX.REGISTER answered {answer!r}")

    def lookup(self, namespace: str) -> bool:
        """Whether both sides exist."""
        return bool(self._cmd("KV.PREFIX.LOOKUP", self._ns(namespace)) == b"HIT")

    def owner(self, namespace: str) -> int:
        """The worker that holds a namespace; −1 when none does."""
        return int(self._cmd("KV.PREFIX.OWNER", self._ns(namespace)))

    def save(self) -> bool:
        """Snapshot the server's store; False when it refuses or cannot be reached."""
        try:
            return bool(self._cmd("KV.PREFIX.SAVE") == b"OK")
        except (ServerRefused, StoreUnavailable):
            return False

    def info(self) -> dict[str, int | str]:
        """The fields of KV.PREFIX.INFO, numbers as ints."""
        return info_fields(self._cmd("KV.PREFIX.INFO"))

    # -- rows ------------------------------------------------------------------

    def store_layer(
        self, namespace: str, side: str, layer: int, token_offset: int, tensor_fp32: ArrayLike
    ) -> None:
        """Store rows ``[n, W]`` of one layer and side from ``token_offset`` on."""
        rows = np.ascontiguousarray(tensor_fp32, np.float32)
        if rows.ndim != 2:
            raise ConfigError(f"rows of a layer are [n, W], not {list(rows.shape)}")
        sid = self._sid(namespace, side)
        step = max(1, STORE_BYTES // max(1, 4 * rows.shape[1]))
        for at in range(0, len(rows), step):
            part = rows[at : at + step]
            self._cmd("V.STOREBATCH", sid, layer, token_offset + at, len(part), part)

    def fetch_layer(
        self,
        namespace: str,
        side: str,
        layer: int,
        token_start: int,
        token_end: int,
        kv_dim: int,
    ) -> Floats:
        """Rows ``[n, W]`` of one layer and side; zeros where nothing is stored."""
        rows = np.zeros((max(0, token_end - token_start), kv_dim), np.float32)
        if not rows.size:
            return rows
        sid = self._sid(namespace, side)
        data = self._cmd("V.FETCH", sid, layer, "RANGE", token_start, token_end)
        if data is None:
            return rows
        if len(data) != rows.nbytes:
            raise ConfigError(f"rows of {namespace} are not {kv_dim} values wide")
        return np.frombuffer(data, "<f4").reshape(rows.shape).astype(np.float32, copy=True)

    def store_prefix(
        self,
        namespace: str,
        K: ArrayLike,
        V: ArrayLike,
        token_offset: int = 0,
        kv_dim: int | None = None,
        vquant: str | None = None,
    ) -> None:
        """Register, then store both sides, each ``[L, n, W]``."""
        keys, values = (np.asarray(side, np.float32) for side in (K, V))
        if keys.ndim != 3 or keys.shape != values.shape:
            shapes = f"{list(keys.shape)} and {list(values.shape)}"
            raise ConfigError(f"K and V of a prefix are [L, n, W] alike, not {shapes}")
        width = keys.shape[2]
        if kv_dim not in (None, width):
            raise ConfigError(f"rows are {width} values wide, not {kv_dim}")
        self.register(namespace, width, vquant)
        for side, tensor in (("K", keys), ("V", values)):
            for layer, rows in enumerate(tensor):
                self.store_layer(namespace, side, layer, token_offset, rows)

    def fetch_prefix(
        self,
        namespace: str,
        n_layers: int,
        n_tokens: int,
        kv_dim: int,
        token_offset: int = 0,
    ) -> tuple[Floats, Floats]:
        """Both sides, each ``[L, n, W]``; zeros where nothing is stored."""
        end = token_offset + n_tokens

        def fetch(side: Literal["K", "V"]) -> Floats:
            layers = [
                self.fetch_layer(namespace, side, layer, token_offset, end, kv_dim)
                for layer in range(n_layers)
            ]
            return np.stack(layers) if layers else np.zeros((0, n_tokens, kv_dim), np.float32)

        return fetch("K"), fetch("V")

    # -- inside ----------------------------------------------------------------

    def _ns(self, namespace: str) -> str:
        return self.tenant_prefix + namespace

    def _sid(self, namespace: str, side: str) -> str:
        if side not in _SUFFIXES:
            raise ConfigError(f"a side is K or V, not {side!r}")
        return self._ns(namespace) + _SUFFIXES[side]

    def _cmd(self, *parts: Part) -> Answer:
        """One reply, from the worker that has what it is about."""
        return self._redirected(lambda: self._client.cmd(*parts))

    def _redirected(self, ask: Callable[[], T]) -> T:
        for _ in range(self.max_redirects):
            try:
                return ask()
            except ServerRefused as error:
                found = _LIVES_ON.search(str(error))
                if found is None or not self.auto_redirect:
                    raise
                self._go_to(int(found[1]))
        return ask()

    def _go_to(self, worker: int) -> None:
        """Connect to a worker's own port; to the shared one when that is out of reach."""
        timeout, old = self._client.timeout, self._client
        self.redirect_count += 1
        self._client = old.at(self.host, self.port, timeout)
        port = self.port + AFFINITY_OFFSET + worker
        if port < 1 << 16:
            probe = old.at(self.host, port, REDIRECT_SECONDS)
            if probe.ping():
                self._client = old.at(self.host, port, timeout)
            probe.close()
        old.close()


def _check_format(vquant: str) -> None:
    """Raises ConfigError for a format that rows cannot be stored in."""
    if vquant not in FORMATS:
        raise ConfigError(f"vquant is one of {', '.join(sorted(FORMATS))}, not {vquant!r}")


__all__ = ["PionStore", "_RESPClient", "_RESPError"]
