"""A remote backend for LMCache: its chunks under plain keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pion_vllm_mlx.cache.resp_client import RespClient
from pion_vllm_mlx.wire.resp import Part


class LMCacheRemoteBackend:
    """Blobs by key: ``<ns_prefix>:<key>``. Thread-safe as its client is.

    Every method but ``ping`` raises ServerRefused or StoreUnavailable.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        ns_prefix: str = "",
        timeout: float = 60.0,
        client: RespClient | None = None,
    ) -> None:
        self.ns_prefix = ns_prefix
        self._client = client or RespClient(host, port, timeout)

    def _key(self, key: str) -> str:
        return f"{self.ns_prefix}:{key}"

    def put(self, key: str, value: Part) -> bool:
        """Store a blob; True once the server has it."""
        return bool(self._client.cmd("SET", self._key(key), value) == b"OK")

    def get(self, key: str) -> bytes | None:
        """The blob of a key, None when there is none."""
        found = self._client.cmd("GET", self._key(key))
        return found if isinstance(found, bytes) else None

    def contains(self, key: str) -> bool:
        return bool(self._client.cmd("EXISTS", self._key(key)) == 1)

    def remove(self, key: str) -> bool:
        """Forget a key; whether it was there."""
        return bool(self._client.cmd("DEL", self._key(key)) == 1)

    def mput(self, items: Mapping[str, Part] | Iterable[tuple[str, Part]]) -> bool:
        """Store several blobs; True once the server has all of them."""
        pairs = items.items() if isinstance(items, Mapping) else items
        answers = self._client.pipeline([("SET", self._key(key), value) for key, value in pairs])
        return all(answer == b"OK" for answer in answers)

    def mget(self, keys: Iterable[str]) -> list[bytes | None]:
        """The blobs of several keys, in order."""
        answers = self._client.pipeline([("GET", self._key(key)) for key in keys])
        return [answer if isinstance(answer, bytes) else None for answer in answers]

    def ping(self) -> bool:
        """Whether the server answers."""
        return self._client.ping()

    def close(self) -> None:
        """Close the connection; the next call opens one again."""
        self._client.close()
