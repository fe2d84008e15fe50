"""The layouts that lane-wise inline assembly counts on are held against what Triton chose."""

from __future__ import annotations

import pytest

from mmcompile.core.errors import ToolchainError
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.targets._check import check_lanes
from mmcompile.targets._toolchain import compile_kernel
from mmcompile.targets.sm90 import TARGET

TEXT = '''
import triton
import triton.language as tl


@triton.jit
def kernel(x, out):
    row, column = tl.arange(0, 64), tl.arange(0, 4)
    words = tl.load(x + {place})
    lane = tl.inline_asm_elementwise("mov.u32 $0, %laneid;", "=r,r", [row], tl.int32, True, 1)
    words = tl.inline_asm_elementwise(
        "mov.b32 $0, $7; mov.b32 $1, $6; mov.b32 $2, $5; mov.b32 $3, $4;", "=&r,=&r,=&r,=&r,r,r,r,r", [words], tl.int32,
        True, 4)
    tl.store(out + {place}, words + lane[:, None])
'''
ALONG, ACROSS = "row[:, None] * 4 + column[None, :]", "row[:, None] + 64 * column[None, :]"


def make_source(place: str, **options: object) -> KernelSource:
    parameters = (Parameter("x", "*i32", "x"), Parameter("out", "*i32", "out"))
    return KernelSource("probe", TEXT.format(place=place), parameters, ("1", "1", "1"), 2, lanes=True, **options)


def test_rows_of_lanes_compile_and_the_register_limit_is_kept():
    free, bound = (compile_kernel(make_source(ALONG, max_registers=n), TARGET.spec.architectures[0], TARGET.spec)
                   for n in (None, 16))
    assert ".maxnreg 16" in bound.assembly and ".maxnreg" not in free.assembly
    assert free.source.digest != bound.source.digest


def test_columns_across_lanes_are_refused():
    with pytest.raises(ToolchainError, match=r"tensor \[64\] of 'probe' the layout .*needs one row a thread"):
        compile_kernel(make_source(ACROSS), TARGET.spec.architectures[0], TARGET.spec)


BLOCKED = "#{} = #ttg.blocked<{{sizePerThread = {}, threadsPerWarp = {}, warpsPerCTA = {}, order = {}}}>\n"
LANES = BLOCKED.format("good", "[1, 4]", "[32, 1]", "[2, 1]", "[1, 0]")
OTHER = BLOCKED.format("bad", "[2, 4]", "[32, 1]", "[2, 1]", "[1, 0]")
LINE = BLOCKED.format("line", "[1]", "[32]", "[2]", "[0]")
PAIRS = BLOCKED.format("pairs", "[2]", "[32]", "[2]", "[0]")


@pytest.mark.parametrize(("tensors", "refused"), [
    ("tensor<64x4xi32, #good> -> tensor<64x4xf32, #good>", None),
    ("tensor<64x4xi32, #good>, tensor<64x4xi32, #bad> -> tensor<64x4xf32, #good>", "64x4"),
    ("tensor<64x4xi32, #good> -> tensor<64x4x!tt.ptr<f32>, #bad>", "64x4"),
    ("tensor<64xi32, #line> -> tensor<64xi32, #ttg.slice<{dim = 1, parent = #good}>>", None),
    ("tensor<64xi32, #ttg.slice<{dim = 1, parent = #bad}>> -> tensor<64xi32, #line>", "64"),
    ("tensor<64xi32, #pairs> -> tensor<64xi32, #line>", "64"),
    ("tensor<16xi32, #bad> -> tensor<16xi32, #bad>", None),
])
def test_every_operand_and_result_is_looked_at(tensors: str, refused: str | None):
    text = LANES + OTHER + LINE + PAIRS + f'%1 = tt.elementwise_inline_asm "mov" {{packed = 1}} %0 : {tensors}\n'
    if refused is None:
        check_lanes(text, make_source(ALONG))
        return
    with pytest.raises(ToolchainError, match=rf"tensor \[{refused}\]"):
        check_lanes(text, make_source(ALONG))
