"""Tensor memory: allocation, data movement shapes, scale factors, late loads and stores, uninitialised cells."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.ptx.instructions.tcgen05_transfer import Reduction
from mmcompile.emulate.ptx.tensor_memory import TensorMemory, locate_access

RNG = np.random.default_rng(2)
LATE = {"late": True}


@given(st.lists(st.sampled_from([32, 64, 128, 256]), max_size=8), st.randoms(use_true_random=False))
def test_allocations_never_overlap(sizes, random):
    memory, held = TensorMemory(1), []
    for size in sizes:
        try:
            held.append((memory.allocate(0, size, exclusive=False, largest=512), size))
        except EmulationFault:
            memory.free(0, *held.pop(random.randrange(len(held))))
        cells = [column for start, n in held for column in range(start, start + n)]
        assert len(cells) == len(set(cells)) and max(cells, default=0) < 512


@pytest.mark.parametrize("columns", [0, 16, 48, 96, 1024])
def test_sizes_are_powers_of_two(columns):
    with pytest.raises(EmulationFault, match=f"alloc of {columns} columns"):
        TensorMemory(1).allocate(0, columns, exclusive=False, largest=512)


def test_exclusive_allocation():
    """576 columns only where the target has them, only alone."""
    memory = TensorMemory(1)
    assert memory.allocate(0, 576, exclusive=True, largest=576) == 0
    memory.check_columns(0, 512, 64)
    with pytest.raises(EmulationFault, match="would block"):
        memory.allocate(0, 32, exclusive=False, largest=576)
    memory.free(0, 0, 576)
    with pytest.raises(EmulationFault, match="576 columns"):
        memory.allocate(0, 576, exclusive=True, largest=512)
    memory.allocate(0, 32, exclusive=False, largest=576)
    with pytest.raises(EmulationFault, match="exclusive"):
        memory.allocate(0, 576, exclusive=True, largest=576)


def test_access_checks():
    memory = TensorMemory(1)
    start = memory.allocate(0, 32, exclusive=False, largest=512)
    cells = np.zeros((1, 1), np.int64), np.full((1, 1), start)
    with pytest.raises(EmulationFault) as fault:
        memory.read(0, *cells)
    assert fault.value.kind == "uninitialised"
    assert np.isnan(memory.read(0, *cells, poison=True).view(np.float32)).all()
    memory.write(0, *cells, np.ones((1, 1), np.uint32))
    assert memory.read(0, *cells, poison=True) == 1
    assert memory.read(0, *cells) == 1
    memory.busy[0, 0, start] = True
    with pytest.raises(EmulationFault) as fault:
        memory.write(0, *cells, np.ones((1, 1), np.uint32))
    assert fault.value.kind == "in flight"
    with pytest.raises(EmulationFault) as fault:
        memory.read(0, cells[0], cells[1] + 32)
    assert fault.value.kind == "out of bounds"
    with pytest.raises(EmulationFault):
        memory.free(0, start, 64)


def test_shapes_cover_their_tiles_once():
    """Every shape moves 16 or 32 rows of its columns, each cell once."""
    shapes = [("32x32b", 16, 32, 16), ("16x64b", 4, 16, 8), ("16x128b", 4, 16, 16), ("16x256b", 2, 16, 16)]
    for shape, repeat, rows, columns in shapes:
        row, column = locate_access(shape, repeat)
        cells = set(zip(row.reshape(-1).tolist(), column.reshape(-1).tolist(), strict=True))
        assert cells == {(r, c) for r in range(rows) for c in range(columns)} and row.size == rows * columns
    row, column = locate_access("16x32bx2", 8, 64)
    assert {*column[16:].reshape(-1).tolist()} == {*range(64, 72)} and row.max() == 15


def test_256b_is_the_mma_accumulator():
    """16x256b gives each lane what mma.m16n8 keeps in its accumulator registers."""
    row, column = locate_access("16x256b", 1)
    for lane in range(32):
        places = [(lane // 4 + 8 * (i // 2), lane % 4 * 2 + i % 2) for i in range(4)]
        assert list(zip(row[lane], column[lane], strict=True)) == places


def fill_scales(memory, codes, column):
    """Codes [rows, n] to the layout: row r in lane r % 32 of each partition, cell r // 32, four scales to a cell."""
    rows, count = codes.shape
    across = (rows + 31) // 32
    for r in range(rows):
        for k in range(count):
            at = column + k // 4 * across + r // 32
            for partition in range(4):
                cell = memory.words[0, partition * 32 + r % 32]
                cell[at : at + 1].view(np.uint8)[k % 4] = codes[r, k]
                memory.known[0, partition * 32 + r % 32, at] = True


