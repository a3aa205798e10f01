"""Command handlers, one module a group. Importing this package fills the table."""

from pion_vllm_mlx.server.commands import (
    connection,
    export,
    kv_prefix,
    mapping,
    server_info,
    ssm_prefix,
    vstore,
    vstore_fetch,
    vstore_store,
)

__all__ = [
    "connection",
    "export",
    "kv_prefix",
    "mapping",
    "server_info",
    "ssm_prefix",
    "vstore",
    "vstore_fetch",
    "vstore_store",
]
