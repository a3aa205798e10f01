"""The emulation runs right kernels right, and names the line of what a wrong one does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pion_vllm_mlx.kernels.device_source import CUDA, METAL, Dialect, Launch, Signature
from tests.metal_emulation.emulation import COMPILER, CompileFault, Compiler, KernelFault

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")

Values = NDArray[np.float32]
Run = Callable[..., Values]

HEADER = """
inline float4 four(const device float* p) { return *(const device float4*)(p); }
struct Pair { float left; float right; };
"""
LANE = "const uint i = thread_index_in_threadgroup;\n"
SHARED = LANE + "threadgroup float tile[64];\n"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
# Each body reads inp f32 [64] and writes out f32 [64]; two simdgroups a threadgroup.
BODIES = {
    "copy": LANE + "out[i] = inp[i];",
    "reverse": SHARED + "tile[i] = inp[i];\n" + BARRIER + "out[i] = tile[63 - i];",
    "sums": LANE + "out[i] = simd_sum(inp[i]) + simd_max(inp[i]) - simd_min(inp[i]);",
    "shuffles": LANE
    + "out[i] = simd_shuffle_xor(inp[i], ushort(5)) + 100 * simd_shuffle(inp[i], ushort(3))\n"
    + "+ 1000 * simd_shuffle_down(inp[i], ushort(1)) + simd_broadcast_first(inp[i]);",
    "vectors": LANE
    + "const float4 v = four(inp + i / 4 * 4) * 2.0f + float4(1.0f);\n"
    + "out[i] = i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;",
    "types": LANE
    + "const half h = half(inp[i]); const bfloat16_t b = bfloat16_t(inp[i]);\n"
    + "out[i] = i % 2 ? float(h) : float(b);",
    "within a simdgroup": SHARED
    + "tile[i] = inp[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = tile[i ^ 1];",
    "no barrier": SHARED + "tile[i] = inp[i];\nout[i] = tile[63 - i];",
    "no simdgroup barrier": SHARED + "tile[i] = inp[i];\nout[i] = tile[i ^ 1];",
    "simdgroup barrier for a threadgroup": SHARED
    + "tile[i] = inp[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nout[i] = tile[63 - i];",
    "written while read": SHARED
    + "tile[i] = inp[i];\n"
    + BARRIER
    + "const float x = tile[(i + 1) % 64];\n"
    + "tile[i] = x;\n"
    + BARRIER
    + "out[i] = tile[i];",
    "all write one": SHARED + "tile[0] = inp[i];\n" + BARRIER + "out[i] = tile[0];",
    "divergent barrier": SHARED + "if (i < 40) " + BARRIER + "out[i] = inp[i];",
    "two barriers": SHARED
    + "if (i < 32) {\n"
    + BARRIER
    + "} else {\n"
    + BARRIER
    + "}\nout[i] = 0;",
    "divergent sum": LANE + "out[i] = 0;\nif (i % 2) out[i] = simd_sum(inp[i]);",
    "uninitialized": SHARED + "if (inp[i] > 1e9f) tile[i] = 1;\nout[i] = tile[i];",
    "read behind": LANE + "out[i] = inp[i + 1];",
    "read before": LANE + "out[i] = inp[int(i) - 1];",
    "write behind": LANE + "out[i * 2] = inp[i];",
    "tile overrun": SHARED + "tile[i + 4000] = inp[i];\nout[i] = tile[i];",
    "write to an input": LANE + "((device float*)inp)[i] = 1;\nout[i] = 0;",
    "read of an output": LANE + "out[i] = out[63 - i];",
    "misaligned": LANE + "out[i] = four(inp + 1).x;",
    "vector behind": LANE + "out[i] = four(inp + i / 4 * 4 + 4).w;",
    "struct behind": LANE + "const Pair p = ((const device Pair*)inp)[i];\nout[i] = p.right;",
}


TELL = """
parts[blockIdx.x * 64 + threadIdx.x] = inp[threadIdx.x];
__threadfence();
__syncthreads();
__shared__ unsigned before;
if (threadIdx.x == 0) {
  before = atomicInc((unsigned*)counters, 2);
  __threadfence();
}
__syncthreads();
if (before == 2) out[threadIdx.x] = parts[63 - threadIdx.x] + parts[64 + threadIdx.x];
"""


def signature(name: str) -> Signature:
    return Signature(name, (), (), (("inp", "f32", False),), (("out", "f32"),))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a body by name on 64 values, as one threadgroup or more."""
    compiler = Compiler(tmp_path_factory.mktemp("emulation"))
    texts = {name: (HEADER, f'#line 1 "{name}.metal"\n{text}') for name, text in BODIES.items()}
    library = compiler.compile(METAL, {name: (signature(name), texts[name]) for name in texts})

    def launch(name: str, given: Values, groups: int = 1) -> Values:
        out = np.full(64, np.nan, np.float32)
        launched = Launch(
            *(name, (), ()), (("inp", given),), (("out", (64,), "f32"),), (groups, 1, 1), 64
        )
        library.run(name, launched, [out])
        return out

    return launch


@pytest.fixture
def given() -> Values:
    return np.random.default_rng().standard_normal(64).astype(np.float32)


def test_threads_copy_and_exchange_through_threadgroup_memory(run: Run, given: Values) -> None:
    assert (run("copy", given) == given).all()
    assert (run("reverse", given) == given[::-1]).all()
    assert (run("reverse", given, groups=3) == given[::-1]).all()
    expected = given.reshape(-1, 2)[:, ::-1].reshape(-1)
    assert (run("within a simdgroup", given) == expected).all()


