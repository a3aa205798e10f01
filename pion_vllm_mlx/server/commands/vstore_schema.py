"""The SCHEMA of V.CREATE: one spec a layer, ``fmt=fp8,dim=1024``."""

from __future__ import annotations

from collections.abc import Sequence

from pion_vllm_mlx.errors import CommandError
from pion_vllm_mlx.formats import BF16_ROPE_FP8_BODY, FORMATS, get_format
from pion_vllm_mlx.server import arguments
from pion_vllm_mlx.server.store.records import Create
from pion_vllm_mlx.wire.resp import Arg

WHERE = "V.CREATE SCHEMA"
MAX_LAYERS = 59
MAX_WIDTH = 65536
#: what a layer that the schema does not name is stored in.
DEFAULT_FORMAT = "int8"

_KEYS = ("fmt", "dim", "rope")


def parse_schema(sid: bytes, default_dim: int, args: Sequence[Arg]) -> Create:
    """The record of a session with that schema; ``args`` are the words behind SCHEMA.

    Raises CommandError.
    """
    if not args:
        raise CommandError(f"{WHERE}: needs the number of layers")
    count = arguments.integer(args[0], f"{WHERE}: N", 1, 1 << 31)
    if count > MAX_LAYERS:
        raise CommandError(f"{WHERE}: {count} layers exceeds the limit of {MAX_LAYERS}")
    if len(args) - 1 != count:
        raise CommandError(f"{WHERE}: {count} specs are needed, {len(args) - 1} are given")
    specs = {
        layer: (*_layer(arguments.word(arg), default_dim, f"{WHERE}: layer {layer}"), 0)
        for layer, arg in enumerate(args[1:])
    }
    return Create(sid, default_dim, DEFAULT_FORMAT, DEFAULT_FORMAT, 0, specs)


def _layer(spec: bytes, default_dim: int, where: str) -> tuple[int, str]:
    """Width and format of one layer."""
    given = _pairs(spec, where)
    if "fmt" not in given:
        raise CommandError(f"{where}: fmt= is needed")
    name = given["fmt"].decode("latin-1").lower()
    width = default_dim
    if "dim" in given:
        width = arguments.integer(given["dim"], f"{where}: dim", 1, MAX_WIDTH)
    if width == 0:
        raise CommandError(f"{where}: dim= is needed where the default dimension is 0")
    if name == BF16_ROPE_FP8_BODY:
        return width, _hybrid(given, width, where)
    if "rope" in given:
        raise CommandError(f"{where}: rope= is for {BF16_ROPE_FP8_BODY} only")
    kind = FORMATS.get(name)
    if kind is None:
        known = ", ".join((*FORMATS, BF16_ROPE_FP8_BODY))
        raise CommandError(f"{where}: unknown fmt '{name[:64]}' (known: {known})")
    if width % kind.block:
        raise CommandError(f"{where}: dim of {name} must be a multiple of {kind.block}")
    return width, kind.name


def _pairs(spec: bytes, where: str) -> dict[str, bytes]:
    """``key=value`` pairs, each key known and at most once."""
    found: dict[str, bytes] = {}
    for pair in spec.split(b","):
        key, equals, value = pair.partition(b"=")
        name = key.decode("latin-1").lower()
        if name == "s":
            raise CommandError(f"{where}: S-tensor reserved")
        if name not in _KEYS:
            raise CommandError(f"{where}: unknown key '{name[:64]}'")
        if not equals:
            raise CommandError(f"{where}: {name} lacks its value")
        if name in found:
            raise CommandError(f"{where}: {name}= is given twice")
        found[name] = value
    return found


def _hybrid(given: dict[str, bytes], width: int, where: str) -> str:
    """The name of the format with its rotary values, checked against the width."""
    if "rope" not in given:
        raise CommandError(f"{where}: {BF16_ROPE_FP8_BODY} needs rope=")
    rope = arguments.integer(given["rope"], f"{where}: rope", 1, MAX_WIDTH)
    if rope >= width:
        raise CommandError(f"{where}: rope must be below dim")
    kind = get_format(f"{BF16_ROPE_FP8_BODY}:{rope}")
    if (width - rope) % kind.block:
        raise CommandError(f"{where}: dim - rope must be a multiple of {kind.block}")
    return kind.name


def split_name(fmt: str) -> tuple[str, str]:
    """A format's name as SCHEMA has it, and its number of rotary values or nothing."""
    name, _, rope = fmt.partition(":")
    return (name, rope) if name == BF16_ROPE_FP8_BODY else (fmt, "")
