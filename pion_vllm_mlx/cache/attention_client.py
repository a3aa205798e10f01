"""The attention index: value rows found by the distance of their keys.

n is a number of rows, Dk and Dv the widths of keys and values; everything is float32.
What the server refuses, or cannot be asked, is a −1, False or None, with a line in
the log.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pion_vllm_mlx.cache.kv_client import or_else
from pion_vllm_mlx.cache.resp_client import RespClient, info_fields
from pion_vllm_mlx.errors import StoreUnavailable
from pion_vllm_mlx.wire.resp import Part

log = logging.getLogger(__name__)

Floats = NDArray[np.float32]

_DEFAULT_FORMAT = "int8"


class PionAttentionClient:
    """ATTEND.CREATE to ATTEND.INFO. Thread-safe as its connection is.

    ``client``, with the login of a tenant say, replaces its own.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 1974,
        timeout: float = 30.0,
        client: RespClient | None = None,
    ) -> None:
        self._client = client or RespClient(host, port, timeout)

    def __enter__(self) -> PionAttentionClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._client.close()

    def create_session(  # noqa: PLR0913 - the names of the published client
        self,
        session_id: str,
        key_dim: int = 1024,
        value_dim: int = 1024,
        k_format: str = _DEFAULT_FORMAT,
        v_format: str = _DEFAULT_FORMAT,
        boundary_layers: int = 0,
        boundary_v_format: str = _DEFAULT_FORMAT,
        rope_dim: int = 0,
    ) -> int:
        """Open an index; its slot, −1 on error. Options travel where they are not defaults."""
        parts: list[Part] = ["ATTEND.CREATE", session_id, key_dim, value_dim]
        options: Sequence[tuple[str, str | int, str | int]] = (
            ("KQUANT", k_format, _DEFAULT_FORMAT),
            ("VQUANT", v_format, _DEFAULT_FORMAT),
            ("BOUNDARY", boundary_layers, 0),
            ("BOUNDARY_VQUANT", boundary_v_format, _DEFAULT_FORMAT),
            ("ROPE", rope_dim, 0),
        )
        for name, given, default in options:
            if given != default:
                parts += [name, given]
        return or_else(-1, lambda: int(self._client.cmd(*parts)), "ATTEND.CREATE")

    def store_tokens(
        self, session_id: str, layer_id: int, keys: ArrayLike, values: ArrayLike
    ) -> bool:
        """Append keys ``[n, Dk]`` and values ``[n, Dv]`` to a layer."""
        k, v = (np.ascontiguousarray(rows, "<f4") for rows in (keys, values))
        return or_else(
            False,
            lambda: self._client.cmd("ATTEND.STORE", session_id, layer_id, len(k), k, v) == b"OK",
            "ATTEND.STORE",
        )

    def finalize_layer(self, session_id: str, layer_id: int) -> bool:
        """Say that a layer is complete."""
        return or_else(
            False,
            lambda: self._client.cmd("ATTEND.FINALIZE", session_id, layer_id) == b"OK",
            "ATTEND.FINALIZE",
        )

    def query_topk(
        self, session_id: str, layer_id: int, query: ArrayLike, k: int = 128
    ) -> bytes | None:
        """The value rows of the ``k`` nearest keys, float32, nearest first."""
        q = np.ascontiguousarray(query, "<f4")

        def ask() -> bytes | None:
            reply = self._client.cmd("ATTEND.QUERY", session_id, layer_id, k, q)
            return reply if isinstance(reply, bytes) else None

        return or_else(None, ask, "ATTEND.QUERY")

    def query_with_distances(
        self, session_id: str, layer_ids: Sequence[int], queries: ArrayLike, k: int, value_dim: int
    ) -> list[tuple[Floats, Floats]] | None:
        """One query ``[Dk]`` a layer, in one round trip: rows ``[m, Dv]``, distances ``[m]``.

        m is k, or the number of rows that there are.
        """
        stacked = np.ascontiguousarray(queries, "<f4")
        if len(stacked) != len(layer_ids):
            log.warning(
                "ATTEND.QUERY: %d layers need as many queries, not %d", len(layer_ids), len(stacked)
            )
            return None
        commands: list[list[Part]] = [
            ["ATTEND.QUERY", session_id, layer, k, query, "WITHDIST"]
            for layer, query in zip(layer_ids, stacked, strict=True)
        ]

        def ask() -> list[tuple[Floats, Floats]]:
            return [_with_distances(reply, value_dim) for reply in self._client.pipeline(commands)]

        return or_else(None, ask, "ATTEND.QUERY")

    def info(self) -> dict[str, int | str]:
        """The fields of ATTEND.INFO, numbers as ints; empty when there is no answer."""
        nothing: dict[str, int | str] = {}
        return or_else(nothing, lambda: info_fields(self._client.cmd("ATTEND.INFO")), "ATTEND.INFO")

    def query_batch_gpu(  # noqa: PLR0913 - the names of the published client
        self,
        H: int,
        N: int,
        D: int,
        top_k: int,
        Q: ArrayLike,
        K: ArrayLike,
        V: ArrayLike,
    ) -> Floats | None:
        """Softmax attention of ``Q [H, D]`` over the best of ``K`` and ``V [H, N, D]``.

        The arithmetic runs at the server, on whatever it has.
        """
        blobs = [np.ascontiguousarray(part, "<f4") for part in (Q, K, V)]

        def ask() -> Floats:
            reply = self._client.cmd("ATTEND.QUERYBATCH", H, N, D, top_k, *blobs)
            if not isinstance(reply, bytes) or len(reply) != 4 * H * D:
                raise StoreUnavailable("ATTEND.QUERYBATCH answered something else than rows")
            return np.frombuffer(reply, "<f4").reshape(H, D)

        return or_else(None, ask, "ATTEND.QUERYBATCH")


def _with_distances(reply: object, value_dim: int) -> tuple[Floats, Floats]:
    """A WITHDIST reply taken apart. Raises StoreUnavailable for another reply."""
    if not isinstance(reply, bytes) or len(reply) % (4 * value_dim + 4):
        raise StoreUnavailable("ATTEND.QUERY answered something else than rows and distances")
    found = np.frombuffer(reply, "<f4")
    count = len(found) // (value_dim + 1)
    return found[: count * value_dim].reshape(count, value_dim), found[count * value_dim :]
