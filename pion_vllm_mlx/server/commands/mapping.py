"""KV.PREFIX.MAP: where a same-host client finds the rows, to read them itself."""

from __future__ import annotations

import json
from typing import Any

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.command import Reply, command
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.server.store.index import Extent, InSegment, Session
from pion_vllm_mlx.server.store.sealing import side_of, tensor_name
from pion_vllm_mlx.server.store.segment import Segment
from pion_vllm_mlx.server.store.verifying import verified
from pion_vllm_mlx.wire.resp import Arg, Simple

#: so many are described on the event loop.
_FEW_RUNS = 256


def _tensor(session: Session, layer: int, extent: Extent) -> dict[str, Any]:
    run = extent.run
    return {
        "name": tensor_name(session, layer, run),
        "layer": layer,
        "leaf": layer,
        "side": side_of(session.sid),
        "start": extent.start,
        "end": extent.end,
        "row": extent.row,
        "rows": run.shape.rows,
        "format": run.shape.spec.fmt,
        "layout": "HND" if run.shape.head_major else "NHD",
        "crc32c": run.sent_crc,
    }


#: one layer's number and what it shows.
_Layer = tuple[int, list[Extent]]


def _layers(session: Session) -> list[_Layer]:
    """What a session shows at this moment: its lists of extents are replaced, never changed."""
    return [(layer, rows.extents) for layer, rows in sorted(session.layers.items())]


def describe(sessions: list[tuple[Session, list[_Layer]]]) -> dict[str, Any]:
    """The answer: every segment with the tensors that show, grouped by file. Any thread."""
    files: dict[str, tuple[Segment, list[dict[str, Any]]]] = {}
    newest = 0
    for session, layers in sessions:
        for layer, extents in layers:
            for extent in extents:
                place = extent.run.place
                assert isinstance(place, InSegment)
                entry = files.setdefault(place.segment.name, (place.segment, []))
                entry[1].append(_tensor(session, layer, extent))
                newest = max(newest, extent.run.run_id)
    return {
        "generation": newest,
        "segments": [
            {
                "path": str(segment.path.resolve()),
                "size": segment.size,
                "crc32c": segment.header_crc,
                "tensors": tensors,
            }
            for segment, tensors in files.values()
        ],
    }


@command(
    "KV.PREFIX.MAP",
    2,
    "Seals a namespace and says which files hold its rows, as JSON.",
    syntax="ns",
    kvcache=True,
    home="namespace",
    keys=(1, 1),
    extension=True,
)
async def kv_prefix_map(context: Context, args: list[Arg]) -> Reply:
    namespace = arguments.sid(args[1])
    if not context.client.local:
        raise CommandError("KV.PREFIX.MAP is for clients on this host")
    for attempt in range(2):
        sessions = context.sides(namespace)
        if len(sessions) < 2 or all(session.empty for session in sessions):
            return Simple("UNKNOWN")
        if all(session.published for session in sessions):
            break
        if attempt:
            raise CommandError("KV.PREFIX.MAP: a store to this namespace is under way")
        await context.store.seal(namespace)
    if not await verified(context.store, sessions):
        return Simple("UNKNOWN")
    sessions = context.sides(namespace)
    if len(sessions) < 2 or not all(session.published for session in sessions):
        return Simple("UNKNOWN")
    for session in sessions:
        context.state.touch(session)
    shown = [(session, _layers(session)) for session in sessions]
    if sum(len(extents) for _, layers in shown for _, extents in layers) <= _FEW_RUNS:
        return json.dumps(describe(shown))
    # tens of milliseconds for ten thousand runs, which others need not wait for
    return await context.store.run(lambda: json.dumps(describe(shown)))