@pytest.mark.parametrize("rows", [8, 64, 128, 256])
@pytest.mark.parametrize("count,identifier", [(1, 3), (2, 2), (3, 2), (4, 0), (6, 2), (8, 0)])
@pytest.mark.parametrize("scale_type", ["ue8m0", "ue4m3"])
def test_scales(rows, count, identifier, scale_type):
    memory = TensorMemory(1)
    memory.allocate(0, 64, exclusive=False, largest=512)
    codes = RNG.integers(0, 256 if scale_type == "ue8m0" else 128, (rows, 12)).astype(np.uint8)
    fill_scales(memory, codes, 4)
    found = memory.read_scales(0, 4, rows, count, identifier, scale_type)
    name = "ue8m0" if scale_type == "ue8m0" else "e4m3"
    np.testing.assert_array_equal(found, formats.decode(name, codes[:, identifier : identifier + count]))


def test_wrong_scales_are_faults():
    memory = TensorMemory(1)
    memory.allocate(0, 64, exclusive=False, largest=512)
    fill_scales(memory, np.full((128, 4), 0x38, np.uint8), 0)
    with pytest.raises(EmulationFault, match="never written"):
        memory.read_scales(0, 4, 128, 4, 0, "ue4m3")
    with pytest.raises(EmulationFault, match="not allocated|allocated"):
        memory.read_scales(0, 62, 128, 4, 0, "ue4m3")
    memory.words[0, 40, 1] ^= 1
    with pytest.raises(EmulationFault, match="four partitions"):
        memory.read_scales(0, 0, 128, 4, 0, "ue4m3")
    fill_scales(memory, np.full((128, 4), 0xB8, np.uint8), 0)
    with pytest.raises(EmulationFault, match="bit 7"):
        memory.read_scales(0, 0, 128, 4, 0, "ue4m3")


def test_reductions():
    values = np.array([[1, -3], [np.nan, 2], [-2, 0.5]], np.float32).view(np.uint32)

    def apply(*form):
        return Reduction(*form).apply(values).view(np.float32).tolist()

    assert apply("max", "f32", False, False) == [1, 2] and apply("min", "f32", False, False) == [-2, -3]
    assert apply("max", "f32", True, False) == [2, 3]
    assert np.isnan(apply("max", "f32", False, True)[0])
    integers = np.array([[1], [0xFFFFFFFF]], np.uint32)
    assert Reduction("max", "s32", False, False).apply(integers)[0] == 1
    assert Reduction("max", "u32", False, False).apply(integers)[0] == 0xFFFFFFFF


# ---------------------------------------------------------------------- in a kernel

BEGIN = """shr.u32 r1, r0, 5; setp.eq.u32 p1, r1, 0;
@p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [0], {columns};
bar.sync 0; ld.shared.b32 r2, [0]; shl.b32 r3, r1, 21; add.u32 r3, r3, r2;
mul.wide.u32 d40, r0, 64; add.s64 d41, d40, d0; add.s64 d42, d40, d1;
""" + "".join(f"ld.global.b32 r{10 + i}, [d41+{4 * i}];" for i in range(16))
END = "bar.sync 0; @p1 tcgen05.dealloc.cta_group::1.sync.aligned.b32 r2, {columns};"


def registers(first, count):
    return "{" + ", ".join(f"r{first + i}" for i in range(count)) + "}"


PLAIN = "32x32b.x16"
CLEAR = " ".join(f"mov.b32 r{i}, 0;" for i in range(48, 56))


def move(
    store=PLAIN, load=PLAIN, *, wait_st=True, wait_ld=True, before_load="", after_load="", end=END, columns=64
):
    """Every thread stores 16 words to tensor memory, loads 16 words, writes them out."""
    out = "".join(f"st.global.b32 [d42+{4 * i}], r{40 + i};" for i in range(16))
    half_st, half_ld = (", 16" if shape.startswith("16x32bx2") else "" for shape in (store, load))
    return f"""{BEGIN.format(columns=columns)}
    tcgen05.st.sync.aligned.{store}.b32 [r3]{half_st}, {registers(10, 16)};
    {"tcgen05.wait::st.sync.aligned;" if wait_st else ""} {before_load}
    tcgen05.ld.sync.aligned.{load}.b32 {registers(40, 16)}, [r3]{half_ld}; {after_load}
    {"tcgen05.wait::ld.sync.aligned;" if wait_ld else ""} {out} {end.format(columns=columns)}"""


def run_move(run_ptx, body, target="sm_100a", **options):
    values = RNG.integers(0, 2**32, (128, 16), dtype=np.uint64).astype(np.uint32)
    out = run_ptx(body, [values, np.zeros((128, 16), np.uint32)], target=target, shared=64, **options)[1]
    return values, out


MODES = [{}, LATE, {"late": True, "schedule": "warp"}, {"late": True, "check_races": True}]


@pytest.mark.parametrize("options", MODES, ids=["eager", "late", "late-warp", "races"])
@pytest.mark.parametrize("shape", ["32x32b.x16", "16x32bx2.x16", "16x64b.x16", "16x128b.x8", "16x256b.x4"])
def test_store_and_load(run_ptx, shape, options):
    values, out = run_move(run_ptx, move(shape, shape), **options)
    np.testing.assert_array_equal(out, values)


