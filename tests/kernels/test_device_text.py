"""What a compiler is given of the kernels' files: little, the same program, and its true lines."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pion_vllm_mlx.kernels import device_text, reference
from pion_vllm_mlx.kernels.device_kernels import DeviceKernels
from pion_vllm_mlx.kernels.device_source import CUDA, METAL, Dialect, Signature
from pion_vllm_mlx.kernels.device_text import (
    body,
    files_of,
    header,
    program_name,
    stripped,
    text_of,
)
from pion_vllm_mlx.kernels.device_text_used import pieces_of, used
from tests.kernels import device_cases
from tests.metal_emulation.emulation import (
    COMPILER,
    CompileFault,
    Compiler,
    EmulatedRunner,
    Recorder,
    product_texts,
)

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs g++")
# A dialect whose compiler finds no file.
WITHOUT_FILES = replace(CUDA, includes=False)
TENSORS = {"stored": "bf16", "q_type": "fp32", "head_map": "groups of 4"}


def drive(kernels: DeviceKernels, rng: np.random.Generator) -> list[Any]:
    """Launches most programs: dense, batched, listed, and blocks that are chosen."""
    row = device_cases.dense_row(**TENSORS)
    asked = {**row, "num_queries": None, "block_tokens": 16, "top": 3}
    job = device_cases.blocks_job(asked, rng)
    statistics = kernels.block_statistics(job.prefix, 16, job.start, "quest")
    return [
        kernels.attend(device_cases.dense_job(row, rng)),
        kernels.attend(device_cases.dense_job({**row, "num_queries": 17}, rng)),
        kernels.attend_sparse(device_cases.sparse_job({**asked, "stored": "fp16"}, rng)),
        kernels.attend_best_blocks(device_cases.best_blocks_job(job, statistics)),
    ]


def programs(dialect: Dialect) -> list[Signature]:
    recorder = Recorder(dialect)
    drive(DeviceKernels(recorder), np.random.default_rng())
    return sorted(recorder.signatures, key=repr)


def test_a_text_for_cuda_names_files_and_holds_none() -> None:
    for signature in programs(CUDA):
        given = header(CUDA, signature) + body(CUDA, signature)
        named = [Path(name) for name in re.findall(r'#include "(.+)"', given)]
        assert [one.stem for one in named] == [*files_of(CUDA, signature), signature.kernel]
        assert all(one.is_file() for one in named)
        assert len(re.sub('"/.+?"', "", given)) < 600


@pytest.mark.parametrize("dialect", [METAL, WITHOUT_FILES], ids=["metal", "no files"])
def test_a_text_that_holds_files_has_no_comments_and_no_indentation(dialect: Dialect) -> None:
    for signature in programs(dialect):
        given = header(dialect, signature) + body(dialect, signature)
        assert "//" not in given and "/*" not in given
        assert not re.search(r"^[ \t]|[ \t]$", given, re.MULTILINE)


@pytest.mark.parametrize("folder", ['a "quoted" one', "a\\slash", "gr\u00fc\u00dfe", "two\nlines"])
def test_files_in_a_folder_that_no_text_can_name_stand_in_the_text(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = programs(CUDA)[0]
    texts = {name: text_of(CUDA, name) for name in files_of(CUDA, signature)}
    monkeypatch.setattr(device_text.resources, "files", lambda package: Path("/tmp", folder))
    device_text.include_folder.cache_clear()
    try:
        given = header(CUDA, signature)
    finally:
        device_text.include_folder.cache_clear()
    assert '#include "' not in given
    assert texts and given == header(WITHOUT_FILES, signature)


@needs_compiler
def test_a_text_that_names_files_is_the_program_that_they_are(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    def as_given(dialect: Dialect, signature: Signature) -> tuple[str, str]:
        return header(dialect, signature), body(dialect, signature)

    kernels = DeviceKernels(EmulatedRunner(CUDA, Compiler(tmp_path), as_given))
    job = device_cases.dense_job(device_cases.dense_row(**TENSORS), rng)
    device_cases.assert_close(kernels.attend(job), reference.attend(job))


def test_every_line_of_a_stripped_text_is_the_line_that_it_was() -> None:
    text = "int a;  // one\n\n  // two\n  #if A // three\n    a  = 1;\n"
    assert stripped(text) == "int a;\n\n\n#if A\na  = 1;"


@needs_compiler
@pytest.mark.parametrize(
    ("dialect", "name", "wrong"),
    [
        (METAL, "rows", "inline float4 load4(const device half"),
        (METAL, "few_rows", "const int in_blocks ="),
        (CUDA, "rows", "__device__ inline float infinity()"),
        (CUDA, "group_rows", "__shared__ float group_top"),
        (WITHOUT_FILES, "group_rows", "__shared__ float group_top"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_error_names_the_line_of_the_file(
    dialect: Dialect, name: str, wrong: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    line = text_of(dialect, name).partition(wrong)[0].count("\n") + 1
    runner = EmulatedRunner(dialect, Compiler(tmp_path))
    runner.mutate = lambda texts: tuple(t.replace(wrong, f"missing {wrong}") for t in texts)  # type: ignore[assignment,return-value]
    with pytest.raises(CompileFault, match=rf"{name}\.{dialect.suffix}:{line}:"):
        drive(DeviceKernels(runner), rng)


def test_a_program_has_another_name_where_a_file_of_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signature = programs(CUDA)[0]
    before = program_name(CUDA, signature)
    assert before == program_name(CUDA, signature)
    monkeypatch.setattr(device_text, "text_of", lambda dialect, name: f"{text_of(dialect, name)} ")
    assert program_name(CUDA, signature) != before


def test_the_emulation_compiles_what_mlx_is_given() -> None:
    for signature in programs(METAL):
        assert product_texts(METAL, signature) == (header(METAL, signature), body(METAL, signature))


def test_a_text_holds_what_the_program_uses_and_no_more() -> None:
    scores = next(one for one in programs(METAL) if one.kernel == "block_scores")
    given = header(METAL, scores)
    assert "struct Summed" in given and "enum Param" in given
    for unused in ("Affine", "Paged", "EvenRows", "kMostChosen"):
        assert unused in text_of(METAL, "rows") and unused not in given


def test_what_is_not_used_leaves_empty_lines() -> None:
    texts = [
        "#if A\nenum Names {\nkFirst,\n};\n#endif\n\nstruct Gone {\nint a;\n};\nusing Row = int;",
        "template <int N>\ninline Row twice(int x) {\nif (x) {\nreturn N;\n}\nreturn x;\n}",
        "constexpr int kGone = twice<1>(2);\nfloat twice(float x) { return kFirst; }",
    ]
    kept = used(texts, "out[0] = twice<3>(a);")
    assert kept[0] == texts[0].replace("struct Gone {\nint a;\n};", "\n\n")
    assert kept[1] == texts[1]
    assert kept[2] == "\nfloat twice(float x) { return kFirst; }"
    assert used(texts, "Names a;")[1:] == ["\n" * 6, "\n"]
    for text in texts:
        assert "\n".join(piece.text for piece in pieces_of(text)) == text
