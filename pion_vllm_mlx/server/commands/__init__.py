"""Command handlers, one module a group. Importing this package fills the table."""

from pion_vllm_mlx.server.commands import (
    attend_index,
    connection,
    export,
    kv_prefix,
    kv_store,
    mapping,
    rollback,
    server_info,
    ssm_prefix,
    state_slots,
    vstore,
    vstore_fetch,
    vstore_store,
)

__all__ = [
    "attend_index",
    "connection",
    "export",
    "kv_prefix",
    "kv_store",
    "mapping",
    "rollback",
    "server_info",
    "ssm_prefix",
    "state_slots",
    "vstore",
    "vstore_fetch",
    "vstore_store",
]