def test_shapes_see_the_same_cells(run_ptx):
    """Stored by rows, loaded as mma fragments (the first 16 rows of each warp)."""
    body = move().replace(
        f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {registers(40, 16)}",
        f"{CLEAR} tcgen05.ld.sync.aligned.16x256b.x2.b32 {registers(40, 8)}",
    )
    values, out = run_move(run_ptx, body)
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        for i in range(8):
            row, column = lane // 4 + i // 2 % 2 * 8, i // 4 * 8 + lane % 4 * 2 + i % 2
            assert out[thread, i] == values[32 * warp + row, column]


def fault_of(run_ptx, body, **options):
    try:
        values, out = run_move(run_ptx, body, **options)
    except EmulationFault as fault:
        return fault.kind
    return "right" if np.array_equal(values, out) else "wrong"


OVERWRITE = f"tcgen05.st.sync.aligned.32x32b.x16.b32 [r3], {registers(10, 16)}; tcgen05.wait::st.sync.aligned;"

STORED_AFTER = "tcgen05.wait::ld.sync.aligned; tcgen05.wait::st.sync.aligned;"


@pytest.mark.parametrize(
    "parts,modes,kind",
    [
        ({"wait_st": False}, LATE, "in flight"),  # freed before the store is waited for
        ({"wait_st": False, "after_load": STORED_AFTER}, LATE, "wrong"),
        ({"wait_ld": False}, LATE, "in flight"),  # freed before the load is waited for
        ({"after_load": OVERWRITE}, LATE, "in flight"),
        ({"end": ""}, {}, "illegal"),  # never deallocated
        ({"before_load": "xor.b32 r3, r3, 0x200000;"}, {}, "illegal"),  # another warp's partition
        ({"before_load": "add.u32 r3, r3, 60;"}, {}, "out of bounds"),
        ({"before_load": "add.u32 r3, r3, 32;"}, {}, "wrong"),
        ({"columns": 48}, {}, "illegal"),
        ({"columns": 1024}, {}, "illegal"),
    ],
)
def test_planted_faults(run_ptx, parts, modes, kind):
    assert fault_of(run_ptx, move(**parts), **modes) == kind


@pytest.mark.parametrize("data_type", [np.float32, np.float16])
def test_cells_that_nobody_wrote_load_as_nan(run_ptx, data_type):
    """Kernels load accumulators that they do not use: no fault, but nothing is computed from them unnoticed."""
    values, out = run_move(run_ptx, move(before_load="add.u32 r3, r3, 8;"))
    np.testing.assert_array_equal(out[:, :8], values[:, 8:])
    assert np.isnan(np.ascontiguousarray(out[:, 8:]).view(data_type)).all()


def test_576_columns(run_ptx):
    """.exclusive on sm_107a; sm_100a has 512."""
    body = move(columns=576).replace("cta_group::1.sync.aligned.shared", "cta_group::1.exclusive.sync.aligned.shared")
    body = body.replace("add.u32 r3, r3, r2;", "add.u32 r3, r3, r2; add.u32 r3, r3, 560;")
    assert fault_of(run_ptx, body, target="sm_107a") == "right"
    assert fault_of(run_ptx, body, target="sm_100a") == "illegal"


@pytest.mark.parametrize("target,known", [("sm_100a", False), ("sm_100f", False), ("sm_103a", True), ("sm_107a", True)])
def test_load_with_reduction(run_ptx, target, known):
    body = move().replace("tcgen05.ld.sync.aligned.32x32b.x16.b32 " + registers(40, 16),
                          f"tcgen05.ld.red.sync.aligned.32x32b.x16.max.u32 {registers(40, 16)}, r60")  # fmt: skip
    body = body.replace("st.global.b32 [d42+60], r55;", "st.global.b32 [d42+60], r60;")
    if not known:
        with pytest.raises(EmulationFault) as fault:
            run_move(run_ptx, body, target)
        assert fault.value.kind == "unknown instruction"
        return
    values, out = run_move(run_ptx, body, target)
    np.testing.assert_array_equal(out[:, 15], values.max(axis=1))
    np.testing.assert_array_equal(out[:, :15], values[:, :15])


def test_allocation_after_relinquish(run_ptx):
    again = """@p1 tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
    @p1 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [4], 32;"""
    assert fault_of(run_ptx, move(before_load=again)) == "illegal"


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [0], 32;",
        "tcgen05.shift.cta_group::1.down [r1];",
        "tcgen05.ld.sync.aligned.32x32b.x1.pack::16b.b32 {r1}, [r2];",
        "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [r1], d1;",
    ],
)
def test_unknown_forms_are_refused(run_ptx, text):
    with pytest.raises(EmulationFault) as fault:
        run_ptx(text, [], target="sm_100a", shared=64)
    assert fault.value.kind == "unknown instruction"
