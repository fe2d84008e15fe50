"""Tuned norm, RoPE and insertion into NVFP4 pages in lane order, in the PTX emulator: every byte as the reference's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from mmcompile.core.formats.nvfp4_cache import LINEAR, SM90, SM90_INDEX
from mmcompile.core.kernel import OpCall, Operand
from mmcompile.core.ops.define import get_op
from mmcompile.lower.select import Selector
from mmcompile.targets._tuned import insert_lanes
from tests.kernels.emulated import run_emulated
from tests.kernels.lanes_cases import ARCH, PAGE, SPEC, TARGET, poison

D, PAGES = 128, 2
BY_OP = {t.op: t for t in insert_lanes.TEMPLATES}
SYMBOLS = {"qkv": "tokens", "positions": "tokens", "slot_mapping": "tokens"}


def make_operands(tokens: int, heads: int, kv_heads: int, index_heads: int | None, rotary: int,
                  ) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Operands and attributes; rows of very different sizes, a third of the slots empty. index_heads None: no index."""
    g = torch.Generator().manual_seed(tokens)
    rows = heads + 2 * kv_heads + (0 if index_heads is None else index_heads + 1)
    qkv = torch.randn(tokens, rows * D + 8, generator=g) * torch.exp(3 * torch.randn(tokens, 1, generator=g))
    angle = torch.rand(50, rotary // 2, generator=g) * 6.28
    slots = torch.randperm(PAGES * PAGE, generator=g)[:tokens]
    slots[tokens // 2 : tokens // 2 + tokens // 3] = -1
    operands = {
        "qkv": qkv.bfloat16()[:, 8:], "q_weight": torch.empty(0), "k_weight": torch.empty(0),
        "positions": torch.randint(0, 50, (tokens,), generator=g, dtype=torch.int32),
        "cos_sin": torch.cat([angle.cos(), angle.sin()], 1).bfloat16(),
        "kv_cache": torch.full((PAGES, 2 * kv_heads, PAGE, 72), 0x7F, dtype=torch.uint8), "slot_mapping": slots,
    }  # fmt: skip
    attributes: dict[str, Any] = {
        "num_heads": heads, "num_kv_heads": kv_heads, "head_dim": D, "eps": 1e-6, "weight_offset": 1.0,
        "round_before_scale": False, "layout": SM90,
    }  # fmt: skip
    if index_heads is not None:
        attributes |= {"num_index_heads": index_heads, "index_layout": SM90_INDEX}
        operands["index_cache"] = torch.full((PAGES, PAGE, 72), 0x7F, dtype=torch.uint8)
        operands |= {"index_q_weight": torch.empty(0), "index_k_weight": torch.empty(0)}
    for name in (n for n in operands if n.endswith("weight")):
        operands[name] = (torch.randn(D, generator=g) * 0.3).bfloat16()
    return operands, attributes


def describe(op: str, operands: dict[str, Tensor], attributes: dict[str, Any], results: list[Tensor]) -> OpCall:
    def see(tensor: Tensor, symbol: str | None) -> Operand:
        shape: tuple[int | str, ...] = (symbol or tensor.shape[0], *tensor.shape[1:])
        return Operand(shape, tensor.stride(), str(tensor.dtype).removeprefix("torch."))

    seen: dict[str, Operand | None] = {name: see(t, SYMBOLS.get(name)) for name, t in operands.items()}
    return OpCall(op, seen, tuple(see(r, "tokens") for r in results), attributes | {"phase": "decode"})


def check(operands: dict[str, Tensor], attributes: dict[str, Any], **schedule: Any) -> None:
    """The tuned kernel leaves the reference's bytes in both caches, and the reference's queries."""
    op = "qk_norm_rope_insert_index" if "index_cache" in operands else "qk_norm_rope_insert"
    caches = {name: operands[name].clone() for name in ("kv_cache", "index_cache") if name in operands}
    returned = get_op(op).reference(**operands | caches, **attributes)
    want = [returned] if isinstance(returned, Tensor) else list(returned)
    call, template = describe(op, operands, attributes, want), BY_OP[op]
    assert template.refuse(call, SPEC, ARCH) is None
    results = {f"result{i or ''}": poison(r.shape, r.dtype) for i, r in enumerate(want)}
    pool: dict[str, Any] = operands | {name: operands[name].clone() for name in caches} | results
    run_emulated(TARGET, template.emit(call, SPEC, ARCH), pool, {"tokens": want[0].shape[0]}, {*results, *caches},
                 **schedule)
    for name, expected in zip(results, want, strict=True):
        torch.testing.assert_close(pool[name], expected, rtol=2**-7, atol=0)
        assert float((pool[name] != expected).float().mean()) < 1e-3
    for name, expected in caches.items():
        assert not torch.equal(expected, operands[name])
        assert torch.equal(pool[name], expected), name


def test_a_few_heads_of_every_kind():
    check(*make_operands(3, 2, 1, 1, 64))


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "index_heads", "rotary"), [
    (7, 10, 3, 3, 64), (2, 64, 4, 4, 64), (4, 8, 1, None, 128), (5, 16, 2, None, 32),
])
def test_all_shapes(tokens: int, heads: int, kv_heads: int, index_heads: int | None, rotary: int):
    check(*make_operands(tokens, heads, kv_heads, index_heads, rotary))


