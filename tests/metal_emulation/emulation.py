"""Compiles kernels with g++ and runs their launches on numpy arrays.

A program is the very text that mlx would get, header and body, in a signature as mlx writes it.
Many programs go into one library, since most of the time is g++'s.  A launch that reads or writes
where it may not, races in threadgroup memory, or does not meet at a barrier raises
:class:`KernelFault` with the line of the kernel's file.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_source import (
    SMALL_INPUT,
    Dialect,
    Kind,
    Launch,
    Runner,
    Signature,
)
from pion_vllm_mlx.kernels.device_text import body, header

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
_FLAGS = ("-std=c++17", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-ffp-contract=off")
# Instrumented, but linked without the sanitizers: runtime.cpp has the functions they call.
_KERNEL_FLAGS = (
    *("-Og", "-g1", "-fsanitize=thread", "-fno-exceptions", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-unused-parameter"),
    *("-Wno-maybe-uninitialized", "-Wno-unused-variable", "-Wno-unused-but-set-variable"),
    "-fsanitize=alignment",
)
_LINK_FLAGS = ("-shared", "-nostartfiles", "-nodefaultlibs")
_ERROR_BYTES = 1000
_MAX_PROGRAMS = 120  # of a library: g++ takes 10 MB for each

_TYPES: dict[str, dict[Kind, str]] = {
    "metal": {
        "f32": "float",
        "f16": "half",
        "bf16": "bfloat16_t",
        "i32": "int",
        "u32": "uint",
        "u8": "uchar",
    },
    "cuda": {
        "f32": "float",
        "f16": "__half",
        "bf16": "__nv_bfloat16",
        "i32": "int32_t",
        "u32": "uint32_t",
        "u8": "uint8_t",
    },
}
_NUMPY: dict[Kind, Any] = {"f32": np.float32, "i32": np.int32}
_POSITIONS = {
    "thread_position_in_threadgroup": "uint3(t->position[0], t->position[1], t->position[2])",
    "threadgroup_position_in_grid": "uint3(t->group[0], t->group[1], t->group[2])",
    "threads_per_threadgroup": "uint3(t->group_size[0], t->group_size[1], t->group_size[2])",
    "threadgroups_per_grid": "uint3(t->num_groups[0], t->num_groups[1], t->num_groups[2])",
    "thread_index_in_threadgroup": "t->index",
    "thread_index_in_simdgroup": "t->index % 32",
    "simdgroup_index_in_threadgroup": "t->index / 32",
}
# Its own reads, of the launch's arguments, are not watched.
_ENTRY = '__attribute__((visibility("default"), no_sanitize_thread))'
_EXPORTS = """
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char __bss_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
extern "C" __attribute__((visibility("default"))) void library_range(char** range) {
  range[0] = __ehdr_start;
  range[1] = __bss_start;
  range[2] = _end;
}
"""


class KernelFault(Exception):
    """A launch did what a kernel must not do; the message names the line."""


class CompileFault(Exception):
    """A kernel's text is not valid; the message is the compiler's."""


class _Buffer(ctypes.Structure):
    # kind: 0 an input, 1 an output, 2 exchanged among threadgroups
    _fields_ = (("begin", ctypes.c_void_p), ("size", ctypes.c_size_t), ("kind", ctypes.c_int))


class _Request(ctypes.Structure):
    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_buffers", ctypes.c_size_t),
        ("library_begin", ctypes.c_void_p),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
        ("num_groups", ctypes.c_uint * 3),
        ("group_size", ctypes.c_uint * 3),
        ("error", ctypes.c_char_p),
        ("error_bytes", ctypes.c_size_t),
        ("fault_pc", ctypes.c_void_p),
        ("other_pc", ctypes.c_void_p),
    )


def program(dialect: Dialect, signature: Signature, number: int, texts: tuple[str, str]) -> str:
    """C++ of one kernel as function ``entry_<number>``; ``texts`` are its header and body."""
    types = _TYPES[dialect.name]
    space = {"constant": "constant", "device": "device"} if dialect.name == "metal" else {}
    inputs = [
        f"const {space.get('constant' if small else 'device', '')} {types[kind]}* {name}"
        for name, kind, small in signature.inputs
    ]
    outputs = [
        f"{space.get('device', '')} {types[kind]}* {name}" for name, kind in signature.outputs
    ]
    kinds = [kind for _, kind, _ in signature.inputs] + [kind for _, kind in signature.outputs]
    arguments = [f"static_cast<{types[kind]}*>(a[{i}])" for i, kind in enumerate(kinds)]
    parameters = inputs + outputs
    lead, call, constants = "", "kernel", ""
    if dialect.name == "metal":
        positions = [name for name in _POSITIONS if name in texts[1]]
        parameters += [
            f"{'uint3' if 'uint3' in _POSITIONS[name] else 'uint'} {name}" for name in positions
        ]
        arguments += [_POSITIONS[name] for name in positions]
        if signature.template:
            lead = f"template <{', '.join(f'int {name}' for name, _ in signature.template)}>\n"
            call += f"<{', '.join(str(value) for _, value in signature.template)}>"
    else:
        constants = "".join(f"constexpr int {name} = {v};\n" for name, v in signature.template)
    undefine = "".join(f"#undef {name}\n" for name, _ in signature.defines)
    return (
        f"namespace kernel_{number} {{\n{texts[0]}\n"
        f"{lead}void kernel({', '.join(parameters)}) {{\n{constants}{texts[1]}\n}}\n}}\n"
        f'#line 1 "entry"\n'
        f'extern "C" {_ENTRY} void entry_{number}(void** a) {{\n'
        "const emulation::Thread* t = emulation::emulation_thread(); static_cast<void>(t);\n"
        f"kernel_{number}::{call}({', '.join(arguments)});\n}}\n{undefine}"
    )


def product_texts(dialect: Dialect, signature: Signature) -> tuple[str, str]:
    """Header and body as mlx gets them; where they name files, as if there were none to name."""
    dialect = replace(dialect, includes=False)
    return header(dialect, signature), body(dialect, signature)


class Library:
    """Programs compiled into one library."""

    def __init__(self, path: Path, runtime: ctypes.CDLL, numbers: dict[Any, int]) -> None:
        self._path = path
        self._runtime = runtime
        self._numbers = numbers
        self._library = ctypes.CDLL(str(path))
        bounds = (ctypes.c_void_p * 3)()
        self._library.library_range(bounds)
        self._begin, self._shared_begin, self._shared_end = (at or 0 for at in bounds)

    def run(self, key: Any, launch: Launch, outputs: Sequence[NDArray[Any]]) -> None:
        """Run a launch into ``outputs``; raises KernelFault."""
        arrays = [np.ascontiguousarray(array) for _, array in launch.inputs] + list(outputs)
        names = [name for name, _ in launch.inputs] + [name for name, _, _ in launch.outputs]
        num_inputs = len(launch.inputs)
        kinds = [
            2 if name in launch.exchanged else int(i >= num_inputs) for i, name in enumerate(names)
        ]
        buffers = (_Buffer * len(arrays))(
            *[_Buffer(a.ctypes.data, a.nbytes, kind) for a, kind in zip(arrays, kinds, strict=True)]
        )
        arguments = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        entry = getattr(self._library, f"entry_{self._numbers[key]}")
        request = _Request(
            entry=ctypes.cast(entry, ctypes.c_void_p),
            arguments=arguments,
            buffers=buffers,
            num_buffers=len(arrays),
            library_begin=self._begin,
            shared_begin=self._shared_begin,
            shared_end=self._shared_end,
            num_groups=launch.groups,
            group_size=(launch.threads, 1, 1),
            error=ctypes.cast(error, ctypes.c_char_p),
            error_bytes=_ERROR_BYTES,
        )
        if self._runtime.emulation_run(ctypes.byref(request)):
            places = [self._place(pc) for pc in (request.fault_pc, request.other_pc) if pc]
            message = error.value.decode()
            raise KernelFault(f"{launch.kernel}: {message}; {' and '.join(places)}".rstrip("; "))

    def _place(self, pc: int) -> str:
        """``file:line`` of the access before a return address, innermost first."""
        found = subprocess.run(
            ["addr2line", "-i", "-e", str(self._path), hex(pc - 1 - self._begin)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        lines = re.findall(r"([^/\n]+:\d+)", found)
        shims = ("metal_shim", "cuda_shim")
        kept = [line for line in lines if not line.startswith(shims) and "entry" not in line]
        return " in ".join(kept) or found.strip()


def _execute(*arguments: str) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileFault(done.stderr[:4000])


@lru_cache(maxsize=1)
def _runtime() -> ctypes.CDLL:
    """The runtime, once a process: every library of kernels finds its functions there."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "runtime.so"
        flags = ("-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-o", str(path))
        _execute(*_FLAGS, *flags, str(HERE / "runtime.cpp"))
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


