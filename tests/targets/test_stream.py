"""The decode step in one launch: its packing and reference, what it refuses, and its assembly in the emulator."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.core.errors import LoweringError
from mmcompile.core.formats.nvfp4 import decode_blocks
from mmcompile.core.formats.nvfp4_fragments import restore
from mmcompile.core.stream import FAULT_WORD, STAGES
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import list_unknown, run_kernel
from mmcompile.models import llama
from mmcompile.targets._toolchain import compile_kernel
from mmcompile.targets._tuned.stream_emit import emit_stream
from mmcompile.targets._tuned.stream_pack import (
    order_rows,
    pack_gains,
    pack_norms,
    pack_projection,
    pack_stream,
    unpack_stream,
)
from mmcompile.targets._tuned.stream_plan import StepPlan
from mmcompile.targets._tuned.stream_reference import StepInputs, run_step
from mmcompile.targets._tuned.stream_refuse import refuse_stream
from mmcompile.targets._tuned.stream_shape import SHARED_BYTES, StepShape
from mmcompile.targets.sm90 import TARGET

ARCHITECTURE = TARGET.spec.architectures[0]
TINY = StepShape(2, 256, 4, 2, 64, 256, 500, programs=4, warp_k=32, part_tokens=64)
WIDE = StepShape(2, 256, 2, 1, 128, 512, 500, programs=4, warp_k=32, page_size=32, part_tokens=16, max_tokens=4)
PACKED = StepShape(1, 2048, 32, 8, 64, 2048, 500, programs=8, weight_format="nvfp4")
LLAMA_1B = StepShape(16, 2048, 32, 8, 64, 8192, 128256)
LLAMA_8B = StepShape(32, 4096, 32, 8, 128, 14336, 128256)


def make_weights(s: StepShape) -> tuple[dict[tuple[str, int], torch.Tensor], dict[tuple[str, int], torch.Tensor]]:
    """Random weights and norms by (role, layer)."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"qkv": ((s.heads + 2 * s.kv_heads) * s.head_dim, s.hidden), "o": (s.hidden, s.heads * s.head_dim),
             "gate_up": (2 * s.intermediate, s.hidden), "down": (s.hidden, s.intermediate)}  # fmt: skip

    def draw(rows: int, k: int) -> torch.Tensor:
        return (torch.randn(rows, k, generator=generator) / math.sqrt(k)).bfloat16()

    weights = {(role, layer): draw(*size) for layer in range(s.layers) for role, size in sizes.items()}
    weights["head", s.layers] = draw(s.vocabulary or 8, s.hidden)
    names = [(n, i) for i in range(s.layers) for n in ("input", "after")] + [("final", s.layers)]
    return weights, {name: (1 + 0.2 * torch.randn(s.hidden, generator=generator)).bfloat16() for name in names}


