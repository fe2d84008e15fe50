"""Random weights: sane values for every format, the same on every device, nothing guessed."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.errors import ArtifactError, UsageError
from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.driver import BuildOptions, build
from mmcompile.runtime import Engine, load
from mmcompile.runtime.artifact import open_artifact
from mmcompile.runtime.device_gpu import GpuExecutor
from mmcompile.runtime.random_weights import RandomWeights, find_meanings

SMALL: dict[str, Any] = {"max_context": 64, "max_tokens": 16, "max_batch": 2, "weights": "none"}


_slow = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[pytest.param("none", marks=_slow), pytest.param("nvfp4", marks=_slow), "nvfp4_mxfp8"]
)
def minimax(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MiniMax-M3.1-Flash without weights, quantized in every way."""
    out = tmp_path_factory.mktemp(request.param) / "out"
    return build("minimax-m3.1-flash-tiny", out, BuildOptions(**SMALL, quantization=request.param))


def read(path: Path, seed: int) -> dict[str, Tensor]:
    opened = open_artifact(path)
    return dict(opened.read_weights(opened.plan("cpu"), seed))


def test_every_weight_is_sane_for_its_format(minimax: Path) -> None:
    plan, weights = open_artifact(minimax).plan("cpu"), read(minimax, 0)
    assert weights.keys() == {n for n, b in plan.buffers.items() if b.role == "weight"}
    for name, tensor in weights.items():
        base, _, part = name.rpartition(".")
        if part in ("packed", "values") or name.endswith("_packed"):
            continue
        if part == "scale" and tensor.dtype == torch.uint8:
            mxfp8.check_parts(weights[f"{base}.values"], tensor, name)
            tensor = mxfp8.decode(weights[f"{base}.values"], tensor)
        elif part.endswith("global_scale"):
            stem = name.removesuffix("global_scale")
            packed, scale = weights[f"{stem}packed"], weights[f"{stem}scale"]
            assert (scale.float() > 0).all() and scale.float().isfinite().all() and (tensor > 0).all()
            if packed.dim() == 3:
                packed, scale, tensor = packed[0], scale[0], tensor[0]
            tensor = nvfp4.decode_blocks(packed, scale) * tensor[:, None]
        elif part.endswith("scale") or name == "cos_sin_table":
            continue
        values = tensor.float()
        assert values.isfinite().all(), name
        if "norm" in base or part == "e_score_correction_bias":
            assert values.abs().max() < 0.6, name  # Gemma adds one to the weight itself
        else:
            assert 0.012 < float(values.std()) < 0.03 and abs(float(values.mean())) < 0.005, name


def test_tokens_depend_on_the_seed_alone(minimax: Path) -> None:
    logits = []
    for seed in (3, 3, 4):
        engine = load(minimax, device="cpu", random_weights=seed)
        assert isinstance(engine, Engine)
        assert engine.describe()["weights"] == f"random (seed {seed})"
        handles, first = engine.prefill([[1, 2, 3], [7] * 20])
        logits.append(torch.stack([first, engine.decode(handles, [5, 6])]))
        engine.close()
    assert torch.equal(logits[0], logits[1]) and not torch.allclose(logits[0], logits[2], atol=1e-3)
    assert logits[0].isfinite().all() and 1e-3 < float(logits[0].std()) < 10


def test_the_gpu_executor_gets_the_same_weights(minimax: Path) -> None:
    """Bytes that go to the device, through a driver that keeps them."""
    opened = open_artifact(minimax)
    plan = opened.plan("cpu")
    weights = opened.read_weights(plan, 5)
    placed = plan.model_copy(update={"phases": {"prefill": plan.phases["prefill"]}})
    driver = _Recorder()
    GpuExecutor(placed, weights, 4, driver, "", lambda *_: b"")  # type: ignore[arg-type]
    copies = [bytes(tensor.view(-1).view(torch.uint8).numpy()) for tensor in read(minimax, 5).values()]
    assert driver.copied == copies


class _Recorder:
    """A driver that remembers what was copied to the device."""

    kind, device_name, architecture = "host", "", ""

    def __init__(self) -> None:
        self.copied: list[bytes] = []
        self.blocks: list[Any] = []

    def allocate(self, size: int) -> int:
        self.blocks.append(torch.empty(size, dtype=torch.uint8))
        return int(self.blocks[-1].data_ptr())

    allocate_host = allocate

    def copy_to_device(self, pointer: int, address: int, size: int) -> None:
        self.copied.append(ctypes.string_at(address, size))

    def activate(self) -> None: ...

    def synchronize(self) -> None: ...

    def fill_zero(self, pointer: int, size: int) -> None: ...


def test_rows_do_not_repeat(minimax: Path) -> None:
    plan = open_artifact(minimax).plan("cpu")
    name = "model.embed_tokens.weight"
    wide = plan.buffers[name].model_copy(update={"shape": (2100, 4096)})  # more than twice the block
    plan = plan.model_copy(update={"buffers": plan.buffers | {name: wide}})
    ((_, tensor),) = RandomWeights(plan, 0).generate([name])
    assert len(torch.unique(tensor[:, :16], dim=0)) == 2100


def test_what_nothing_explains_is_refused(artifact: Path) -> None:
    """The plan of these tests scales the embedding in a region, which may mean anything."""
    plan = open_artifact(artifact).plan("cpu")
    with pytest.raises(ArtifactError, match=r"no meaning for the weight 'embed', which is 'in0' \(float32\) of region"):
        find_meanings(plan, [plan.buffers["embed"]])
    with pytest.raises(ArtifactError, match="'cos_sin'"):
        find_meanings(plan, [plan.buffers["cos_sin"]])
    unread = plan.buffers["embed"].model_copy(update={"name": "nobody"})
    with pytest.raises(ArtifactError, match="no operation reads the weight 'nobody'"):
        find_meanings(plan, [unread])


def test_an_artifact_with_weights_takes_no_random_ones(artifact: Path) -> None:
    with pytest.raises(UsageError, match="has its own"):
        load(artifact, device="cpu", random_weights=0)


def test_without_a_seed_the_error_names_the_way(minimax: Path) -> None:
    with pytest.raises(ArtifactError, match="--random-weights SEED"):
        load(minimax, device="cpu")


def test_an_arranged_copy_is_read_in_the_place_of_its_weight(tmp_path: Path) -> None:
    """On the CPU wide fp32 weights are transposed at load; what reads the copy says what the weight is."""
    out = build("smollm2-tiny", tmp_path / "out", BuildOptions(**SMALL, dtype="float32"))
    plan = open_artifact(out).plan("cpu")
    arranged = [launch for launch in plan.phases["load"].launches if launch.op == "aten.contiguous.default"]
    names = [view.buffer for launch in arranged if (view := launch.inputs["arg0"])]
    assert "model.embed_tokens.weight" in names
    assert {m.kind for m in find_meanings(plan, [plan.buffers[name] for name in names]).values()} == {"matrix"}
    engine = load(out, device="cpu", random_weights=0)
    assert isinstance(engine, Engine) and engine.prefill([[1, 2]])[1].isfinite().all()
