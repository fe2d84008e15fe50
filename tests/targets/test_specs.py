"""Facts of the targets: every claimed instruction assembles, every refused one is rejected."""

import re
from functools import cache

import pytest

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.errors import ToolchainError, UsageError
from mmcompile.core.spec import Architecture
from mmcompile.targets import _features
from mmcompile.targets._assemble import probe_instruction, ptx_version
from mmcompile.targets._disassemble import disassemble_cubin
from mmcompile.targets._features import FEATURES, minimum_ptx

TARGETS = {name: load_module("targets", name).TARGET for name in list_names("targets")}
ARCHITECTURES = {a.name: a for t in TARGETS.values() for a in t.spec.architectures}
PTX_FEATURES = [f for f in FEATURES.values() if f.minimum_ptx and f.example]
OLDEST_PTX = {"sm_90a": "8.0", "sm_100a": "8.6", "sm_100f": "8.8", "sm_103a": "8.8", "sm_107a": "9.4"}


def order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def holds(architecture: Architecture, name: str) -> bool:
    """True if the toolchain here makes the feature's instruction for the architecture."""
    feature = FEATURES[name]
    try:
        binary = probe_instruction(feature.example, architecture)
    except ToolchainError:
        return False
    if not feature.sass:
        return True
    listing = disassemble_cubin(binary)
    if listing is None:
        pytest.skip(f"no nvdisasm decodes {architecture.name}")
    return feature.sass in listing


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_claims_are_exactly_what_assembles(name):
    architecture = ARCHITECTURES[name]
    ours = PTX_FEATURES if name.startswith("sm") else [f for f in FEATURES.values() if not f.minimum_ptx]
    found = {f.name for f in ours if holds(architecture, f.name)}
    assert found == {f for f in architecture.features if FEATURES[f].example}


def test_headline_features():
    assert {n for n, a in ARCHITECTURES.items() if "qmul4" in a.features} == {"sm_100a", "sm_103a"}
    assert {n for n, a in ARCHITECTURES.items() if "ex2_packed" in a.features} == {"sm_103a", "sm_107a"}
    assert {n for n, a in ARCHITECTURES.items() if "wgmma" in a.features} == {"sm_90a"}
    assert not holds(ARCHITECTURES["sm_107a"], "qmul4")
    assert not holds(ARCHITECTURES["sm_100a"], "ex2_packed")
    family = ARCHITECTURES["sm_100f"].features
    assert all(family < ARCHITECTURES[name].features for name in ("sm_100a", "sm_103a", "sm_107a"))
    assert TARGETS["sm100"].spec.has("qmul4")
    assert not TARGETS["sm107"].spec.has("qmul4")
    assert not TARGETS["sm107"].spec.has("ex2_packed")
    assert not TARGETS["cpu"].spec.has("qmul4")


@pytest.mark.parametrize("feature", PTX_FEATURES, ids=lambda f: f.name)
def test_minimum_ptx_is_the_lowest_that_assembles(feature):
    claiming = [a for a in ARCHITECTURES.values() if feature.name in a.features]
    architecture = min(claiming, key=lambda a: order(OLDEST_PTX[a.name]))
    oldest = OLDEST_PTX[architecture.name]
    lowest = max(feature.minimum_ptx, oldest, key=order)
    probe_instruction(feature.example, architecture, version=lowest)
    if order(lowest) > order(oldest):
        before = f"9.{order(lowest)[1] - 1}" if lowest > "9.0" else f"8.{order(lowest)[1] - 1}"
        with pytest.raises(ToolchainError):
            probe_instruction(feature.example, architecture, version=before)


def test_unknown_amd_instruction_is_rejected():
    with pytest.raises(ToolchainError, match="LLVM rejects"):
        probe_instruction("v_cvt_scalef32_pk_bf16_fp2 v0, v1, 1.0", ARCHITECTURES["gfx950"])


def test_the_docstring_table_is_the_table():
    rows = re.findall(r"^\| (\w+) \| .* \| ([\d.]+|-) \| .* \|$", _features.__doc__, flags=re.MULTILINE)
    assert dict(rows) == {f.name: f.minimum_ptx or "-" for f in FEATURES.values()}


def test_minimum_ptx():
    assert minimum_ptx([]) == minimum_ptx(["pk_mul_f32"]) == ""
    assert minimum_ptx(["tma", "qmul4", "wgmma"]) == "9.4"
    for name, architecture in ARCHITECTURES.items():
        if name in OLDEST_PTX:
            assert order(OLDEST_PTX[name]) <= order(architecture.minimum_ptx) <= order(ptx_version())


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_specs_are_consistent(target):
    spec = target.spec
    assert load_module("targets", spec.name).TARGET is target
    assert spec.backend in ("", "cuda", "hip")
    assert bool(spec.architectures) is bool(spec.backend)
    assert len({a.name for a in spec.architectures}) == len(spec.architectures)
    assert all(a.features <= FEATURES.keys() for a in spec.architectures)
    assert all(a.runs_on for a in spec.architectures)
    assert all(min(shape) > 0 for shapes in spec.mma_shapes.values() for shape in shapes)
    assert (spec.tensor_memory_columns > 0) is spec.has("tcgen05")
    if spec.backend:
        assert spec.warp_size == (64 if spec.backend == "hip" else 32)
        assert spec.threads_per_unit % spec.warp_size == 0
        assert spec.driver
        with pytest.raises(UsageError, match=spec.architectures[0].name):
            target.find_architecture(spec.architectures[0].name + "x")
        assert target.find_architecture(spec.architectures[0].name) is spec.architectures[0]


def test_every_device_has_one_exact_binary():
    exact = [a.runs_on for a in ARCHITECTURES.values() if len(a.runs_on) == 1]
    assert sorted(device for (device,) in exact) == ["10.0", "10.3", "10.7", "9.0", "gfx950"]
