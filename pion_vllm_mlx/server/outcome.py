"""What came of a command, as it goes to the client: a reply's bytes, or the words for a failure.

A short reply is encoded whole. A long one of many values is a stream that encodes them window
by window while it is sent, from where they lie: a reply costs no second copy of what it tells.
"""

from __future__ import annotations

import logging
from itertools import chain

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.server.command import Reply
from pion_vllm_mlx.server.outbound import Stream, made_on_the_way
from pion_vllm_mlx.server.session import Context
from pion_vllm_mlx.wire import resp
from pion_vllm_mlx.wire.resp import Arg

log = logging.getLogger(__name__)

#: a longer reply of many values is made while it is sent, from where they lie.
LONG_REPLY_BYTES = 256 << 10


def encoded(context: Context, reply: Reply) -> bytes | Stream:
    """The bytes of a reply in the client's protocol; of a long one, a stream of its values.

    Under a limit of unread bytes nothing is made on the way: that is a limit of what the
    transport holds, which has to see the reply.
    """
    if isinstance(reply, Stream):
        return reply
    proto = context.client.proto
    if not isinstance(reply, (list, tuple)):
        return resp.encode(reply, proto)
    windows = resp.windows(reply, proto, LONG_REPLY_BYTES)
    first, second = next(windows), next(windows, None)
    if second is None:
        return first
    if context.server.config.output_limit:
        return b"".join((first, second, *windows))
    return made_on_the_way(chain((first, second), windows))


def failed(args: list[Arg], error: Exception) -> CommandError:
    """What a client is told of a command that failed; called where the error was caught."""
    if isinstance(error, CommandError):
        # its frames hold open files, and the caller's would hold them in a cycle
        return error.with_traceback(None)
    return _refused_by_system(args, error) if isinstance(error, OSError) else _bug(args)


def _refused_by_system(args: list[Arg], error: OSError) -> CommandError:
    """What a client is told when there is no descriptor left, or a file cannot be read."""
    name = args[0].decode("latin-1") if isinstance(args[0], bytes) else "?"
    log.error("%s: %s", name, error)
    return CommandError(f"{name.upper()}: {error.strerror or error}")


def _bug(args: list[Arg]) -> CommandError:
    name = args[0].decode("latin-1") if isinstance(args[0], bytes) else "?"
    log.exception("internal error in %s", name)
    return CommandError("internal error, see the server's log")
