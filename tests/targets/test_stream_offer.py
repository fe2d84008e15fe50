"""The streamed step as a grade of a merged decode step: what a plan must be, its records, buffers and layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmcompile.core.errors import ArtifactError, LoweringError
from mmcompile.core.plan import Buffer, Kernel, Part, Plan, Schedule
from mmcompile.core.stream import arrange_part, count_copied, drop_streams, parse_tag
from mmcompile.driver.mono import refuse_resident
from mmcompile.runtime.layouts import check_streams, find_parts
from mmcompile.targets._tuned.stream_offer import StreamOffer, offer_stream
from mmcompile.targets._tuned.stream_pack import LAYER_ROLES, pack_norms, pack_stream
from mmcompile.targets._tuned.stream_recognise import DecoderStep, recognise_step
from mmcompile.targets._tuned.stream_shape import StepShape
from mmcompile.targets.sm90 import TARGET
from mmcompile.targets.sm100 import TARGET as SM100
from tests.targets import stream_decoder
from tests.targets.stream_decoder import Decoder

SPEC = TARGET.spec
Change = Callable[[Decoder], None]


def recognise(decoder: Decoder) -> DecoderStep | str:
    plan = decoder.plan()
    return recognise_step(plan, plan.phases["decode"])


def offer(decoder: Decoder, most: int = 1, units: int = 8) -> StreamOffer:
    plan = decoder.plan()
    return offer_stream(plan, plan.phases["decode"], dataclasses.replace(SPEC, units=units), most)


def test_a_dense_decoder_is_recognised_by_its_operations() -> None:
    step = recognise(Decoder(2))
    assert isinstance(step, DecoderStep)
    assert step.shape == StepShape(2, 256, 4, 2, 64, 256, 500, page_size=16)
    assert step.last == 16 and step.weights["qkv", 1] == "layers.1.qkv" and step.weights["head", 2] == "head"
    assert step.norms["final", 2] == "norm_norm" and step.norms["after", 0] == "layers.0.after_norm"
    assert set(step.weights) == {(role, i) for role in LAYER_ROLES for i in range(2)} | {("head", 2)}
    assert step.views["kv_cache.1"].buffer == "kv_cache_1" and step.views["result"].buffer == "logits"


Q, ATTENTION = "layers.1.qkv", "layers.1.attention"


def give_weight(launch: str, name: str, *shape: int) -> Change:
    """Another weight for an input of a launch."""
    return lambda decoder: decoder.give(launch, **{name: decoder.weight("extra", *shape)})


def change_buffer(name: str, **changes: Any) -> Change:
    def change(decoder: Decoder) -> None:
        decoder.buffers[name] = decoder.buffers[name].model_copy(update=changes)

    return change


REFUSED: list[tuple[Change, str]] = [
    (give_weight(Q, "q_weight", 64), "layers.1.qkv has norms of q and k"),
    (give_weight(Q, "bias", 512), "layers.1.qkv has a bias"),
    (give_weight(Q, "delta", 512), "layers.1.qkv has an adapter"),
    (give_weight("layers.0.o", "bias", 256), "layers.0.o has a bias"),
    (lambda d: d.change(ATTENTION, window=128), "layers.1.attention has a window of 128 tokens"),
    (lambda d: d.change(ATTENTION, scale=0.1), "scales scores by 0.1"),
    (give_weight(Q, "cos_sin", 64, 32), "turns 32 of 64 dimensions of a head (partial RoPE)"),
    (give_weight(Q, "cos_sin", 64, 64), "a RoPE table of its own"),
    (change_buffer("kv_cache_1", dtype="float8_e4m3fn"), "its cache in float8_e4m3fn, not bfloat16"),
    (lambda d: d.change(Q, layout="nvfp4_sm90"), "its cache in nvfp4_sm90, not bfloat16"),
    (lambda d: d.change("layers.1.gate_up", op="moe"), "a mixture of experts"),
    (lambda d: d.change("layers.1.gate_up", op="linear_nvfp4"), "weights in NVFP4"),
    (lambda d: d.change("layers.1.gate_up", op="linear_mxfp8"), "weights in MXFP8"),
    (lambda d: d.change(ATTENTION, op="paged_block_sparse_attention"), "block-sparse attention"),
    (lambda d: d.change(Q, op="qkv_norm_rope_insert_index"), "an indexer of sparse attention"),
    (lambda d: d.change("layers.0.gate_up", activation="none"), "the activation 'none', not 'swiglu'"),
    (lambda d: d.change("norm.rms", weight_offset=1.0), "adds to its weights"),
    (lambda d: d.change("norm.rms", eps=1e-6), "eps 1e-06, others have 1e-05"),
    (change_buffer("head", dtype="float16"), "weights in float16"),
    (lambda d: d.give("layers.1.input.rms", x="decode.layers.0.o.0"), "does not norm the residual stream"),
    (lambda d: d.give("sample", hidden="decode.norm.rms.0"), "decode.norm.rms.0 is read after the logits"),
    (change_buffer("head", layout="fragments"), "or one that is arranged"),
]


@pytest.mark.parametrize("change, reason", REFUSED, ids=[reason for _, reason in REFUSED])
def test_what_the_stream_does_not_have_is_refused_with_its_launch(change: Change, reason: str) -> None:
    decoder = Decoder(2)
    change(decoder)
    found = recognise(decoder)
    assert isinstance(found, str) and reason in found, found
    assert offer(decoder).find(1) == found


def test_a_phase_that_ends_early_is_refused() -> None:
    decoder = Decoder(1)
    decoder.launches = decoder.launches[:-2]
    assert recognise(decoder) == "the phase ends before the logits"


def test_sizes_are_refused_with_the_number_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Decoder(1).plan()
    many = offer_stream(plan, plan.phases["decode"], SM100.spec, 1).find(1)
    assert isinstance(many, str) and "architecture" in many
    assert "2 KV heads" in str(offer(Decoder(1), units=1).find(1))
    monkeypatch.setattr(stream_decoder, "HIDDEN", 576)  # as SmolLM2 has
    assert offer(Decoder(1)).find(1) == "hidden = 576 is not a multiple of 256, the columns of one stage"
    monkeypatch.setattr(stream_decoder, "HIDDEN", 256)
    monkeypatch.setattr(stream_decoder, "INTERMEDIATE", 320)
    assert offer(Decoder(1)).find(1) == "intermediate = 320 is not a multiple of 256, the columns of one stage"


def test_token_counts_have_kernels_of_their_own_and_one_order_of_the_weights() -> None:
    found = offer(Decoder(2), most=4)
    assert list(found.streams) == [1, 2, 4] and {s.bytes for s in found.streams.values()} == {1835008}
    assert found.find(3) == found.streams[4] and found.find(9) == "it computes up to 8 tokens"
    assert {s.record.arguments[0] for s in found.streams.values()} == {found.streams[1].record.arguments[0]}
    few = offer(Decoder(2), most=8, units=4)  # two programs for each KV head
    assert few.find(2) == few.streams[2]
    assert "8 sequences, and 2 programs" in str(few.find(8))
    assert "4 sequences, and 2 programs" in str(few.find(4)) and few.streams[1].programs == 4


def make_weights(plan: Plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {n: b for n, b in plan.buffers.items() if b.role == "weight"}
    return {
        n: torch.randn(tuple(map(int, b.shape)), generator=generator).to(getattr(torch, b.dtype))
        for n, b in weights.items()
    }


def with_offer(decoder: Decoder, mode: str = "stream") -> tuple[Plan, StreamOffer]:
    """A plan that holds the offer for one token, with a kernel's record in name only."""
    plan, found = decoder.plan(), offer(decoder)
    schedule = Schedule(
        low=1, high=1, kernel="merged", programs=1, stages=(), layers=(), private={}, private_bytes=0, mode=mode,
        seconds={}, basis="cost model", stream=found.streams[1],
    )  # fmt: skip
    phase = plan.phases["decode"].model_copy(update={"schedules": (schedule,)})
    return plan.model_copy(update={"phases": {"decode": phase}, "buffers": plan.buffers | found.buffers}), found