def make_codes(weights: dict[tuple[str, int], torch.Tensor]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """Random NVFP4 weights of the same shapes (packed, scale, global scale), and their values."""
    generator = torch.Generator().manual_seed(4)
    coded, values = {}, {}
    for name, weight in weights.items():
        rows, k = weight.shape
        packed = torch.randint(0, 256, (rows, k // 2), generator=generator).to(torch.uint8)
        scale = (torch.rand(rows, k // 16, generator=generator) * 2 + 0.1).to(torch.float8_e4m3fn)
        factor = (torch.rand(rows, generator=generator) + 0.5) / (3 * math.sqrt(k))
        coded[name], values[name] = (packed, scale, factor), decode_blocks(packed, scale) * factor[:, None]
    return coded, values


def make_inputs(s: StepShape, lengths: list[int]) -> tuple[StepInputs, torch.Tensor, torch.Tensor]:
    """Inputs, embeddings and ids; what must not be read of the caches is NaN."""
    generator = torch.Generator().manual_seed(5)
    blocks = -(-max(lengths) // s.page_size) + 1
    pages = len(lengths) * blocks + 2
    table = torch.randperm(pages, generator=generator)[: len(lengths) * blocks].view(len(lengths), blocks).int()
    caches = [torch.full((pages, s.kv_heads, s.page_size, 2 * s.head_dim), float("nan")).bfloat16()] * s.layers
    caches = [cache.clone() for cache in caches]
    for cache in caches:
        for b, n in enumerate(lengths):
            for i in range(n - 1):
                row = torch.randn(s.kv_heads, 2 * s.head_dim, generator=generator).bfloat16()
                cache[table[b, i // s.page_size], :, i % s.page_size] = row
    last = [max(n - 1, 0) for n in lengths]
    slots = [int(table[b, i // s.page_size]) * s.page_size + i % s.page_size for b, i in enumerate(last)]
    slots = [slot if n else -1 for slot, n in zip(slots, lengths, strict=True)]
    angles = torch.arange(max(lengths))[:, None] / 10000 ** torch.linspace(0, 1, s.head_dim // 2)
    embedding = torch.randn(64, s.hidden, generator=generator).bfloat16()
    ids = torch.randint(0, 64, (len(lengths),), generator=generator).int()
    cosines = torch.cat([angles.cos(), angles.sin()], -1).bfloat16()
    return (
        StepInputs(embedding[ids.long()], torch.tensor(last).int(), torch.tensor(slots), table,
                   torch.tensor(lengths).int(), cosines, caches),
        embedding, ids,
    )  # fmt: skip


def measure_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


class Device:
    """A compiled step in the emulator's memory."""

    def __init__(self, s: StepShape, lengths: list[int]) -> None:
        self.shape, self.plan, self.memory = s, StepPlan(s), DeviceMemory()
        self.weights, self.norms = make_weights(s)
        self.inputs, embedding, ids = make_inputs(s, lengths)
        packed: dict[str, Any] = {}
        if s.weight_format == "nvfp4":
            coded, self.weights = make_codes(self.weights)
            packed = {"stream": pack_stream(s, coded), "gains": pack_gains(s, coded)}
        source = emit_stream(s, ARCHITECTURE)
        self.compiled = compile_kernel(source, ARCHITECTURE, TARGET.spec)
        values: dict[str, Any] = {
            "stream": packed or pack_stream(s, self.weights),
            "norms": pack_norms(s, self.norms), "embedding": embedding,
            "residual": self.inputs.start, "table": self.inputs.table, "input_ids": ids,
            "positions": self.inputs.positions, "slot_mapping": self.inputs.slot_mapping,
            "block_table": self.inputs.block_table, "seq_lens": self.inputs.seq_lens,
            "workspace": torch.zeros(self.plan.workspace["end"], dtype=torch.int32), "tokens": len(lengths),
            "result": torch.zeros(len(lengths), s.vocabulary if s.has_head else s.hidden).bfloat16(),
            "max_blocks": self.inputs.block_table.shape[1],
        }  # fmt: skip
        values |= {f"kv_cache.{i}": cache for i, cache in enumerate(self.inputs.caches)} | packed
        self.places, self.arguments = {}, []
        for parameter in source.parameters:
            value = values[parameter.value]
            if isinstance(value, int):
                self.arguments.append(value)
                continue
            raw = np.ascontiguousarray(value.contiguous().view(torch.uint8).numpy().reshape(-1)).copy()
            known: Any = True
            if parameter.value.startswith("kv_cache"):
                known = np.repeat(~value.float().isnan().reshape(-1).numpy(), 2)
            elif parameter.value == "result":
                known = False
            writable = parameter.value in ("workspace", "result") or parameter.value.startswith("kv_cache")
            place = self.memory.register(raw, parameter.name, writable=writable, known=known)
            self.places[parameter.value] = place, value
            self.arguments.append(place)
        self.arguments += [0, 0]

    def run(self, seed: int, **options: Any) -> torch.Tensor:
        """One launch, all programs resident; the result."""
        launch = Launch(self.compiled.assembly, self.compiled.metadata["name"], (self.shape.programs, 1, 1), 256,
                        self.plan.shared_bytes, self.arguments, self.memory, schedule="interleaved", seed=seed,
                        **options)  # fmt: skip
        run_kernel(launch)
        return self.read("result")

    def read(self, name: str) -> torch.Tensor:
        place, like = self.places[name]
        return torch.from_numpy(self.memory.contents(place).copy()).view(like.dtype).view(like.shape)

    def run_reference(self, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
        caches = [cache.clone() for cache in self.inputs.caches]
        given = dataclasses.replace(self.inputs, caches=caches)
        return run_step(self.shape, self.weights, self.norms, given, dtype), caches


@pytest.mark.parametrize("shape", [TINY, WIDE, dataclasses.replace(TINY, first=1)])
def test_packing_has_an_inverse(shape):
    weights, _ = make_weights(shape)
    stream = pack_stream(shape, weights)
    assert stream.numel() == StepPlan(shape).stream_bytes
    unpacked = unpack_stream(shape, stream)
    for name, value in unpacked.items():
        assert torch.equal(value[: len(weights[name])], weights[name]), name
        assert not value[len(weights[name]) :].any()


@pytest.mark.parametrize("role", ["qkv", "o", "gate_up", "down"])
def test_row_orders_are_permutations(role):
    order = order_rows(LLAMA_8B, role)
    assert torch.equal(order.sort().values, torch.arange(len(order)))
    if role == "qkv":  # pairs of one head, half a head apart
        assert torch.equal(order[1::2] - order[::2], torch.full((len(order) // 2,), 64))


@pytest.mark.parametrize("role", ["qkv", "gate_up", "down"])
def test_units_of_nvfp4_hold_the_weights(role):
    shape = dataclasses.replace(PACKED, programs=32) if role == "qkv" else PACKED
    plan, generator = StepPlan(shape), torch.Generator().manual_seed(1)
    rows, k = plan.rows[role] * shape.programs, 2048
    packed = torch.randint(0, 256, (rows, k // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(0, 120, (rows, k // 16), generator=generator).to(torch.uint8).view(torch.float8_e4m3fn)
    units = pack_projection(shape, role, (packed, scale, torch.ones(rows)))
    units = units.view(-1, shape.programs, 8, plan.joined[role], plan.unit_bytes)
    order = order_rows(shape, role)
    for stage, program, warp, unit in ((0, 0, 0, 0), (0, 5, 3, 0), (len(units) - 1, 7, 7, plan.joined[role] - 1)):
        first = program * plan.rows[role] + (stage * plan.joined[role] + unit) * 16  # all columns are one chunk
        places = order[first : min(first + 16, (program + 1) * plan.rows[role])]
        codes = restore(units[stage, program, warp, unit, :2048].view(16, 128), "float16")
        assert torch.equal(codes[: len(places)], packed[places, 128 * warp : 128 * (warp + 1)])
        scales = restore(units[stage, program, warp, unit, 2048:].view(torch.float8_e4m3fn).view(16, 16), "float16")
        assert torch.equal(
            scales[: len(places)].view(torch.uint8), scale[places, 16 * warp :][:, :16].view(torch.uint8)
        )
        assert not codes[len(places) :].any()


def test_reference_is_the_model():
    config = llama.LlamaConfig(500, 256, 256, 2, 4, 2, 64, 64, rope_theta=10000.0)
    model = llama.build(config)
    weights = {("head", 2): model.lm_head.weight}
    norms = {("final", 2): model.model.norm.weight}
    for i, layer in enumerate(model.model.layers):
        a, m = layer.self_attn, layer.mlp
        weights["qkv", i] = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
        weights["o", i], weights["down", i] = a.o_proj.weight, m.down_proj.weight
        weights["gate_up", i] = torch.cat([m.gate_proj.weight, m.up_proj.weight])
        norms["input", i], norms["after", i] = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    ids, count = torch.randint(0, 500, (4,)), 4
    angles = torch.arange(count)[:, None] * llama.rotary_frequencies(config)
    caches = [torch.zeros(1, 2, 16, 128) for _ in range(2)]
    with torch.no_grad():
        for i in range(count):
            at = torch.tensor([i])
            inputs = StepInputs(model.model.embed_tokens(ids[at]), at, at, torch.zeros(1, 1).int(), at + 1,
                                torch.cat([angles.cos(), angles.sin()], -1), caches)  # fmt: skip
            logits = run_step(TINY, weights, norms, inputs)
        wanted = model(ids, torch.arange(count))[-1:]
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("weight_format", ["bf16", "nvfp4"])
@pytest.mark.parametrize("shape", [LLAMA_1B, LLAMA_8B])
def test_llama_shapes_are_served(shape, weight_format, tokens):
    shape = dataclasses.replace(shape, max_tokens=tokens, weight_format=weight_format)
    assert refuse_stream(shape, ARCHITECTURE) is None
    assert StepPlan(shape).shared_bytes <= SHARED_BYTES
    source = emit_stream(shape, ARCHITECTURE)
    assert source == emit_stream(shape, ARCHITECTURE) and source.lanes
    assert max(len(line) for line in source.text.splitlines() if "tl." in line) < 4000


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"hidden": 576}, "columns of one stage"),
        ({"max_tokens": 9}, "1 to 8"),
        ({"max_tokens": 8, "programs": 32}, "sequences"),
        ({"programs": 136}, "resident"),
        ({"programs": 96}, "whole tiles"),
        ({"head_dim": 96}, "head_dim 96"),
        ({"heads": 128, "head_dim": 64}, "at most 8"),
        ({"page_size": 8}, "pages of 8"),
        ({"cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"weight_format": "nvfp5"}, "nvfp5"),
        ({"weight_format": "nvfp4", "warp_k": 128}, "256 columns"),
        ({"first": 16}, "layers 16"),
        ({"warp_k": 96}, "warp_k"),
    ],
)
def test_refusals_name_the_reason(change, reason):
    shape = dataclasses.replace(LLAMA_1B, **change)
    assert reason in (refuse_stream(shape, ARCHITECTURE) or "")
    with pytest.raises(LoweringError, match="streamed step"):
        emit_stream(shape, ARCHITECTURE)


CASES = {
    "one token": (TINY, [200]),
    "two sequences, one empty": (dataclasses.replace(TINY, max_tokens=2), [300, 0]),
    "fewer tokens than rows": (dataclasses.replace(TINY, max_tokens=2), [17]),
    "head_dim 128, ragged": (WIDE, [70, 1, 0, 33]),
    "last layer from a residual, traced": (
        dataclasses.replace(TINY, first=1, prefetch=(1, 2, 2, 2, 1), prefetch_lines=128, trace=True), [40],
    ),
    "first layer to a residual": (dataclasses.replace(TINY, last=0), [65]),
    "two chunks of columns": (StepShape(1, 1024, 8, 4, 64, 512, 300, programs=4, warp_k=64), [30]),
    "not folded": (dataclasses.replace(TINY, folded=False), [40]),
    "nvfp4": (PACKED, [40]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_emulated_step(case):
    shape, lengths = CASES[case]
    device = Device(shape, lengths)
    facts = device.compiled.metadata
    assert facts["shared"] == device.plan.shared_bytes and not facts["spills"]
    assert not list_unknown(device.compiled.assembly, facts["name"])
    wanted, caches = device.run_reference(torch.float32)
    rounded, _ = device.run_reference(torch.bfloat16)
    orders = ((0, False), (1, True), (2, False))[: 2 if shape.weight_format == "nvfp4" else 3]
    runs = [device.run(seed, late=late, check_races=seed == 0) for seed, late in orders]
    alive = [b for b, n in enumerate(lengths) if n]
    # Each row rounds where bf16 torch does, or less often.
    assert measure_error(runs[0][alive].float(), wanted[alive]) < 1.2 * measure_error(
        rounded[alive].float(), wanted[alive]
    )
    assert all(torch.equal(run.view(torch.int16), runs[0].view(torch.int16)) for run in runs)
    for layer in range(shape.first, shape.end):
        cache = device.read(f"kv_cache.{layer}").float()
        unread = caches[layer].float().isnan()
        assert torch.equal(cache.isnan(), unread)
        assert measure_error(cache[~unread], caches[layer][~unread].float()) < 4e-3
    workspace = device.read("workspace")
    assert workspace[0] == len(runs) and not workspace[FAULT_WORD : FAULT_WORD + 2].any()


@pytest.mark.slow
def test_a_wait_that_gives_up_is_recorded():
    """Every wait ends: with a limit of one poll the launch ends, and its record names a stage and a program."""
    device = Device(dataclasses.replace(TINY, spin_limit=1), [40])
    device.run(0)
    code, program = device.read("workspace")[FAULT_WORD : FAULT_WORD + 2].tolist()
    assert code > 0 and (code - 1) // 8 <= TINY.layers and STAGES[(code - 1) % 8] and program < TINY.programs


@pytest.mark.slow
def test_a_lost_word_is_found():
    """A mailbox store that is left out: with no limit in reach the emulator reports that only polling is left."""
    device = Device(TINY, [40])
    assembly, count = re.subn(r"@p st\.relaxed\.gpu\.global\.b64 [^;]*;", "", device.compiled.assembly, count=1)
    device.compiled = dataclasses.replace(device.compiled, assembly=assembly)
    assert count == 1
    with pytest.raises(EmulationFault, match="only polling is left"):
        device.run(0)
