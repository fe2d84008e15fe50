"""tcgen05.mma: D = A B^T (+ D) with A in shared or tensor memory, B in shared memory, D in tensor memory.

PTX ISA, "tcgen05.mma". Each instruction computes in fp64 and rounds once; the hardware's own width of sums is not
documented.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmcompile.emulate import formats
from mmcompile.emulate.ptx import fragments
from mmcompile.emulate.ptx.async_state import get_state
from mmcompile.emulate.ptx.descriptors import ELEMENT_BITS, parse_tcgen05_descriptor
from mmcompile.emulate.ptx.faults_at import faults_at_line
from mmcompile.emulate.ptx.group import Group
from mmcompile.emulate.ptx.instruction_descriptor import InstructionDescriptor, parse_instruction_descriptor
from mmcompile.emulate.ptx.instructions.matrix import multiply
from mmcompile.emulate.ptx.instructions.table import runtime
from mmcompile.emulate.ptx.instructions.tcgen05_transfer import enqueue, find_cells, read_by_tensor_core
from mmcompile.emulate.ptx.operands import check_published, count_chunk_bytes, find_operand, list_chunks, read_operand
from mmcompile.emulate.ptx.tensor_memory import LANES, locate_accumulator

Mask = npt.NDArray[np.bool_] | None
Values = npt.NDArray[Any]


@dataclass(frozen=True)
class Operation:
    """One tcgen05.mma of one thread.

    Attributes: block: of the group. d: tensor memory address. a: descriptor, or address in tensor memory. b:
        descriptor. a_scales, b_scales: tensor memory addresses. disabled: lanes of D that are not written (a bit
        each). use_d: whether D is added. shift: D is divided by 2**shift first.
    """

    block: int
    shape: InstructionDescriptor
    d: int
    a: int
    a_in_tensor_memory: bool
    b: int
    a_scales: int
    b_scales: int
    disabled: int
    use_d: bool
    shift: int


@runtime
def issue_tensor_core(
    g: Group,
    kind: str,
    scale_block: int,
    target: str,
    d: Any,
    a: Any,
    a_in_tensor_memory: bool,
    b: Any,
    descriptors: Any,
    a_scales: Any,
    b_scales: Any,
    disabled: list[Any] | None,
    use_d: Any,
    shift: int,
    mask: Mask,
) -> None:
    """tcgen05.mma of every active lane (kernels elect one)."""
    for lane in g.active_lanes(mask):
        with faults_at_line(g):
            shape = parse_instruction_descriptor(int(descriptors[lane]), kind, scale_block, target)
        skipped = sum(int(part[lane]) << 32 * number for number, part in enumerate(disabled or []))
        operation = Operation(
            int(lane) // g.threads, shape, int(d[lane]), int(a[lane]), a_in_tensor_memory, int(b[lane]),
            0 if a_scales is None else int(a_scales[lane]), 0 if b_scales is None else int(b_scales[lane]),
            skipped, bool(use_d[lane]), shift,
        )  # fmt: skip
        _check_published(g, operation)
        enqueue(g, get_state(g), int(lane), lambda agent, operation=operation: _perform(g, agent, operation))


def _check_published(g: Group, operation: Operation) -> None:
    """The operands in shared memory are published to the asynchronous proxy (late mode)."""
    if not g.late:
        return
    shape = operation.shape
    operands = [(operation.b, shape.columns, shape.b_type, shape.b_transposed)]
    if not operation.a_in_tensor_memory:
        operands.append((operation.a, shape.rows, shape.a_type, shape.a_transposed))
    for bits, rows, element_type, transposed in operands:
        with faults_at_line(g):
            places = find_operand(g, parse_tcgen05_descriptor(bits), rows, shape.depth, element_type, transposed)
        chunks = list_chunks(places, element_type, transposed) + operation.block * g.shared_stride
        check_published(g, chunks, count_chunk_bytes(element_type))


def _perform(g: Group, agent: int, operation: Operation) -> None:
    state, shape, block = get_state(g), operation.shape, operation.block
    b = _read_shared(g, agent, block, operation.b, shape.columns, shape.depth, shape.b_type, shape.b_transposed)
    if operation.a_in_tensor_memory:
        a = _read_tensor_memory(g, agent, operation)
    else:
        a = _read_shared(g, agent, block, operation.a, shape.rows, shape.depth, shape.a_type, shape.a_transposed)
    if shape.scale_type:
        a = a * _read_scales(g, agent, operation, operation.a_scales, shape.rows, shape.a_scale)
        b = b * _read_scales(g, agent, operation, operation.b_scales, shape.columns, shape.b_scale)
    product = multiply(a, b.T) * (shape.a_sign * shape.b_sign)
    rows = (operation.d >> 16) + locate_accumulator(shape.rows)
    if operation.disabled:
        written = np.array([not operation.disabled >> int(row) & 1 for row in rows])
        rows, product = rows[written], product[written]
        if not len(rows):
            return
    lanes, columns = rows[:, None], ((operation.d & 0xFFFF) + np.arange(shape.columns))[None, :]
    if operation.use_d:
        before = _decode(state.tensor_memory.read(block, lanes, columns), shape.d_type)
        product = product + before * 0.5**operation.shift if operation.shift else product + before
    if shape.saturate:
        product = np.clip(product, -(2**31), 2**31 - 1)
    if state.order.enabled:
        state.order.access_tensor_memory(agent, find_cells(block, lanes, columns), write=True)
    state.tensor_memory.write(block, lanes, columns, _encode(product, shape.d_type))


def _read_shared(
    g: Group, agent: int, block: int, bits: int, rows: int, depth: int, element_type: str, transposed: bool
) -> Values:
    places = find_operand(g, parse_tcgen05_descriptor(bits), rows, depth, element_type, transposed)
    size = count_chunk_bytes(element_type)
    read_by_tensor_core(g, agent, block, list_chunks(places, element_type, transposed), size)
    values: Values = read_operand(g, np.array([block]), places, element_type)[0]
    return values


def _read_tensor_memory(g: Group, agent: int, operation: Operation) -> Values:
    """A [rows, depth] in tensor memory: rows in the lanes of an accumulator's, elements packed along the columns.

    For 64 rows this is how Triton 3.9 lays A out, 16 rows in each quarter of the lanes; the manual has no figure.
    """
    shape, state = operation.shape, get_state(g)
    if shape.a_type.endswith("padded") or shape.a_transposed:
        raise g.fault("illegal", f"A of {shape.rows} rows of {shape.a_type} in tensor memory is not modelled")
    count = shape.depth * ELEMENT_BITS[shape.a_type] // 32
    rows = (operation.a >> 16) + locate_accumulator(shape.rows)
    lanes, columns = rows[:, None], ((operation.a & 0xFFFF) + np.arange(count))[None, :]
    if state.order.enabled:
        state.order.access_tensor_memory(agent, find_cells(operation.block, lanes, columns), write=False)
    words = state.tensor_memory.read(operation.block, lanes, columns)
    if shape.a_type == "e2m1":
        return formats.decode("e2m1", formats.unpack_nibbles(np.ascontiguousarray(words).view(np.uint8)))
    return fragments.unpack_words(words, shape.a_type).reshape(shape.rows, shape.depth)


def _read_scales(g: Group, agent: int, operation: Operation, address: int, rows: int, identifier: int) -> Values:
    """Scale factors [rows, depth], each repeated over its block."""
    shape, state, column = operation.shape, get_state(g), address & 0xFFFF
    scales = state.tensor_memory.read_scales(
        operation.block, column, rows, shape.scales, identifier, shape.scale_type
    )
    if state.order.enabled:
        deep = (identifier + shape.scales + 3) // 4 * ((rows + 31) // 32)
        cells = find_cells(operation.block, np.arange(LANES)[:, None], column + np.arange(deep)[None, :])
        state.order.access_tensor_memory(agent, cells, write=False)
    return scales.astype(np.float64).repeat(shape.scale_block, axis=1)


def _decode(words: Any, data_type: str) -> Values:
    if data_type == "f16":
        return formats.decode_f16(words & np.uint32(0xFFFF)).astype(np.float64)
    if data_type == "s32":
        integers: Values = words.view(np.int32).astype(np.int64)
        return integers
    floats: Values = words.view(np.float32).astype(np.float64)
    return floats


def _encode(values: Values, data_type: str) -> npt.NDArray[np.uint32]:
    """Cells of an accumulator: one element each; f16 fills the lower half."""
    if data_type == "f16":
        return formats.encode_f16(values).astype(np.uint32)
    if data_type == "s32":
        return (values & 0xFFFFFFFF).astype(np.uint32)
    return values.astype(np.float32).view(np.uint32)