def test_simdgroup_operations_stay_in_their_simdgroup(run: Run, given: Values) -> None:
    halves = given.reshape(2, 32)
    expected = halves.sum(1) + halves.max(1) - halves.min(1)
    np.testing.assert_allclose(run("sums", given), np.repeat(expected, 32), atol=1e-5)
    lanes = np.arange(32)
    down = np.where(lanes < 31, lanes + 1, 31)
    expected = halves[:, lanes ^ 5] + 100 * halves[:, 3:4] + 1000 * halves[:, down] + halves[:, :1]
    np.testing.assert_allclose(run("shuffles", given), expected.reshape(-1), rtol=1e-5)


def test_vectors_and_sixteen_bit_types_round_as_they_should(run: Run, given: Values) -> None:
    np.testing.assert_allclose(run("vectors", given), given * 2 + 1, rtol=1e-6)
    found = run("types", given)
    assert (found[1::2] == given[1::2].astype(np.float16)).all()
    assert (found[::2].view(np.uint32) & 0xFFFF == 0).all()
    np.testing.assert_allclose(found[::2], given[::2], rtol=2**-8)


def test_threadgroup_memory_nobody_wrote_is_not_a_number(run: Run, given: Values) -> None:
    run("reverse", given)
    assert np.isnan(run("uninitialized", given)).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no barrier", r"memory (read that another thread wrote|written that another thread read)"),
        ("no simdgroup barrier", "race: threadgroup memory"),
        ("simdgroup barrier for a threadgroup", "race: threadgroup memory"),
        ("written while read", "written that another thread read|read that another thread wrote"),
        ("all write one", "two threads write the same threadgroup memory"),
        ("divergent barrier", r"barrier at divergent barrier.metal:3 reached by 40 of 64 threads"),
        ("two barriers", r"barrier at two barriers.metal:\d reached by 32 of 64 threads"),
        ("divergent sum", r"operation at divergent sum.metal:3 reached by 16 of 32 threads"),
        ("read behind", r"read out of bounds \(byte 256 of parameter 0, which has 256\)"),
        ("read before", r"read out of bounds \(byte -4 of parameter 0, which has 256\)"),
        ("write behind", r"write out of bounds \(byte 256 of parameter 1, which has 256\)"),
        ("tile overrun", "write out of bounds"),
        ("write to an input", "write to an input"),
        ("read of an output", "read of an output"),
        ("misaligned", "misaligned access"),
        ("vector behind", "read out of bounds"),
        ("struct behind", "read out of bounds"),
    ],
)
def test_what_a_wrong_kernel_does_is_a_fault(
    run: Run, given: Values, name: str, message: str
) -> None:
    with pytest.raises(KernelFault, match=message) as caught:
        run(name, given)
    assert f"{name}.metal:" in str(caught.value)
    assert (run("copy", given) == given).all(), "a fault is over with its launch"


def test_a_race_names_both_lines(run: Run, given: Values) -> None:
    with pytest.raises(KernelFault, match=r"no barrier.metal:(3|4).* and .*no barrier.metal:(3|4)"):
        run("no barrier", given)


@pytest.mark.parametrize("dialect", [METAL, CUDA], ids=["metal", "cuda"])
def test_a_text_that_is_not_valid_is_refused_with_its_line(
    dialect: Dialect, tmp_path: Path
) -> None:
    texts = ("", '#line 7 "bad.metal"\nout[0] = missing[0];')
    with pytest.raises(CompileFault, match=r"bad.metal:7.*missing"):
        Compiler(tmp_path).compile(dialect, {"bad": (signature("bad"), texts)})


def told(text: str, given: Values, folder: Path) -> tuple[Values, NDArray[np.int32]]:
    """Three threadgroups, the last of which reads what the others wrote."""
    counters = np.zeros(8, np.int32)
    launch = Launch(
        *("tell", (), ()),
        (("inp", given), ("counters", counters)),
        (("out", (64,), "f32"), ("parts", (192,), "f32")),
        *((3, 1, 1), 64, ("counters", "parts")),
    )
    programs = {"tell": (launch.signature(), ("", f'#line 1 "tell.cu"{text}'))}
    outputs = [np.full(64, np.nan, np.float32), np.full(192, np.nan, np.float32)]
    Compiler(folder).compile(CUDA, programs).run("tell", launch, outputs)
    return outputs[0], counters


def test_the_last_threadgroup_reads_what_the_others_wrote(given: Values, tmp_path: Path) -> None:
    out, counters = told(TELL, given, tmp_path)
    assert (out == given[::-1] + given).all()
    assert not counters.any()


@pytest.mark.parametrize(
    ("left_out", "which", "message"),
    [
        ("__threadfence();", 0, "exchanged memory counted before a fence"),
        ("__syncthreads();", 0, "exchanged memory written that another thread counted"),
        ("__threadfence();", 1, "exchanged memory read before a fence"),
        ("__syncthreads();", 1, "race: threadgroup memory"),
    ],
)
def test_what_threadgroups_tell_each_other_is_fenced(
    left_out: str, which: int, message: str, given: Values, tmp_path: Path
) -> None:
    parts = TELL.split(left_out)
    text = left_out.join(parts[: which + 1]) + ";" + left_out.join(parts[which + 1 :])
    with pytest.raises(KernelFault, match=message) as caught:
        told(text, given, tmp_path)
    assert "tell.cu:" in str(caught.value)


def test_only_what_is_exchanged_is_counted(given: Values, tmp_path: Path) -> None:
    text = TELL.replace("(unsigned*)counters", "(unsigned*)inp")
    with pytest.raises(KernelFault, match="atomic outside of exchanged memory"):
        told(text, given, tmp_path)
