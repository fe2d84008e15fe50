"""Verification of artifacts: sound ones pass, planted faults of every kind are found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.plan import Buffer, View, seal
from mmcompile.driver.verify import KernelVerdict, verify_artifact
from mmcompile.driver.verify_inputs import Case, describe_sequences, list_token_counts
from mmcompile.driver.verify_run import Memory
from mmcompile.runtime.artifact import open_artifact

QUANTIZED = {"quantization": "nvfp4", "targets": ("sm90",)}
PROOFS = ("assembled", "ledger", "interpreter", "emulator")


def rehash(folder: Path) -> None:
    """Make the manifest's hashes those of the files, as somebody who plants a fault on purpose would."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"] = {f: hashlib.sha256((folder / f).read_bytes()).hexdigest() for f in manifest["files"]}
    path.write_text(json.dumps(seal(manifest)))


def find_kernel(folder: Path, prefix: str) -> str:
    """Name of the first kernel that begins with ``prefix``."""
    return next(name for name in sorted(open_artifact(folder).plan("sm90").kernels) if name.startswith(prefix))


@pytest.fixture
def copy(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of the NVFP4 artifact to damage."""
    return Path(shutil.copytree(tiny(**QUANTIZED), tmp_path / "copy"))


def edit_source(folder: Path, kernel: str, old: str, new: str) -> None:
    """Replace every ``old`` in a kernel's emitted source and make the hashes fit."""
    path = folder / "kernels" / f"{kernel}.py"
    text = path.read_text()
    assert old in text, f"{kernel} holds no {old!r}"
    path.write_text(text.replace(old, new))
    rehash(folder)


def edit_plan(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the plan of sm90 and make the hashes fit."""
    path = folder / "plan.sm90.json"
    plan = json.loads(path.read_text())
    edit(plan)
    path.write_text(json.dumps(plan))
    rehash(folder)


def verify_one(folder: Path, kernel: str) -> list[KernelVerdict]:
    """Verdicts of the sources of the choices with a kernel, one case each."""
    return verify_artifact(folder, kernel_pattern=kernel, quick=True, workers=1, methods=("interpreter",))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "nvfp4"},
        {"quantization": "none"},
        {"quantization": "none", "dtype": "float32"},
        {"quantization": "none", "cache_dtype": "float8_e4m3fn"},
        {"quantization": "none", "cache_dtype": "nvfp4"},
    ],
    ids=["nvfp4", "bf16", "fp32", "fp8-cache", "nvfp4-cache"],
)
def test_every_kernel_of_a_sound_artifact_passes(tiny: Callable[..., Path], options: dict[str, Any]) -> None:
    steps: dict[str, list[tuple[int, int]]] = {}
    path = tiny(**options)

    def watch(step: str, detail: str, done: int, total: int) -> None:
        steps.setdefault(step, []).append((done, total))

    verdicts = verify_artifact(path, quick=True, progress=watch)
    assert [v for v in verdicts if v.verdict != "ok"] == []
    assert all(v.relative_error <= v.bound and v.cases == 1 for v in verdicts)
    for target in ("sm90", "gfx950"):
        kernels = open_artifact(path).plan(target).kernels
        for verdict in (v for v in verdicts if v.target == target):
            lanes = any(kernels[name].lanes for name in verdict.kernel.split(" + "))
            assert verdict.proofs == tuple(p for p in PROOFS if not (lanes and p == "interpreter")), verdict.kernel
        proven = {k for v in verdicts if v.target == target for k in v.kernel.split(" + ")}
        assert proven == kernels.keys()
    assert list(steps) == ["emulate", "verify"]
    for done in steps.values():
        assert done[-1][0] == done[-1][1] == len(done)
    assert len(steps["verify"]) < len(verdicts)


@pytest.mark.slow
def test_a_sound_kernel_passes_with_its_error(tiny: Callable[..., Path]) -> None:
    (verdict,) = verify_artifact(tiny(**QUANTIZED), kernel_pattern="linear_nvfp4_skinny16*_swiglu_*", workers=1)
    assert (verdict.verdict, verdict.op, verdict.proofs) == ("ok", "mm.linear_nvfp4", PROOFS)
    assert verdict.cases == 3 and 0 < verdict.relative_error <= verdict.bound < 0.01


@pytest.mark.parametrize(
    ("prefix", "old", "new"),
    [
        ("linear_nvfp4_skinny16_bf16_64x128_residual", "value = (value.to(tl.float32) + other.to(tl.float32))",
         "value = (value.to(tl.float32))"),
        ("linear_nvfp4_skinny16_bf16_80x64", "return row, column < N", "return row, column < N - 1"),
        ("linear_nvfp4_skinny16_bf16_80x64", "(tl.arange(0, 8) * 4)", "((tl.arange(0, 8) ^ 1) * 4)"),
        ("linear_nvfp4_skinny16_bf16_80x64", "scale.to(tl.float32) * 0.001953125",
         "scale.to(tl.float32) * 0.0 + 0.001953125"),
        ("rms_norm_bf16_64", "EPS = tl.constexpr(1e-05)", "EPS = tl.constexpr(0.5)"),
        ("embedding_bf16_64", "mask=column < WIDTH)", "mask=column < WIDTH - 1)"),
        ("paged_attention_prefill", "position[None, :] <= offset", "position[None, :] < offset"),
    ],
    ids=["no-residual", "short-mask", "swapped-nibbles", "no-scale", "wrong-eps", "missing-store", "mask-off-by-one"],
)  # fmt: skip
def test_a_fault_in_a_source_is_found(copy: Path, prefix: str, old: str, new: str) -> None:
    kernel = find_kernel(copy, prefix)
    edit_source(copy, kernel, old, new)
    verdicts = verify_one(copy, kernel)
    assert {v.verdict for v in verdicts} == {"failed"}
    assert all(kernel in v.reason and "tokens=" in v.reason and "interpreter" not in v.proofs for v in verdicts)


@pytest.mark.parametrize(("grid", "what"), [("5", "reference"), ("0", "empty grid")])
def test_a_wrong_grid_is_found(copy: Path, grid: str, what: str) -> None:
    kernel = find_kernel(copy, "linear_nvfp4_skinny16_bf16_80x64")

    def edit(plan: dict[str, Any]) -> None:
        for phase in plan["phases"].values():
            for launch in phase["launches"]:
                for record in (k for c in launch["choices"] for k in c["kernels"] if k["kernel"] == kernel):
                    record["grid"][0] = grid

    edit_plan(copy, edit)
    (verdict,) = verify_one(copy, kernel)
    assert verdict.verdict == "failed" and what in verdict.reason


def test_a_write_outside_the_results_is_found(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")
    path = copy / "kernels" / f"{kernel}.py"
    line = next(line for line in path.read_text().splitlines() if line.strip().startswith("tile_"))
    call = f"{line}\n    tl.store(x + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1.0)"
    edit_source(copy, kernel, line, call)
    verdicts = verify_one(copy, kernel)
    assert {v.verdict for v in verdicts} == {"failed"} and "must not" in verdicts[0].reason


def test_a_promise_that_the_ledger_does_not_keep_is_found(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")
    edit_plan(copy, lambda plan: plan["kernels"][kernel]["expectations"].update({"no.such.instruction": True}))
    verdict = verify_one(copy, kernel)[0]
    assert verdict.verdict == "failed" and verdict.proofs == ("interpreter",)
    assert "no.such.instruction" in verdict.reason


def test_a_ledger_that_is_not_the_assemblys_is_found(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")

    def edit(plan: dict[str, Any]) -> None:
        (binary,) = plan["kernels"][kernel]["binaries"].values()
        binary["ledger"]["made.up"] = 3

    edit_plan(copy, edit)
    assert "recorded ledger" in verify_one(copy, kernel)[0].reason


def test_a_kernel_for_lanes_is_left_to_the_emulator(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")
    edit_plan(copy, lambda plan: plan["kernels"][kernel].update({"lanes": True}))
    verdict = verify_one(copy, kernel)[0]
    assert verdict.verdict == "skipped" and "use the emulator" in verdict.reason and "interpreter" not in verdict.proofs
    both = verify_artifact(copy, kernel_pattern=kernel, quick=True, workers=1)[0]
    assert both.verdict == "ok" and both.proofs == ("assembled", "ledger", "emulator")


def test_a_limit_that_is_exceeded_is_found(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")

    def edit(plan: dict[str, Any]) -> None:
        (binary,) = plan["kernels"][kernel]["binaries"].values()
        binary["shared"] = 1 << 20

    edit_plan(copy, edit)
    verdict = verify_one(copy, kernel)[0]
    assert verdict.verdict == "failed" and "shared memory" in verdict.reason


def test_a_binary_that_the_plan_does_not_name_is_refused(copy: Path) -> None:
    kernel = find_kernel(copy, "rms_norm_bf16_64")
    path = copy / "kernels" / f"{kernel}.sm_90a.cubin"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="damaged"):
        verify_one(copy, kernel)
    rehash(copy)
    with pytest.raises(ArtifactError, match="not the binary"):
        verify_one(copy, kernel)


def test_unknown_names_are_refused(tiny: Callable[..., Path]) -> None:
    path = tiny(**QUANTIZED)
    with pytest.raises(UsageError, match="did you mean 'sm90'"):
        verify_artifact(path, targets=["sm9"])
    with pytest.raises(UsageError, match="no kernel of the artifact matches 'conv"):
        verify_artifact(path, kernel_pattern="conv*")


def test_sequences_are_consistent_and_their_tails_garbage() -> None:
    case = Case({"tokens": 6, "batch": 3, "max_blocks": 4, "pages": 8}, lengths=(9, 20, 0), new=(2, 4, 0))
    made = describe_sequences(case, 8, torch.Generator().manual_seed(0))
    assert made["query_start"].tolist() == [0, 2, 6, 6]
    assert made["positions"].tolist() == [7, 8, 16, 17, 18, 19]
    table = made["block_table"]
    pages = [*table[0, :2].tolist(), *table[1, :3].tolist()]
    assert len(set(pages)) == 5 and all(0 <= p < 8 for p in pages) and pages != sorted(pages)
    assert all(not 0 <= p < 8 for p in [*table[0, 2:].tolist(), *table[1, 3:].tolist(), *table[2].tolist()])
    expected = [int(table[0, p // 8]) * 8 + p % 8 for p in (7, 8)]
    assert made["slot_mapping"][:2].tolist() == expected and int(made["slot_mapping"][2]) == -1
    assert len(set(made["all_slots"].tolist())) == 29


@pytest.mark.parametrize(
    ("above", "upper", "quick", "expected"),
    [(0, 16, False, [1, 3, 16]), (16, 512, False, [17, 33]), (64, 512, False, [65, 81]), (16, 16, False, []),
     (0, 16, True, [3]), (0, 2, False, [1])],
)  # fmt: skip
def test_token_counts_cover_tails(above: int, upper: int, quick: bool, expected: list[int]) -> None:
    assert list_token_counts(above, upper, quick) == expected


def test_fresh_memory_is_poison() -> None:
    buffers = {n: Buffer(name=n, shape=("rows", 3), dtype=n, role="temporary") for n in ("bfloat16", "int32")}
    memory = Memory(buffers, {"rows": 2})
    views = {n: memory.view(View(buffer=n, shape=("rows", 3), strides=(3, 1))) for n in buffers}
    assert bool(views["bfloat16"].isnan().all()) and bool((views["int32"] < -1000).all())
    assert views["int32"].storage_offset() > 0
