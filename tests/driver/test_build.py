"""The driver's build: determinism, sharing, the output folder, options and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

from mmcompile.core.errors import ArtifactError, LoweringError, MMError, UsageError
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.pack import claim_output, hash_files
from mmcompile.driver.verify import verify_artifact
from mmcompile.models import llama
from mmcompile.runtime.artifact import open_artifact

SMALL = {"weights": "random", "max_context": 128, "max_tokens": 64, "max_batch": 32, "workers": 1}


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of every file, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.slow
def test_equal_inputs_give_equal_bytes_whatever_the_number_of_workers(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    for run, workers in enumerate((1, 2)):
        monkeypatch.setenv("MMCOMPILE_CACHE", str(tmp_path / f"cache{run}"))
        options = BuildOptions(targets=("sm90", "gfx950"), dtype="float32", workers=workers)
        built.append(contents(build(f"{modules}:gated", tmp_path / f"run{run}" / "out", options)))
    assert built[0].keys() == built[1].keys()
    assert [name for name in built[0] if built[0][name] != built[1][name]] == []
    assert any(name.endswith(".cubin") for name in built[0]) and any(name.endswith(".hsaco") for name in built[0])


@pytest.mark.slow
def test_a_decoder_builds_to_the_same_bytes_twice(tmp_path: Path) -> None:
    options = BuildOptions(**SMALL, quantization="nvfp4")
    first, second = (contents(build("smollm2-tiny", tmp_path / name / "out", options)) for name in "ab")
    assert first == second
    other = contents(build("smollm2-tiny", tmp_path / "c" / "out", replace(options, seed=1)))
    assert {n for n in first if first[n] != other[n]} >= {"manifest.json", "weights/weights-00000.safetensors"}


@pytest.mark.slow
def test_layers_share_kernels(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llama.MODELS, "tiny-six", replace(llama.MODELS["smollm2-tiny"], num_layers=6))
    deep = build("tiny-six", tmp_path / "six", BuildOptions(**SMALL, targets=("sm90",)))
    two, six = (open_artifact(p).plan("sm90") for p in (tiny(quantization="none"), deep))
    assert two.kernels.keys() == six.kernels.keys()
    assert len(six.phases["decode"].launches) > 2 * len(two.phases["decode"].launches)


@pytest.mark.slow
def test_targets_share_a_directory_and_weights(tiny) -> None:
    artifact = open_artifact(tiny(quantization="none"))
    assert set(artifact.manifest.targets) == {"sm90", "gfx950"}
    assert [f for f in artifact.manifest.files if f.startswith("weights/")] == ["weights/weights-00000.safetensors"]
    weights = [{n for n, b in artifact.plan(t).buffers.items() if b.role == "weight"} for t in ("sm90", "gfx950")]
    assert weights[0] == weights[1]


def test_a_failed_build_leaves_nothing(modules: Path, tmp_path: Path) -> None:
    parent = tmp_path / "place"
    with pytest.raises(LoweringError):
        build(f"{modules}:running", parent / "out", BuildOptions(targets=("sm90",), strict=True, workers=1))
    assert list(parent.iterdir()) == []


def test_strict_names_the_operation_and_its_source_line(modules: Path, tmp_path: Path) -> None:
    with pytest.raises(LoweringError) as caught:
        build(f"{modules}:running", tmp_path / "out", BuildOptions(targets=("sm90",), strict=True, workers=1))
    line = next(i for i, t in enumerate(modules.read_text().splitlines(), 1) if "cumsum" in t)
    assert "aten.cumsum" in caught.value.what
    assert f"user_modules.py:{line}" in caught.value.where


def test_without_strict_the_operation_runs_by_its_reference(modules: Path, tmp_path: Path) -> None:
    out = build(f"{modules}:running", tmp_path / "out", BuildOptions(targets=("sm90",), workers=1))
    launches = open_artifact(out).plan("sm90").phases["forward"].launches
    reasons = [launch.reason for launch in launches if not launch.choices]
    assert [launch.op.split(".")[1] for launch in launches if not launch.choices] == ["cumsum"] and all(reasons)


def test_an_output_in_use_is_refused_and_force_replaces_it(modules: Path, tmp_path: Path) -> None:
    out, model = tmp_path / "out", f"{modules}:gated"
    build(model, out, BuildOptions())
    with pytest.raises(ArtifactError, match="is an artifact already.*--force"):
        build(model, out, BuildOptions())
    stray = out / "stray"
    stray.write_text("from the artifact before")
    build(model, out, BuildOptions(), force=True)
    assert not stray.exists() and open_artifact(out)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_is_no_artifact_is_never_replaced(modules: Path, tmp_path: Path, force: bool) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("words")
    with pytest.raises(ArtifactError, match="exists and is no artifact"):
        build(f"{modules}:gated", out, BuildOptions(), force=force)
    assert (out / "thesis.txt").read_text() == "words"


def test_a_running_build_keeps_others_away(tmp_path: Path) -> None:
    with claim_output(tmp_path / "out", False) as folder:
        refused = pytest.raises(ArtifactError, match=f"another build .process {os.getpid()}.")
        with refused, claim_output(tmp_path / "out", False):
            pass
        assert folder.is_dir()
    assert (tmp_path / "out").is_dir()


def test_the_lock_of_a_dead_build_is_taken_over(tmp_path: Path) -> None:
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    stale = tmp_path / ".out.building"
    stale.mkdir()
    (stale / "lock").write_text(gone.stdout.strip())
    (stale / "half-written").write_text("")
    with claim_output(tmp_path / "out", False) as folder:
        (folder / "whole").write_text("")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["whole"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_weights_may_be_left_out(tmp_path: Path) -> None:
    out = build("smollm2-tiny", tmp_path / "out", BuildOptions(**SMALL | {"weights": "none"}))
    manifest = open_artifact(out).manifest
    assert manifest.weights == "none"
    with safe_open(out / "weights" / "weights-00000.safetensors", framework="pt") as stored:
        assert list(stored.keys()) == ["cos_sin_table"]  # no parameter, so it is known


def test_the_manifest_lists_every_file(modules: Path, tmp_path: Path) -> None:
    out = build(f"{modules}:gated", tmp_path / "out", BuildOptions())
    assert open_artifact(out).manifest.files == hash_files(out)


def test_a_second_build_compiles_nothing(modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMCOMPILE_CACHE", str(tmp_path / "cache"))
    options = BuildOptions(targets=("sm90",), workers=1)
    first = build(f"{modules}:gated", tmp_path / "a", options)
    stored = contents(tmp_path / "cache")

    def refuse(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr("mmcompile.targets._toolchain.compile_family", refuse)
    second = build(f"{modules}:gated", tmp_path / "b", options)
    assert stored and contents(tmp_path / "cache") == stored
    assert contents(first / "kernels") == contents(second / "kernels")


def test_a_required_fusion_that_does_not_match_is_an_error(tmp_path: Path) -> None:
    options = BuildOptions(**SMALL, required=("linear_swiglu",))
    assert build("smollm2-tiny", tmp_path / "there", options)
    with pytest.raises(LoweringError, match="linear_swiglu"):
        build("smollm2-tiny", tmp_path / "missing", replace(options, disabled=("match_swiglu",)))
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("options", "near"),
    [
        ({"targets": ("sm9",)}, "sm90"),
        ({"quantization": "nvfp"}, "nvfp4"),
        ({"dtype": "bfloat"}, "bfloat16"),
        ({"weights": "rand"}, "random"),
    ],
)
def test_an_unknown_option_names_the_closest(options: dict[str, object], near: str) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{near}'"):
        BuildOptions(**options)


@pytest.mark.parametrize(
    ("model", "options", "near"),
    [
        ("smollm2-tinny", {}, "smollm2-tiny"),
        ("smollm2-tiny", {"required": ("linear_swigl",)}, "linear_swiglu"),
        ("smollm2-tiny", {"disabled": ("match_ropes",)}, "match_rope"),
    ],
)
def test_an_unknown_name_in_a_build_names_the_closest(
    tmp_path: Path, model: str, options: dict[str, object], near: str
) -> None:
    with pytest.raises(UsageError, match=f"did you mean '{near}'"):
        build(model, tmp_path / "out", BuildOptions(**SMALL, **options))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("page_size", [0, 7, 4, 48])
def test_a_page_size_that_no_kernel_takes_is_refused(page_size: int) -> None:
    with pytest.raises(UsageError, match="page_size"):
        BuildOptions(page_size=page_size)


@pytest.mark.parametrize("factory", ["gated", pytest.param("projected", marks=pytest.mark.slow)])
def test_the_module_door_builds_for_a_gpu_and_verifies(modules: Path, tmp_path: Path, factory: str) -> None:
    options = BuildOptions(targets=("sm90",), dtype="float32", strict=True, workers=1)
    out = build(f"{modules}:{factory}", tmp_path / "out", options)
    verdicts = verify_artifact(out, workers=1)
    assert verdicts and {v.verdict for v in verdicts} == {"ok"}, verdicts
    assert any(v.op.startswith("region.") for v in verdicts)
    assert all(v.proofs == ("assembled", "ledger", "interpreter", "emulator") for v in verdicts)


def test_a_missing_factory_is_named(modules: Path, tmp_path: Path) -> None:
    with pytest.raises(MMError, match="did you mean 'gated'"):
        build(f"{modules}:gate", tmp_path / "out", BuildOptions())
