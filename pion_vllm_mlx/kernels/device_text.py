"""What the compiler of a GPU is given of the files of a kernel.

A kernel is a file ``<folder>/<name>.<suffix>``: in front of the line ``#else  // body`` are its
functions, behind it the body that mlx wraps in a signature.  What kernels share is in files of
its own, which precede the functions of those that use it.

mlx hashes the whole text of a program at every call, 40 KB of it in 9 us, so it gets as little of
it as can be.  CUDA's compiler reads files: the text names them.  Metal's cannot: the text is that
of the files without comments, indentation and what the kernel does not use (``device_text_used``).
In both, the errors of the compiler name the file and its line.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib import resources
from pathlib import Path

from pion_vllm_mlx.kernels.device_source import Dialect, Signature
from pion_vllm_mlx.kernels.device_text_used import used

_BEGIN = "#ifndef BODY\n"
_BODY = "#else  // body\n"
_END = "#endif  // body\n"
_COMMENT = re.compile(r"[ \t]*//.*")


def program_name(dialect: Dialect, signature: Signature) -> str:
    """A name that differs where anything does: mlx keeps programs by name."""
    files = tuple(text_of(dialect, name) for name in files_of(dialect, signature))
    text = repr((signature, files, header(dialect, signature), body(dialect, signature)))
    return f"pion_{signature.kernel}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def shared_texts(dialect: Dialect, signature: Signature) -> tuple[str, ...]:
    """The files whose functions a program uses, and no other: each is compiled with it."""
    defines = dict(signature.defines)
    ending = {"0": ("warps", "whole"), "1": ("warps", "parts"), None: ()}[defines.get("MERGE")]
    tensors = ("multiply",) if signature.kernel in ("group_rows", "tensor_rows") else ()
    chooses = ("choose",) if dialect.merges and defines.get("TOKENS") == "3" else ()
    return ("rows", *ending, *tensors, *chooses)


def files_of(dialect: Dialect, signature: Signature) -> tuple[str, ...]:
    """The files of a program, that of the kernel itself last."""
    return (*shared_texts(dialect, signature), signature.kernel)


def header(dialect: Dialect, signature: Signature) -> str:
    """Everything before the function: macros, the shared functions, the kernel's own."""
    macros = "".join(f"\n#define {name} {value}" for name, value in signature.defines)
    folder, names = include_folder(dialect), files_of(dialect, signature)
    if folder is not None:
        files = "".join(f'\n#include "{folder}/{name}.{dialect.suffix}"' for name in names)
        return f"{macros}{files}\n"
    texts = used([functions_of(dialect, name) for name in names], macros + body(dialect, signature))
    return f"{macros}{''.join(texts)}\n"


def body(dialect: Dialect, signature: Signature) -> str:
    """What goes between the braces of the function."""
    folder = include_folder(dialect)
    if folder is None:
        return body_of(dialect, signature.kernel) + "\n"
    file = f"{folder}/{signature.kernel}.{dialect.suffix}"
    return f'\n#define BODY\n#include "{file}"\n#undef BODY\n'


@lru_cache(maxsize=8)
def include_folder(dialect: Dialect) -> str | None:
    """Where the compiler finds the files itself; None where it cannot."""
    folder = resources.files("pion_vllm_mlx.kernels").joinpath(dialect.name)
    path = str(folder)
    plain = path.isascii() and path.isprintable() and not set(path) & set('"\\')
    return path if dialect.includes and isinstance(folder, Path) and plain else None


@lru_cache(maxsize=64)
def text_of(dialect: Dialect, name: str) -> str:
    """A file."""
    folder = resources.files("pion_vllm_mlx.kernels").joinpath(dialect.name)
    return folder.joinpath(f"{name}.{dialect.suffix}").read_text(encoding="utf-8")


def functions_of(dialect: Dialect, name: str) -> str:
    """The functions of a file, stripped, as lines of that file."""
    text = text_of(dialect, name)
    first = 2 if text.startswith(_BEGIN) else 1
    functions = text.removeprefix(_BEGIN).partition(_BODY)[0]
    return _marked(dialect, name, first, functions)


def body_of(dialect: Dialect, name: str) -> str:
    """The body of a kernel, stripped, as lines of its file."""
    functions, _, rest = text_of(dialect, name).partition(_BODY)
    return _marked(dialect, name, functions.count("\n") + 2, rest.removesuffix(_END))


def _marked(dialect: Dialect, name: str, first: int, text: str) -> str:
    return f'\n#line {first} "{name}.{dialect.suffix}"\n{stripped(text)}'


def stripped(text: str) -> str:
    """The text without comments and the blanks around its lines; a line stays the same line.

    For the texts of kernels, which have no strings with ``//`` in them.
    """
    lines = (_COMMENT.sub("", line).strip() for line in text.split("\n"))
    return "\n".join(lines).rstrip("\n")
