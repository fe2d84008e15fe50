"""The projection templates compile for every architecture, within its limits and with the promised instructions."""

from collections.abc import Callable

import pytest
import torch

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.kernel import KernelTemplate, OpCall
from mmcompile.core.spec import Architecture
from mmcompile.targets._kernels import linear, linear_nvfp4, norm, qkv
from mmcompile.targets._target import Target

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, TOKENS = 576, 1536, 9, 3, 64, 4
TEMPLATES = (*norm.TEMPLATES, *linear.TEMPLATES, *linear_nvfp4.TEMPLATES, *qkv.TEMPLATES)
ROWS = {n: "tokens" for n in ("x", "residual", "positions", "slot_mapping", "result")}
TARGETS = [load_module("targets", name).TARGET for name in list_names("targets")]
# The further flavours of a target compile the same text; they are left to the nightly run.
PLACES = [
    pytest.param(t, a, id=a.name, marks=[pytest.mark.slow] if i else [])
    for t in TARGETS if t.spec.backend for i, a in enumerate(t.spec.architectures)
]


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _weight(op: str, rows: int, k: int) -> dict[str, torch.Tensor]:
    if op.endswith("mxfp8"):
        scale = _empty(rows, k // 32, dtype=torch.uint8)
        return {"values": _empty(rows, k, dtype=torch.float8_e4m3fn), "scale": scale}
    if not op.endswith("nvfp4"):
        return {"weight": _empty(rows, k)}
    return {
        "packed": _empty(rows, k // 2, dtype=torch.uint8),
        "scale": _empty(rows, k // 16, dtype=torch.float8_e4m3fn),
        "global_scale": _empty(rows, dtype=torch.float32),
    }


def smollm2_call(op: str, make_call: Callable[..., OpCall]) -> OpCall:
    """The operation as SmolLM2-135M has it, in bfloat16 (a linear layer: gate and up; NVFP4 beside a float8 cache)."""
    tensors: dict[str, torch.Tensor | None] = {"x": _empty(TOKENS, HIDDEN)}
    if op in ("rms_norm", "add_rms_norm"):
        tensors |= {"weight": _empty(HIDDEN)} | ({"residual": _empty(TOKENS, HIDDEN)} if op == "add_rms_norm" else {})
        return make_call(op, tensors, {"eps": 1e-5}, ROWS, [_empty(TOKENS, HIDDEN)] * (1 + (op == "add_rms_norm")))
    if op.startswith("linear"):
        tensors |= _weight(op, 2 * INTERMEDIATE, HIDDEN) | {"bias": None, "residual": None}
        return make_call(op, tensors, {"activation": "swiglu"}, ROWS, [_empty(TOKENS, INTERMEDIATE)])
    tensors |= _weight(op, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)
    tensors |= {"bias": None, "q_weight": None, "k_weight": None}
    tensors |= {"positions": _empty(TOKENS, dtype=torch.int32), "slot_mapping": _empty(TOKENS, dtype=torch.int64)}
    cache_dtype = torch.float8_e4m3fn if op.endswith("nvfp4") else torch.bfloat16
    tensors |= {"cos_sin": _empty(128, HEAD_DIM)}
    tensors |= {"kv_cache": _empty(8, KV_HEADS, 16, 2 * HEAD_DIM, dtype=cache_dtype)}
    attributes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "eps": 1e-5}
    return make_call(op, tensors, attributes, ROWS, [_empty(TOKENS, HEADS, HEAD_DIM)])


@pytest.mark.parametrize(("target", "architecture"), PLACES)
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda t: t.name)
def test_smollm2_kernels_compile(call_of, template: KernelTemplate, target: Target, architecture: Architecture):
    call = smollm2_call(template.op, call_of)
    assert template.refuse(call, target.spec, architecture) is None
    for source in template.emit(call, target.spec, architecture):
        compiled = target.compile(source, architecture)
        warnings = target.check(compiled)
        assert compiled.metadata["spills"] == 0, warnings