@pytest.mark.slow
def test_values_on_borders_between_codes():
    """V is not normed: every border times scales of every kind, one bf16 below it, on it, above it, and extremes."""
    operands, attributes = make_operands(64, 2, 1, None, 64)
    g = torch.Generator().manual_seed(1)
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.0])
    mantissa, exponent = torch.randint(8, 16, (64, 8), generator=g), torch.randint(-12, 10, (64, 8), generator=g)
    scale = (mantissa / 8 * torch.exp2(exponent.float()))[..., None]
    values = borders[torch.randint(0, 8, (64, 8, 16), generator=g)] * scale
    bits = values.bfloat16().view(torch.int16) + torch.randint(-1, 2, values.shape, generator=g).to(torch.int16)
    values = torch.where(values > 0, bits.view(torch.bfloat16), 0).float()
    values[..., 0] = 6 * scale[..., 0] * torch.rand(64, 8, generator=g).mul(0.1).add(0.95)
    values *= torch.where(torch.rand(values.shape, generator=g) < 0.5, -1.0, 1.0)
    values[0, 0], values[0, 1], values[0, 2], values[0, 3] = 0.0, 3e38, 1e-40, 1e5
    operands["qkv"][:, 3 * D :] = values.flatten(1).bfloat16()
    operands["slot_mapping"] = torch.arange(64)
    check(operands, attributes)


@pytest.mark.slow
def test_any_order_of_warps_gives_the_same_bytes():
    check(*make_operands(3, 2, 1, 1, 64), seed=3)


@pytest.mark.parametrize(("changes", "attributes", "reason"), [
    ({}, {"layout": LINEAR}, "not in the layout"),
    ({"cos_sin": torch.zeros(50, 64)}, {}, "must be bfloat16"),
    ({"cos_sin": torch.zeros(50, 96, dtype=torch.bfloat16)}, {}, "96 dimensions are rotated"),
    ({"qkv": torch.zeros(3, 6 * D + 4, dtype=torch.bfloat16)[:, : 6 * D]}, {}, "multiples of 16 bytes"),
])
def test_refusals(changes: dict[str, Tensor], attributes: dict[str, Any], reason: str):
    operands, known = make_operands(3, 2, 1, 1, 64)
    results = [torch.empty(3, 2, D).bfloat16(), torch.empty(3, 1, D).bfloat16()]
    op = "qk_norm_rope_insert_index"
    call = describe(op, operands | changes, known | attributes, results)
    assert reason in str(BY_OP[op].refuse(call, SPEC, ARCH))
    bare = dataclasses.replace(ARCH, features=frozenset())
    assert "lacks" in str(BY_OP[op].refuse(call, SPEC, bare))


@pytest.mark.parametrize("portable", [False, True])
@pytest.mark.parametrize("projected", [False, True])
def test_selection_takes_the_tuned_insertion_unless_told_not_to(portable: bool, projected: bool):
    operands, attributes = make_operands(3, 64, 4, 4, 64)
    results = [torch.empty(3, 64, D).bfloat16(), torch.empty(3, 4, D).bfloat16()]
    call = describe("qk_norm_rope_insert_index", operands, attributes, results)
    if projected:
        given = dict(call.operands)
        given |= {"x": Operand(("tokens", 6144), (6144, 1), "bfloat16"), "bias": None, "delta": None,
                  "weight": Operand((77 * D, 6144), (6144, 1), "bfloat16")}
        del given["qkv"]
        call = dataclasses.replace(call, op="qkv_norm_rope_insert_index", operands=given)
    chosen, reason = Selector(SPEC, TARGET.kernels, portable).select(call, 8192)
    assert chosen, reason
    assert all(choice.template.endswith("_lanes") is not portable for choice in chosen)