def test_parts_make_the_stream_that_the_kernel_reads() -> None:
    plan, found = with_offer(Decoder(2))
    weights, step = make_weights(plan), recognise(Decoder(2))
    assert isinstance(step, DecoderStep)
    made = {name: torch.full((len_of(buffer),), 255, dtype=torch.uint8) for name, buffer in found.buffers.items()}
    for weight, places in find_parts(plan).items():
        for name, part in places:
            data = arrange_part(weights[weight], part.layout)
            made[name][part.offset : part.offset + len(data)] = data
    shape = dataclasses.replace(step.shape, programs=8, warp_k=32)
    stream = pack_stream(shape, {key: weights[name] for key, name in step.weights.items()})
    norms = pack_norms(shape, {key: weights[name] for key, name in step.norms.items()})
    assert torch.equal(made["decode.stream"], stream)
    assert torch.equal(made["decode.stream_norms"], norms.view(-1).view(torch.uint8))
    assert found.streams[1].bytes == len(stream)


def len_of(buffer: Buffer) -> int:
    return int(torch.Size(buffer.shape).numel()) * getattr(torch, buffer.dtype).itemsize


def test_tags_name_an_order_and_hold_its_digest() -> None:
    _, found = with_offer(Decoder(2))
    tags = {part.layout for part in found.buffers["decode.stream"].parts}
    assert all(parse_tag(tag).tag == tag for tag in tags) and len(tags) == 5
    for tag in tags:
        assert parse_tag(tag[:-1] + ("0" if tag[-1] != "0" else "1")) is None
    assert parse_tag("stream_heads4x0x64_8x8x1x32_00000000") is None
    assert parse_tag("stream_natural_0x8x1x32_00000000") is None
    with pytest.raises(ValueError, match="unknown|no weight"):
        arrange_part(torch.zeros(8, 256).bfloat16(), "stream_natural_1x1x1x32_00000000")
    (tag,) = [part.layout for part in found.buffers["decode.stream"].parts if part.weight == "layers.0.qkv"]
    with pytest.raises(ValueError, match="is for bf16"):
        arrange_part(torch.zeros(512, 128).bfloat16(), tag)


