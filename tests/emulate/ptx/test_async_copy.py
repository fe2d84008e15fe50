"""cp.async, bulk copies and TMA: zero fill, commit groups, boxes at the edges, swizzles, device-made maps, faults."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch, TensorMap
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.ptx.async_queue import CommitGroups
from mmcompile.emulate.ptx.tensor_maps import build_map, locate_box, place_box
from mmcompile.emulate.run import run_kernel

RNG = np.random.default_rng(11)
LATE = {"late": True}
THREAD = "mul.wide.u32 d40, r0, 16; add.s64 d41, d40, d0; add.s64 d42, d40, d1; shl.b32 r1, r0, 4;"


@pytest.mark.parametrize("options", [{}, LATE, {"late": True, "check_races": True}], ids=["eager", "late", "races"])
def test_cp_async_with_source_sizes(run_ptx, options):
    """Source size 0, 4, 8, 12 or 16: the rest of the 16 bytes is zero, and nothing beyond is read."""
    source = RNG.integers(1, 256, (32, 16)).astype(np.uint8)
    body = f"""{THREAD} rem.u32 r2, r0, 5; shl.b32 r2, r2, 2;
    cp.async.cg.shared.global [r1], [d41], 16, r2; cp.async.commit_group; cp.async.wait_group 0;
    ld.shared.v4.b32 {{r4, r5, r6, r7}}, [r1]; st.global.v4.b32 [d42], {{r4, r5, r6, r7}};"""
    out = run_ptx(body, [source, np.zeros((32, 16), np.uint8)], threads=32, shared=512, **options)[1]
    keep = np.arange(16)[None] < (np.arange(32) % 5 * 4)[:, None]
    np.testing.assert_array_equal(out, np.where(keep, source, 0))


def two_copies(wait):
    return f"""{THREAD} mov.b32 r6, 0; st.shared.v2.b32 [r1], {{r6, r6}};
    cp.async.ca.shared.global [r1], [d41], 4; cp.async.commit_group;
    cp.async.ca.shared.global [r1+4], [d41+4], 4; cp.async.commit_group;
    {wait} ld.shared.v2.b32 {{r4, r5}}, [r1]; cp.async.wait_all; st.global.v2.b32 [d42], {{r4, r5}};"""


@pytest.mark.parametrize("wait,seen", [("cp.async.wait_group 0;", 2), ("cp.async.wait_group 1;", 1), ("", 0)])
def test_late_groups_complete_in_their_wait(run_ptx, wait, seen):
    source = RNG.integers(1, 1000, (32, 4)).astype(np.uint32)
    arrays = [source, np.zeros((32, 4), np.uint32)]
    early = run_ptx(two_copies(wait), arrays, threads=32, shared=512)[1]
    np.testing.assert_array_equal(early[:, :2], source[:, :2])
    late = run_ptx(two_copies(wait), arrays, threads=32, shared=512, **LATE)[1]
    np.testing.assert_array_equal(late[:, :2], np.where(np.arange(2) < seen, source[:, :2], 0))


def test_copies_that_nobody_waits_for(run_ptx):
    body = f"{THREAD} cp.async.cg.shared.global [r1], [d41], 16; cp.async.commit_group;"
    with pytest.raises(EmulationFault, match="nobody waited for: cp.async") as fault:
        run_ptx(body, [np.zeros((32, 4), np.uint32), np.zeros(4, np.uint32)], threads=32, shared=512, **LATE)
    assert fault.value.kind == "in flight"


@given(st.lists(st.one_of(st.just("add"), st.just("commit"), st.integers(0, 3)), max_size=30))
def test_commit_groups_against_a_list(actions):
    """One thread: waiting for n leaves the newest n groups."""
    groups, done, model, open_group, number = CommitGroups(1, True), [], [], [], 0
    everyone = np.ones(1, np.bool_)
    expected = []
    for action in actions:
        if action == "add":
            groups.add(everyone, lambda _, n=number: done.append(n))
            open_group.append(number)
            number += 1
        elif action == "commit":
            groups.commit(everyone)
            model.append(open_group)
            open_group = []
        else:
            groups.wait(everyone, action)
            while len(model) > action:
                expected += model.pop(0)
        assert done == expected
    groups.wait_all(everyone)
    assert sorted(done) == list(range(number)) and not groups.find_pending().any()


# ---------------------------------------------------------------------- boxes


@st.composite
def boxes(draw):
    rank = draw(st.integers(1, 5))
    shape = tuple(draw(st.integers(1, 6)) for _ in range(rank))
    box = tuple(draw(st.integers(1, 4)) for _ in range(rank - 1)) + (draw(st.sampled_from([4, 8, 16])),)
    start = tuple(draw(st.integers(-3, 7)) for _ in range(rank))
    return shape, box, start


@settings(max_examples=60)
@given(boxes())
def test_boxes_against_loops(case):
    """Elements in the order of shared memory, innermost coordinate first in the instruction; outside is outside."""
    shape, box, start = case
    outer = len(shape) - 1
    strides = (*(int(np.prod(shape[axis + 1 :])) * 4 + 16 for axis in range(outer)), 4)
    tensor = TensorMap(0x1000, 4, shape, strides, box)
    found = locate_box(tensor, start[::-1])
    places = itertools.product(*(range(n) for n in box))
    for number, place in enumerate(places):
        index = [s + p for s, p in zip(start, place, strict=True)]
        inside = all(0 <= i < n for i, n in zip(index, shape, strict=True))
        assert found.inside[number] == inside
        step = [*strides[:-1], 4]
        if inside:
            assert int(found.addresses[number]) == 0x1000 + sum(i * s for i, s in zip(index, step, strict=True))
    assert found.transferred_bytes == int(np.prod(box)) * 4
    np.testing.assert_array_equal(found.offsets, np.arange(np.prod(box)) * 4)


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_swizzled_places(span):
    """Chunk c of the row at byte 128 r goes to chunk c ^ (r % (span / 16))."""
    inner = span or 128
    tensor = TensorMap(0, 2, (64, 64), (128, 2), (16, inner // 2), span)
    places = place_box(tensor, locate_box(tensor, [0, 0]), 1024).reshape(16, inner // 2)
    for row in range(16):
        for column in range(0, inner // 2, 8):
            at = row * inner + column * 2
            line, chunk = at // 128, at % 128 // 16
            moved = chunk ^ (line % (span // 16)) if span else chunk
            assert places[row, column] == 1024 + line * 128 + moved * 16


def test_padded_fp4_and_rows():
    padded = TensorMap(0, 1, (4, 64), (64, 1), (2, 16), 0, True)
    box = locate_box(padded, [32, 1])
    assert box.transferred_bytes == 32 and int(box.addresses[0]) == 64 + 16
    np.testing.assert_array_equal(box.offsets[:16], [*range(8), *range(16, 24)])
    rows = TensorMap(0, 2, (100, 64), (128, 2), (1, 8))
    gathered = locate_box(rows, [8, 5, 99, 100, 0], rows=True)
    np.testing.assert_array_equal(gathered.inside.reshape(4, 8).all(axis=1), [True, True, False, True])
    np.testing.assert_array_equal(gathered.addresses.reshape(4, 8)[[0, 1, 3], 0], [5 * 128 + 16, 99 * 128 + 16, 16])


@pytest.mark.parametrize(
    "tensor,shared,kind",
    [
        (TensorMap(0, 2, (8, 64), (128, 2), (8, 64), 128), 64, "misaligned"),
        (TensorMap(0, 2, (8, 128), (256, 2), (8, 128), 128), 0, "illegal"),
        (TensorMap(0, 2, (8, 64), (128, 2), (8, 4)), 0, "illegal"),
    ],
)
def test_illegal_boxes(tensor, shared, kind):
    with pytest.raises(EmulationFault) as fault:
        place_box(tensor, locate_box(tensor, [0, 0]), shared)
    assert fault.value.kind == kind


def test_maps_from_fields():
    fields = {("rank", 0): 1, ("global_address", 0): 4096, ("elemtype", 0): 10, ("swizzle_mode", 0): 3}
    fields |= {("global_dim", 0): 64, ("global_dim", 1): 9, ("global_stride", 0): 128}
    fields |= {("box_dim", 0): 64, ("box_dim", 1): 8}
    assert build_map(fields) == TensorMap(4096, 2, (9, 64), (128, 2), (8, 64), 128)
    del fields["box_dim", 1]
    with pytest.raises(EmulationFault, match="box_dim"):
        build_map(fields)
    with pytest.raises(EmulationFault, match="global_address"):
        build_map({("rank", 0): 1})


# ---------------------------------------------------------------------- TMA and bulk copies in a kernel

TENSOR_TEXT = """.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128], .param .u32 x, .param .u32 y)
.reqntid 64
{{
.reg .pred p<9>; .reg .b32 r<30>; .reg .b64 d<9>;
mov.u32 r0, %tid.x; setp.eq.u32 p1, r0, 0; ld.param.b32 r10, [x]; ld.param.b32 r11, [y];
mov.b64 d1, source; cvta.param.u64 d1, d1; mov.b64 d2, target; cvta.param.u64 d2, d2;
@p1 mbarrier.init.shared::cta.b64 [4096], 1;
bar.sync 0;
@p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [4096], {size};
@p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes [0], [d1, {{r10, r11}}], [4096];
{wait}
shl.b32 r1, r0, 4;
ld.shared.v4.b32 {{r2, r3, r4, r5}}, [r1]; add.u32 r2, r2, 1; st.shared.v4.b32 [r1], {{r2, r3, r4, r5}};
{fence}
bar.sync 0;
@p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [d2, {{r10, r11}}], [0];
@p1 cp.async.bulk.commit_group;
{drain}
ret;
}}
"""
PARTS = {
    "size": "1024",
    "wait": "SPIN: mbarrier.try_wait.parity.shared::cta.b64 p2, [4096], 0; @!p2 bra SPIN;",
    "fence": "fence.proxy.async.shared::cta;",
    "drain": "@p1 cp.async.bulk.wait_group 0;",
}


def run_tensor(position, *, tensor=None, **options):
    """Load a box of 8 x 32 words, add one to every fourth word, store it; returns the target and what it should be."""
    parts = {name: options.pop(name, text) for name, text in PARTS.items()}
    source, target = RNG.integers(0, 1000, (20, 40)).astype(np.uint32), np.zeros((20, 40), np.uint32)
    memory = DeviceMemory()
    addresses = [memory.register(source, "source", writable=False), memory.register(target, "target")]
    maps = [TensorMap(address, 4, (20, 40), (160, 4), (8, 32), 128) for address in addresses]
    arguments = [tensor or maps[0], maps[1], position[1], position[0]]
    text = TENSOR_TEXT.format(**parts)
    run_kernel(Launch(text, "kernel", (1, 1, 1), 64, 8192, arguments, memory, **options))
    found = memory.contents(addresses[1]).view(np.uint32).reshape(20, 40)
    wanted = target.copy()
    y, x = position
    rows, columns = slice(max(y, 0), max(y + 8, 0)), slice(max(x, 0), max(x + 32, 0))
    step = ((np.arange(40)[None] - x) % 4 == 0).astype(np.uint32)
    wanted[rows, columns] = (source + step)[rows, columns]
    return found, wanted


ALL_MODES = [{}, LATE, {"late": True, "schedule": "warp", "seed": 4}, {"late": True, "check_races": True}]


@pytest.mark.parametrize("position", [(0, 0), (4, 8), (-3, -4), (15, 20), (12, 8)])
@pytest.mark.parametrize("options", ALL_MODES, ids=["eager", "late", "late-warp", "races"])
def test_tensor_copies(position, options):
    """In the middle and over every edge: outside is zero on the way in and not written on the way out."""
    found, wanted = run_tensor(position, **options)
    np.testing.assert_array_equal(found, wanted)


def outcome(**options):
    try:
        found, wanted = run_tensor((4, 8), **options)
    except EmulationFault as fault:
        return fault.kind
    return "right" if np.array_equal(found, wanted) else "wrong"


@pytest.mark.parametrize(
    "parts,modes,kinds",
    [
        ({"wait": ""}, LATE, {"uninitialised"}),
        ({"wait": ""}, {"check_races": True}, {"race"}),
        ({"fence": ""}, LATE, {"in flight"}),
        ({"drain": ""}, LATE, {"in flight"}),
        ({"size": "512"}, LATE, {"deadlock", "uninitialised"}),
        ({"size": "2048"}, {}, {"deadlock"}),
    ],
)
def test_planted_faults(parts, modes, kinds):
    assert outcome(**parts, **modes) in kinds


def test_out_of_bounds_map():
    """A map that claims more rows than the buffer has."""
    memory = DeviceMemory()
    address = memory.register(np.zeros((4, 40), np.uint32), "short")
    with pytest.raises(EmulationFault, match="short") as fault:
        text = TENSOR_TEXT.format(**PARTS)
        maps = [TensorMap(address, 4, (20, 40), (160, 4), (8, 32), 128)] * 2
        run_kernel(Launch(text, "kernel", (1, 1, 1), 64, 8192, [*maps, 0, 0], memory))
    assert fault.value.kind == "out of bounds" and "cp.async.bulk.tensor" in fault.value.text


@pytest.mark.parametrize("options", ALL_MODES, ids=["eager", "late", "late-warp", "races"])
def test_bulk_copies(run_ptx, options):
    """Global to shared through an mbarrier, shared to global through a bulk group."""
    body = """setp.eq.u32 p1, r0, 0; @p1 mbarrier.init.shared::cta.b64 [1024], 1; bar.sync 0;
    mov.b32 r1, 512; @p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [1024], r1;
    @p1 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [0], [d0], r1, [1024];
    SPIN: mbarrier.try_wait.parity.shared::cta.b64 p2, [1024], 0; @!p2 bra SPIN;
    shl.b32 r2, r0, 2; ld.shared.b32 r3, [r2]; bar.sync 0;
    xor.b32 r2, r2, 508; st.shared.b32 [r2], r3; fence.proxy.async.shared::cta; bar.sync 0;
    @p1 cp.async.bulk.global.shared::cta.bulk_group [d1], [0], r1;
    @p1 cp.async.bulk.commit_group; @p1 cp.async.bulk.wait_group.read 0;"""
    values = RNG.integers(0, 2**31, 128).astype(np.uint32)
    out = run_ptx(body, [values, np.zeros(128, np.uint32)], shared=2048, **options)[1]
    np.testing.assert_array_equal(out, values[::-1])


@pytest.mark.parametrize(
    "text",
    [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [d0], [r1], 16;",
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[r1], [d0, {r1, r2}], [r3], h1;",
        "cp.async.bulk.tensor.4d.im2col.shared::cta.global.mbarrier::complete_tx::bytes "
        "[r1], [d0, {r1, r2, r3, r4}], [r3], {h1, h2};",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [r1], [r2], 16, [r3];",
        "cp.async.cg.shared.global [r1], [d0], 8;",
    ],
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [np.zeros(4, np.uint32)], shared=64)
    assert fault.value.kind == "unknown instruction"