class Compiler:
    """Compiles programs into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stems = itertools.count()
        self._runtime = _runtime()

    def compile(
        self, dialect: Dialect, programs: dict[Any, tuple[Signature, tuple[str, str]]]
    ) -> Library:
        """One library of programs, each a signature and its texts; raises CompileFault."""
        stem = self._folder / f"kernels_{next(self._stems)}"
        numbers = {key: number for number, key in enumerate(programs)}
        parts = [f'#include "{HERE / f"{dialect.name}_shim.hpp"}"\n', _EXPORTS]
        for key, (signature, texts) in programs.items():
            parts.append(program(dialect, signature, numbers[key], texts))
        source = stem.with_suffix(".cpp")
        source.write_text("".join(parts))
        _execute(*_FLAGS, *_KERNEL_FLAGS, "-c", "-o", f"{stem}.o", str(source))
        _execute(*_LINK_FLAGS, "-o", f"{stem}.so", f"{stem}.o")
        return Library(stem.with_suffix(".so"), self._runtime, numbers)


class EmulatedRunner(Runner):
    """Runs launches of numpy arrays in the emulation; bf16 is uint16, as kernels/problem has it.

    ``mutate``, where a test sets it, changes header and body before they are compiled; these are
    ``texts`` of a program.
    """

    def __init__(
        self,
        dialect: Dialect,
        compiler: Compiler,
        texts: Callable[[Dialect, Signature], tuple[str, str]] = product_texts,
    ) -> None:
        self.dialect = dialect
        self._compiler = compiler
        self._texts = texts
        self._libraries: dict[Signature, Library] = {}
        self._counters = np.zeros(0, np.int32)
        self.mutate: Callable[[tuple[str, str]], tuple[str, str]] | None = None

    def prepare(self, signatures: Iterable[Signature]) -> None:
        """Compile what is to run, on all processors."""
        new = sorted(set(signatures) - set(self._libraries), key=repr)
        jobs = os.cpu_count() or 1
        count = min(len(new), max(jobs, -(-len(new) // _MAX_PROGRAMS)))
        with ThreadPoolExecutor(jobs) as pool:
            shards = [new[shard::count] for shard in range(count)]
            for shard, library in zip(shards, pool.map(self._library, shards), strict=True):
                self._libraries.update(dict.fromkeys(shard, library))

    def run(self, launch: Launch) -> list[NDArray[Any]]:
        """Outputs of a launch; what it does not write stays NaN or -1."""
        signature = launch.signature()
        self.prepare([signature])
        outputs = [
            np.full(shape, -1, np.int32).view(_NUMPY[kind]) for _, shape, kind in launch.outputs
        ]
        self._libraries[signature].run(signature, launch, outputs)
        return list(outputs)

    def settle(self, arrays: list[NDArray[Any]]) -> None:
        """Nothing: numpy's arrays are."""

    def given(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """The array itself."""
        return values

    def counters(self, count: int) -> NDArray[np.int32]:
        """The same ones again, which launches must have left at zero."""
        if len(self._counters) < count:
            self._counters = np.zeros(max(count, SMALL_INPUT), np.int32)
        assert not self._counters.any()
        return self._counters

    def _library(self, signatures: Sequence[Signature]) -> Library:
        texts = {one: self._texts(self.dialect, one) for one in signatures}
        if self.mutate is not None:
            texts = {one: self.mutate(text) for one, text in texts.items()}
        programs = {one: (one, text) for one, text in texts.items()}
        return self._compiler.compile(self.dialect, programs)


class Recorder(Runner):
    """Runs nothing: remembers which programs a job would need."""

    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self.signatures: set[Signature] = set()

    def run(self, launch: Launch) -> list[NDArray[Any]]:
        """Zeros of the right shapes."""
        self.signatures.add(launch.signature())
        return [np.zeros(shape, _NUMPY[kind]) for _, shape, kind in launch.outputs]

    def settle(self, arrays: list[NDArray[Any]]) -> None:
        """Nothing: numpy's arrays are."""

    def given(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """The array itself."""
        return values

    def counters(self, count: int) -> NDArray[np.int32]:
        """Zeros, of as many as never lie in Metal's constant address space."""
        return np.zeros(max(count, SMALL_INPUT), np.int32)