@pytest.mark.parametrize("fault", ["none", "layout", "offset", "short", "weight", "argument", "launches"])
def test_a_damaged_record_is_refused(fault: str) -> None:
    plan, found = with_offer(Decoder(2))
    name = found.streams[1].record.kernel
    parameters = tuple((p.name, p.type) for p in found.sources[1].parameters)
    record = Kernel(name=name, source="", parameters=parameters, num_stages=1, expectations={}, binaries={})
    plan = plan.model_copy(update={"kernels": {name: record}})
    parts = list(plan.buffers["decode.stream"].parts)
    schedule = plan.phases["decode"].schedules[0]
    if fault == "layout":
        parts[0] = Part(weight=parts[0].weight, offset=0, layout=parts[0].layout[:-8] + "00000000")
    elif fault == "offset":
        parts[1] = Part(weight=parts[1].weight, offset=0, layout=parts[1].layout)
    elif fault == "short":
        parts.pop()
    elif fault == "weight":
        parts[0] = Part(weight="none", offset=0, layout=parts[0].layout)
    elif fault == "argument":
        cut = schedule.stream.record.model_copy(update={"arguments": schedule.stream.record.arguments[1:]})
        schedule = schedule.model_copy(update={"stream": schedule.stream.model_copy(update={"record": cut})})
    elif fault == "launches":
        schedule = schedule.model_copy(update={"stream": schedule.stream.model_copy(update={"last": 99})})
    phase = plan.phases["decode"].model_copy(update={"schedules": (schedule,)})
    stream = plan.buffers["decode.stream"].model_copy(update={"parts": tuple(parts)})
    plan = plan.model_copy(update={"phases": {"decode": phase}, "buffers": plan.buffers | {"decode.stream": stream}})
    if fault == "none":
        check_streams(plan, "here")
        return
    with pytest.raises(ArtifactError, match="decode.stream|streamed step"):
        check_streams(plan, "here")


def test_the_copy_is_made_where_a_schedule_runs_it() -> None:
    plan, found = with_offer(Decoder(2))
    assert count_copied(plan) == 1835008 and count_copied(with_offer(Decoder(2), "step")[0]) == 0
    dropped = drop_streams(plan)
    assert dropped.phases["decode"].schedules[0].stream is None and not set(found.buffers) & set(dropped.buffers)
    assert drop_streams(dropped) is dropped


def test_programs_must_be_resident() -> None:
    stream = offer(Decoder(2)).streams[1]
    refuse_resident(stream, 8)
    with pytest.raises(LoweringError, match="8 programs .* 7 are"):
        refuse_resident(stream, 7)
