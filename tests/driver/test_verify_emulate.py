"""Emitted assembly in the emulators, by the artifact's launch records: sound kernels pass, planted faults do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mmcompile.driver.verify import list_units, verify_artifact
from mmcompile.driver.verify_emulate import Assembly, EmulatorRunner, Job, list_jobs
from mmcompile.driver.verify_run import run_check
from mmcompile.runtime.artifact import open_artifact

QUANTIZED = {"quantization": "nvfp4", "targets": ("sm90", "gfx950")}
SKINNY, GEMM = "linear_nvfp4_skinny16_bf16_64x48*", "linear_nvfp4_gemm64_bf16_64x48*"
PIPELINED = "linear_nvfp4_gemm64_bf16_64x128*"
Mutation = Callable[[str], str]


def find_job(folder: Path, target: str, pattern: str) -> Job:
    """The first job of a kernel."""
    artifact = open_artifact(folder)
    units = list_units(artifact, target, False, pattern)
    return list_jobs(artifact, [(u.target, u.key, u.check) for u in units])[0]


def judge(job: Job, mutate: Mutation = str) -> str:
    """The failure of a job whose texts were changed, "" if the emulator finds nothing wrong."""
    assemblies = {}
    for name, assembly in job.assemblies.items():
        text = mutate(assembly.text)
        assert mutate is str or text != assembly.text, "the mutation found nothing to change"
        assemblies[name] = Assembly(text, assembly.binary)
    return run_check(job.check, EmulatorRunner(assemblies)).failure


def delete(pattern: str, limit: int = 0) -> Mutation:
    """Remove what matches."""
    return lambda text: re.sub(pattern, "", text, count=limit, flags=re.MULTILINE)


def substitute(pattern: str, replacement: str, limit: int = 0) -> Mutation:
    """Replace what matches."""
    return lambda text: re.sub(pattern, replacement, text, count=limit, flags=re.MULTILINE)


def swap(one: str, other: str) -> Mutation:
    """Exchange two spellings everywhere."""
    return lambda text: text.replace(one, "\0").replace(other, one).replace("\0", other)


FAULTS: dict[str, tuple[str, str, Mutation, str]] = {
    "sm90 dropped scale": ("sm90", SKINNY, delete(r"mul\.rn\.bf16x2 (%r\d+), \1, %r\d+;"), "relative error"),
    "sm90 missing barriers": ("sm90", SKINNY, delete(r"^\s*bar\.sync\s+0;"), "race|uninitialised"),
    "sm90 bound off by one": (
        "sm90", SKINNY, substitute(r"setp\.lt\.s32(\s+%p\d+, %r\d+, %r\d+;)", r"setp.le.s32\1"),
        "out of bounds|uninitialised",
    ),
    "sm90 swapped nibbles": ("sm90", SKINNY, swap("0x000F000F", "0x00F000F0"), "relative error"),
    "sm90 wrong swizzle": ("sm90", GEMM, substitute(r"(xor\.b32\s+%r\d+, %r\d+), 64;", r"\1, 32;"), "."),
    "sm90 missing wait": (
        "sm90", PIPELINED, delete(r"^\s*cp\.async\.wait_group\s+.*;"), "race|in flight|uninitialised",
    ),
    "sm90 missing wgmma wait": (
        "sm90", GEMM, delete(r"^\s*wgmma\.wait_group\.sync\.aligned\s+.*;"), "race|in flight|uninitialised|relative",
    ),
    "gfx950 dropped scale": ("gfx950", SKINNY, delete(r"^\s*v_pk_mul_f32 .*op_sel_hi:\[0,1\]$"), "relative error"),
    "gfx950 missing barriers": ("gfx950", SKINNY, delete(r"^\s*s_barrier$"), "race|uninitialised"),
    "gfx950 missing waits": (
        "gfx950", SKINNY, delete(r"^\s*s_waitcnt lgkmcnt\(0\)$"), "in flight|race|uninitialised",
    ),
    "gfx950 missing load waits": ("gfx950", SKINNY, delete(r"^\s*s_waitcnt vmcnt\(\d+\)$"), "in flight"),
    "gfx950 bound off by one": (
        "gfx950", SKINNY, substitute(r"v_cmp_gt_i32(_e\d+ (?:vcc|s\[\d+:\d+\]), s12, v\d+)", r"v_cmp_ge_i32\1"),
        "out of bounds|uninitialised|overwritten|must not",
    ),
    "gfx950 swapped codes": ("gfx950", SKINNY, swap("op_sel:[1,0,0]", "op_sel:[0,1,0]"), "relative error"),
    "gfx950 scale's mantissa dropped": (
        # What Triton's dot_scaled does with e4m3 scales: the conversion uses only the exponent of its scale.
        "gfx950", SKINNY, substitute(r"(v_cvt_scalef32_pk_f32_fp8 v\[\d+:\d+\], v\d+), 1\.0", r"\1, 0.5"),
        "relative error",
    ),
}  # fmt: skip


@pytest.fixture(scope="session")
def artifact(tiny: Callable[..., Path]) -> Path:
    return tiny(**QUANTIZED)


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(artifact: Path, name: str) -> None:
    target, pattern, mutate, expected = FAULTS[name]
    failure = judge(find_job(artifact, target, pattern), mutate)
    assert failure, f"{name} was not noticed"
    assert re.search(expected, failure), failure


@pytest.mark.parametrize("target", ["sm90", "gfx950"])
@pytest.mark.parametrize("pattern", [SKINNY, GEMM])
def test_the_same_kernels_without_faults_pass(artifact: Path, target: str, pattern: str) -> None:
    assert judge(find_job(artifact, target, pattern)) == ""


def test_unknown_instructions_are_named(artifact: Path) -> None:
    job = find_job(artifact, "sm90", SKINNY)
    failure = judge(job, lambda text: text.replace("shl.b32", "shq.b32"))
    assert re.search(r"unknown instruction: shq\.b32 \(\d+ times\) at line \d+", failure), failure


def test_equal_programs_run_once(artifact: Path) -> None:
    opened = open_artifact(artifact)
    units = list_units(opened, "sm90", True, "rms_norm*")
    doubled = [(t, u.key, u.check) for u in units for t in ("sm90", "sm90")]
    assert len(list_jobs(opened, doubled)) == len({u.key for u in units})


def test_a_launch_record_that_lies_is_found(artifact: Path) -> None:
    """Less shared memory than the kernel uses."""
    job = find_job(artifact, "sm90", SKINNY)
    short = {
        name: replace(a, binary=a.binary.model_copy(update={"shared": a.binary.shared // 2}))
        for name, a in job.assemblies.items()
    }
    assert "out of bounds" in run_check(job.check, EmulatorRunner(short)).failure


@pytest.mark.slow
def test_verdicts_hold_every_proof(artifact: Path) -> None:
    verdicts = verify_artifact(artifact, kernel_pattern="add_rms_norm*", quick=True)
    assert {v.target for v in verdicts} == {"sm90", "gfx950"}
    for verdict in verdicts:
        assert verdict.verdict == "ok", verdict.reason
        assert verdict.proofs == ("assembled", "ledger", "interpreter", "emulator")
        (record,) = verdict.emulations
        assert record.instructions > 0 and record.covered > 0.9
