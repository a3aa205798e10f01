"""LMCache's own connectors store and find their chunks at this server.

Runs where the wheel and what its client imports are installed: ``make test-torch`` does that
without the gigabytes of CUDA libraries that ``pip install lmcache`` brings.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeAlias

import pytest

from pion_vllm_mlx.cache import LMCacheRemoteBackend
from tests.conftest import RunningServer

_WHY = "LMCache is not importable: make test-torch"
torch: Any = pytest.importorskip("torch", reason=_WHY, exc_type=ImportError)
_connectors: Any = pytest.importorskip(
    "lmcache.v1.storage_backend.connector.redis_connector", reason=_WHY, exc_type=ImportError
)
_cpu: Any = pytest.importorskip("lmcache.v1.storage_backend.local_cpu_backend", reason=_WHY)
_config: Any = pytest.importorskip("lmcache.v1.config", reason=_WHY)
_metadata: Any = pytest.importorskip("lmcache.v1.metadata", reason=_WHY)
_memory: Any = pytest.importorskip("lmcache.v1.memory_management", reason=_WHY)
_allocators: Any = pytest.importorskip(
    "lmcache.v1.memory_allocators.host_memory_allocator", reason=_WHY
)
_utils: Any = pytest.importorskip("lmcache.utils", reason=_WHY)

LAYERS, CHUNK_TOKENS, HEADS, DIM = 4, 256, 8, 64
DTYPE = torch.bfloat16
Connect: TypeAlias = Callable[[asyncio.AbstractEventLoop, Any, int], Any]


def local_backend() -> Any:
    """LMCache's own memory on the host, for chunks of 2 x 4 layers x 256 tokens: 1 MiB."""
    shape = (LAYERS, 2, CHUNK_TOKENS, HEADS, DIM)
    metadata = _metadata.LMCacheMetadata("model", 1, 1, 0, 0, DTYPE, shape, chunk_size=CHUNK_TOKENS)
    config = _config.LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, extra_config={"save_chunk_meta": False}
    )
    memory = _allocators.HostMemoryAllocator(64 << 20)
    return _cpu.LocalCPUBackend(config, metadata, memory_allocator=memory)


def redis_connector(loop: asyncio.AbstractEventLoop, backend: Any, port: int) -> Any:
    return _connectors.RedisConnector(f"redis://127.0.0.1:{port}", loop, backend)


def resp_connector(loop: asyncio.AbstractEventLoop, backend: Any, port: int) -> Any:
    return _connectors.RESPConnector("127.0.0.1", port, loop, backend, num_threads=3)


def key(number: int) -> Any:
    return _utils.CacheEngineKey("model", 1, 0, number, DTYPE)


def chunk(backend: Any, number: int) -> Any:
    """A chunk whose values follow from its number."""
    metadata = backend.metadata
    found = backend.allocate(
        metadata.get_shapes(), metadata.get_dtypes(), _memory.MemoryFormat.KV_2LTD
    )
    generator = torch.Generator().manual_seed(number)
    found.tensor.copy_(torch.randn(found.tensor.shape, generator=generator))
    return found


async def in_time(work: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(work, 30)


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run on a loop that is left behind: LMCache's executors wait for ever when closed."""
    loop = asyncio.new_event_loop()
    loop.run_until_complete(asyncio.wait_for(work, 120))
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.mark.parametrize("connect", [redis_connector, resp_connector])
def test_lmcache_finds_its_chunks_again_bit_for_bit(store: RunningServer, connect: Connect) -> None:
    first = 100 if connect is redis_connector else 200

    async def main() -> None:
        backend = local_backend()
        connector = connect(asyncio.get_running_loop(), backend, store.port)
        assert not await in_time(connector.exists(key(first)))
        for number in range(first, first + 3):
            await in_time(connector.put(key(number), chunk(backend, number)))
        # what another connector of another process would see
        other = connect(asyncio.get_running_loop(), backend, store.port)
        for number in range(first, first + 3):
            assert await in_time(other.exists(key(number)))
            found = await in_time(other.get(key(number)))
            assert torch.equal(found.tensor, chunk(backend, number).tensor)
        assert not await in_time(other.exists(key(first + 3)))
        for one in (connector, other):
            await close(one)

    run(main())


@pytest.mark.parametrize("connect", [redis_connector, resp_connector])
def test_lmcache_stores_and_finds_many_chunks_at_once(
    store: RunningServer, connect: Connect
) -> None:
    first = 300 if connect is redis_connector else 400

    async def main() -> None:
        backend = local_backend()
        connector = connect(asyncio.get_running_loop(), backend, store.port)
        keys = [key(number) for number in range(first, first + 6)]
        chunks = [chunk(backend, number) for number in range(first, first + 6)]
        await in_time(connector.batched_put(keys[:5], chunks[:5]))
        # a prefix counts up to its first chunk that is not there
        assert await in_time(connector.batched_async_contains("look", keys)) == 5
        gap = [keys[0], key(999), keys[1]]
        assert await in_time(connector.batched_async_contains("look", gap)) == 1
        found = await in_time(connector.batched_get_non_blocking("look", keys[:5]))
        assert len(found) == 5
        for ours, theirs in zip(found, chunks, strict=False):
            assert torch.equal(ours.tensor, theirs.tensor)
        await close(connector)

    run(main())


def test_what_lmcache_stored_is_there_for_everyone_and_after_a_kill(
    pion_server: RunningServer,
) -> None:
    async def put() -> None:
        backend = local_backend()
        connector = resp_connector(asyncio.get_running_loop(), backend, pion_server.port)
        await in_time(connector.put(key(1), chunk(backend, 1)))
        await close(connector)

    async def get() -> None:
        backend = local_backend()
        connector = resp_connector(asyncio.get_running_loop(), backend, pion_server.port)
        found = await in_time(connector.get(key(1)))
        assert torch.equal(found.tensor, chunk(backend, 1).tensor)
        await close(connector)

    run(put())
    pion_server.restart()
    run(get())
    plain = LMCacheRemoteBackend("127.0.0.1", pion_server.port)
    expected = bytes(chunk(local_backend(), 1).byte_array)
    assert plain._client.cmd("GET", key(1).to_string()) == expected
    plain.close()


def test_a_password_is_asked_of_lmcache_too(pion_server: RunningServer) -> None:
    pion_server.restart("--requirepass", "secret")

    async def main() -> None:
        backend = local_backend()
        loop = asyncio.get_running_loop()
        connector = _connectors.RESPConnector(
            "127.0.0.1", pion_server.port, loop, backend, 1, "default", "secret"
        )
        await in_time(connector.put(key(7), chunk(backend, 7)))
        assert await in_time(connector.exists(key(7)))
        await close(connector)

    run(main())
    with socket.create_connection(("127.0.0.1", pion_server.port), timeout=10) as stranger:
        stranger.sendall(b"GET " + key(7).to_string().encode() + b"\r\n")
        assert stranger.recv(64).startswith(b"-NOAUTH")


async def close(connector: Any) -> None:
    """Close the connections only: LMCache's own ``close`` does not come back on a running loop."""
    if isinstance(connector, _connectors.RESPConnector):
        connector.client.close()
    else:
        await connector.connection.aclose()
