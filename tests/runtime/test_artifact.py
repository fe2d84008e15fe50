"""Every defect of an artifact is refused, with the file and what to do; nothing for this device is said clearly."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmcompile.core.errors import ArtifactError, MMError, ToolchainError, UsageError
from mmcompile.core.plan import Binary, Kernel, Manifest, Plan, seal
from mmcompile.runtime import load
from mmcompile.runtime.selection import match_architecture, select_target

Make = Callable[..., Path]


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


@pytest.fixture
def with_kernel(make_artifact: Make, tmp_path: Path, rewrite_manifest: Callable[..., None]) -> Path:
    """A CPU artifact that carries kernel files too."""
    (tmp_path / "kernels").mkdir()
    for name in ("k.py", "k.ptx", "k.cubin"):
        (tmp_path / "kernels" / name).write_bytes(b"kernel " + name.encode())
    return make_artifact(tmp_path)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(bytes(data))


@pytest.mark.parametrize(
    "file",
    [
        "plan.cpu.json",
        "weights/model-00001.safetensors",
        "report.html",
        "kernels/k.py",
        "kernels/k.ptx",
        "kernels/k.cubin",
    ],
)
@pytest.mark.parametrize("position", [0, -1])
def test_flipped_byte(with_kernel: Path, file: str, position: int) -> None:
    flip(with_kernel / file, position)
    with pytest.raises(ArtifactError, match="damaged") as raised:
        load(with_kernel, device="cpu")
    assert raised.value.where.endswith(file) and raised.value.fix


@pytest.mark.parametrize("file", ["plan.cpu.json", "kernels/k.cubin", "weights/model-00001.safetensors"])
def test_missing_file(with_kernel: Path, file: str) -> None:
    (with_kernel / file).unlink()
    with pytest.raises(ArtifactError, match="missing") as raised:
        load(with_kernel, device="cpu")
    assert raised.value.where.endswith(file) and raised.value.fix


def test_no_artifact(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no such directory"):
        load(tmp_path / "nothing")
    with pytest.raises(ArtifactError, match=r"no manifest\.json"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "\udcff"])
def test_manifest_is_not_json(copy: Path, text: str) -> None:
    (copy / "manifest.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ArtifactError, match="JSON") as raised:
        load(copy)
    assert raised.value.where.endswith("manifest.json")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.update(schema_version=2), "schema version 2"),
        (lambda m: m.pop("schema_version"), "schema version None"),
        (lambda m: m.update(surprise=1), "surprise: Extra inputs are not permitted"),
        (lambda m: m["model"].update(surprise=1), r"model\.surprise"),
        (lambda m: m.pop("model"), "model: Field required"),
        (lambda m: m.update(kind="encoder"), "kind: Input should be"),
        (lambda m: m.update(targets={}), "holds no target"),
        (lambda m: m["targets"]["cpu"].update(plan="other.json"), "not in the manifest's list"),
        (lambda m: m.update(cache=None), "needs a cache record"),
        (lambda m: m["files"].update({"../outside": "0"}), "outside the artifact"),
    ],
)
def test_manifest_defects(copy: Path, edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    record = json.loads((copy / "manifest.json").read_text())
    edit(record)
    (copy / "manifest.json").write_text(json.dumps(seal(record)))
    with pytest.raises(ArtifactError, match=message) as raised:
        load(copy, device="cpu")
    assert raised.value.fix


def change_plan(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        plan = json.loads((root / "plan.cpu.json").read_text())
        edit(plan)
        (root / "plan.cpu.json").write_text(json.dumps(plan))

    return change


def change_weights(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "weights" / "model-00001.safetensors"
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)

    return change


def launch(plan: dict[str, Any], phase: str, index: int) -> dict[str, Any]:
    return plan["phases"][phase]["launches"][index]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_plan(lambda p: p.update(schema_version=0)), "schema version 0"),
        (change_plan(lambda p: p.update(target="sm90")), "for target 'sm90', not 'cpu'"),
        (change_plan(lambda p: p["buffers"].pop("prefill.x")), "does not define"),
        (change_plan(lambda p: p["phases"].pop("decode")), "phase 'decode' is missing"),
        (change_plan(lambda p: launch(p, "decode", 0).update(op="mm.embeding")), "unknown op 'embeding'"),
        (change_plan(lambda p: launch(p, "decode", 0).update(op="cublas.gemm")), "unknown operation"),
        (change_plan(lambda p: launch(p, "decode", 1)["attributes"].update(epsilon=1)), "no parameter 'epsilon'"),
        (change_plan(lambda p: launch(p, "decode", 1)["attributes"].clear()), "needs 'eps'"),
        (change_plan(lambda p: launch(p, "load", 1).update(op="aten.cat.nothing")), "unknown operation"),
        (change_plan(lambda p: launch(p, "load", 1)["attributes"].update(args=[{"what": 1}])), "malformed argument"),
        (change_plan(lambda p: launch(p, "load", 0)["attributes"].update(outputs=["s9"])), "malformed region"),
        (change_plan(lambda p: p["buffers"]["embed_scaled"].update(dtype="bfloat16")), "the plan says bfloat16"),
        (change_plan(lambda p: p["buffers"]["embed"].update(dtype="float17")), "float17"),
        (change_weights(lambda w: w.pop("embed")), "1 weights are in no weight file, e.g. 'embed'"),
        (change_weights(lambda w: w.update(embed=w["embed"].bfloat16())), "weight 'embed' is torch.bfloat16"),
        (change_weights(lambda w: w.update(embed=w["embed"][:-1].clone())), r"the plan says float32 \[101, 32\]"),
        (lambda root: (root / "weights" / "model-00001.safetensors").write_bytes(b"x" * 99), "not a safetensors file"),
    ],
)
def test_inconsistent_artifact(
    copy: Path, rewrite_manifest: Callable[..., None], change: Callable[[Path], None], message: str
) -> None:
    """Damage with matching hashes: what a faulty builder would write."""
    change(copy)
    rewrite_manifest(copy)
    with pytest.raises(ArtifactError, match=message) as raised:
        load(copy, device="cpu").generate([[1, 2]])
    assert raised.value.fix


def test_without_weights(make_artifact: Make, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds no weights") as raised:
        load(make_artifact(tmp_path, weights="none"), device="cpu")
    assert raised.value.fix


def test_other_target(make_artifact: Make, tmp_path: Path) -> None:
    root = make_artifact(tmp_path, targets={"gfx950": ("gfx950",), "sm100": ("sm_100a", "sm_103a")})
    for device in ("auto", "cpu"):
        with pytest.raises(ArtifactError, match=r"gfx950 \(gfx950\), sm100 \(sm_100a, sm_103a\)") as raised:
            load(root, device=device)
        assert raised.value.fix
    with pytest.raises(ArtifactError, match="has no target 'cpu'"):
        load(root, target="cpu")


def test_auto_prefers_what_runs_here(make_artifact: Make, tmp_path: Path) -> None:
    root = make_artifact(tmp_path, targets={"cpu": (), "sm42": ("sm_42a",)})
    engine = load(root)
    assert engine.describe()["target"] == "cpu"
    with pytest.raises(ArtifactError, match="the artifact cannot run here"):
        load(root, target="sm42")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_no_driver_is_said_clearly(artifact: Path) -> None:
    for device, message in (("cuda", "CUDA|cuda-bindings"), ("hip", "no HIP runtime")):
        with pytest.raises(ToolchainError, match=message) as raised:
            load(artifact, device=device)
        assert raised.value.fix


def test_wrong_arguments(artifact: Path) -> None:
    with pytest.raises(UsageError, match="unknown device 'gpu'"):
        load(artifact, device="gpu")
    with pytest.raises(UsageError, match="pages = 0"):
        load(artifact, device="cpu", pages=0)


@pytest.mark.parametrize(
    ("architecture", "device", "match"),
    [
        ("sm_90a", "9.0", "exact"),
        ("sm_100a", "10.0", "exact"),
        ("sm_100a", "10.3", None),
        ("sm_100f", "10.0", "exact"),
        ("sm_100f", "10.7", "compatible"),
        ("sm_103f", "10.0", None),
        ("sm_100f", "11.0", None),
        ("sm_80", "8.9", "compatible"),
        ("sm_80", "9.0", None),
        ("gfx950", "gfx950:sramecc+:xnack-", "exact"),
        ("gfx950", "gfx942", None),
        ("gfx950", "9.5", None),
        ("sm_90a", "gfx950", None),
    ],
)
def test_architectures(architecture: str, device: str, match: str | None) -> None:
    assert match_architecture(architecture, device) == match


def test_exact_architecture_is_preferred(make_artifact: Make, tmp_path: Path) -> None:
    root = make_artifact(
        tmp_path, targets={"sm100": ("sm_100f", "sm_100a", "sm_103a"), "sm107": ("sm_107a", "sm_100f")}
    )
    manifest = Manifest.model_validate_json((root / "manifest.json").read_text())
    chosen = {d: select_target(manifest, "cuda", d, None) for d in ("10.0", "10.3", "10.7", "10.5")}
    assert {d: s.architecture for d, s in chosen.items()} == {
        "10.0": "sm_100a",
        "10.3": "sm_103a",
        "10.7": "sm_107a",
        "10.5": "sm_100f",
    }
    assert chosen["10.7"].target == "sm107" and chosen["10.5"].match == "compatible"
    with pytest.raises(ArtifactError, match=r"target sm107 does not run on this device \(9\.0\)"):
        select_target(manifest, "cuda", "9.0", "sm107")


def test_binary_must_be_the_one_of_the_plan(artifact: Path, copy: Path, rewrite_manifest: Callable[..., None]) -> None:
    from mmcompile.runtime.artifact import open_artifact

    (copy / "kernels").mkdir()
    (copy / "kernels" / "k.cubin").write_bytes(b"binary")
    rewrite_manifest(copy)
    opened = open_artifact(copy)
    fields = {
        "file": "kernels/k.cubin",
        "assembly": "",
        "symbol": "kernel",
        "shared": 0,
        "num_warps": 4,
        "warp_size": 32,
    }
    fields |= {"registers": 0, "spills": 0, "global_scratch_size": 0, "global_scratch_align": 1}
    fields |= {"profile_scratch_size": 0, "ledger": {}}
    good = Binary(**fields, sha256=hashlib.sha256(b"binary").hexdigest())
    assert opened.read_binary("k", good) == b"binary"
    with pytest.raises(ArtifactError, match="not the binary that the plan names"):
        opened.read_binary("k", Binary(**fields, sha256="0" * 64))
    with pytest.raises(ArtifactError, match="not in the manifest"):
        opened.read_binary("k", good.model_copy(update={"file": "kernels/other.cubin"}))


def test_the_runtime_needs_no_compiler(artifact: Path) -> None:
    call = f"load({str(artifact)!r}, device='cpu').generate([[1]], SamplingParams(max_new_tokens=3, ignore_eos=True))"
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['triton', 'transformers', 'onnx', 'tokenizers', 'jinja2']))\n"
        f"from mmcompile.runtime import SamplingParams, load\nprint(len({call}[0].tokens))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 3


def test_errors_are_user_errors(copy: Path) -> None:
    """Whatever byte of the manifest is flipped, it is found (white space aside), in words for users."""
    original = (copy / "manifest.json").read_bytes()
    for position in range(0, len(original), 29):
        flip(copy / "manifest.json", position)
        if original[position : position + 1].isspace():
            continue
        with pytest.raises(MMError) as raised:
            load(copy, device="cpu", pages=1)
        assert raised.value.fix
        (copy / "manifest.json").write_bytes(original)


def test_records_survive_json(artifact: Path) -> None:
    text = (artifact / "plan.cpu.json").read_text()
    assert Plan.model_validate_json(text).model_dump_json(indent=1) == text
    assert Kernel.model_fields.keys() >= {"binaries", "parameters"}
