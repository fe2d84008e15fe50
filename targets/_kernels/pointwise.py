"""Generated kernels for elementwise regions, and for regions that reduce over rows."""

from __future__ import annotations

import math
import re

from mmcompile.core.kernel import KernelSource, KernelTemplate, OpCall, Operand, Parameter
from mmcompile.core.region import REDUCING_OPS, Region
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.targets._emit import emit_kernel
from mmcompile.targets._kernels.common import kernel_name, need, next_power_of_two, short_dtype, symbol_parameters
from mmcompile.targets._kernels.expressions import DTYPES, HELPERS, find_unsupported, is_float, write_step

Size = int | str
BLOCK = 1024
MAX_ROW = 32768


def _product(sizes: list[Size]) -> Size:
    """Product of sizes: a number where all are, else an expression."""
    number = math.prod(n for n in sizes if isinstance(n, int))
    names = [f"({n})" for n in sizes if not isinstance(n, int)]
    return " * ".join([*names, *([str(number)] if number != 1 else [])]) if names else number


def _in_kernel(expression: Size) -> str:
    """A shape expression in Triton's spelling."""
    spelled = {"cdiv": "tl.cdiv", "min": "tl.minimum", "max": "tl.maximum"}
    return re.sub(r"\b(cdiv|min|max)\b", lambda match: spelled[match[0]], str(expression))


def broadcast_shapes(shapes: list[tuple[Size, ...]]) -> tuple[Size, ...] | None:
    """The common shape under torch's broadcasting, symbols equal only to themselves; None if there is none."""
    rank = max((len(shape) for shape in shapes), default=0)
    aligned = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    common: list[Size] = []
    for sizes in zip(*aligned, strict=True):
        wide = {size for size in sizes if size != 1}
        if len(wide) > 1:
            return None
        common.append(wide.pop() if wide else 1)
    return tuple(common)


def align_strides(operand: Operand, shape: tuple[Size, ...]) -> list[Size]:
    """Strides of an operand over ``shape``: 0 where it is broadcast."""
    missing = len(shape) - len(operand.shape)
    own = [0 if size == 1 else stride for size, stride in zip(operand.shape, operand.strides, strict=True)]
    return [0] * missing + own


def collapse(shape: list[Size], strides: list[list[Size]]) -> tuple[list[Size], list[list[Size]]]:
    """Drop dimensions of size 1 and merge neighbours that are one stretch of memory for every operand."""
    sizes: list[Size] = []
    merged: list[list[Size]] = [[] for _ in strides]
    for d, size in enumerate(shape):
        if size == 1:
            continue
        steps = [s[d] for s in strides]
        last = [m[-1] for m in merged] if sizes else []
        joined = sizes and all(
            isinstance(a, int) and isinstance(b, int) and isinstance(size, int) and a == b * size
            for a, b in zip(last, steps, strict=True)
        )
        if joined:
            sizes[-1] = _product([sizes[-1], size])
        else:
            sizes.append(size)
        for m, step in zip(merged, steps, strict=True):
            m[-1:] = [step] if joined else [*m[-1:], step]
    return sizes, merged


def write_offsets(index: str, shape: list[Size], strides: list[list[Size]]) -> list[str]:
    """For every operand, the expression of its element offset from the flat ``index`` over ``shape``."""
    sizes, merged = collapse(shape, strides)
    places = []
    for d in range(len(sizes)):
        inner = _product(sizes[d + 1 :])
        place = index if inner == 1 else f"{index} // ({_in_kernel(inner)})"
        places.append(place if d == 0 else f"({place}) % ({_in_kernel(sizes[d])})")
    offsets = []
    for steps in merged:
        pairs = [(p, s) for p, s in zip(places, steps, strict=True) if s != 0]
        terms = [f"({place})" if step == 1 else f"({place}) * ({_in_kernel(step)})" for place, step in pairs]
        offsets.append(" + ".join(terms) or "0")
    return offsets


def _pointer(name: str, operand: Operand, value: str) -> Parameter:
    kind = "i1" if operand.dtype == "bool" else short_dtype(operand.dtype)
    return Parameter(f"{name}_pointer", f"*{kind}", value)


def _parameters(call: OpCall, region: Region, sizes: list[Size]) -> list[Parameter]:
    inputs = [_pointer(name, need(call, name), name) for name in region.inputs]
    outputs = [_pointer(f"result{i or ''}", r, f"result{i or ''}") for i, r in enumerate(call.results)]
    used = [n for o in (*call.operands.values(), *call.results) if o is not None for n in (*o.shape, *o.strides)]
    return [*inputs, *outputs, *symbol_parameters(*sizes, *used)]


def _load(name: str, operand: Operand, offset: str, mask: str) -> str:
    suffix = ".to(tl.float32)" if is_float(operand.dtype) else ""
    masked = f", mask={mask}, other=0" if mask else ""
    return f"v_{name} = tl.load({name}_pointer + {offset}{masked}){suffix}"


def _steps(region: Region, call: OpCall, width: int) -> list[str]:
    dtypes = {name: need(call, name).dtype for name in region.inputs}
    lines = []
    for step in region.steps:
        lines.append(write_step(step, dtypes, width))
        dtypes[step.name] = step.dtype
    return lines


def _refuse_region(call: OpCall) -> tuple[Region, tuple[Size, ...]] | str:
    """The region and its iteration shape, or the reason why no kernel can be generated."""
    try:
        region = Region.from_json(call.attributes)
    except ValueError as error:
        return str(error)
    if region.kind != call.op:
        return f"the region is of kind {region.kind}"
    dtypes = {name: need(call, name).dtype for name in region.inputs}
    for name, dtype in dtypes.items():
        if dtype not in DTYPES:
            return f"{name} is {dtype}, not one of {', '.join(DTYPES)}"
    for step in region.steps:
        reason = find_unsupported(step, dtypes)
        if reason is not None:
            return reason
        dtypes[step.name] = step.dtype
    shape = broadcast_shapes([need(call, name).shape for name in region.inputs])
    return "the inputs do not broadcast" if shape is None else (region, shape)


def _refuse_pointwise(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    found = _refuse_region(call)
    if isinstance(found, str):
        return found
    shape = found[1] or (1,)
    if any(tuple(result.shape or (1,)) != shape for result in call.results):
        return f"every result must have the inputs' broadcast shape {shape}"
    return None


def _kernel_name(call: OpCall, region: Region) -> str:
    return kernel_name(call.op, *[step.op.strip("_") for step in region.steps[:4]])


def _emit_pointwise(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    region = Region.from_json(call.attributes)
    shape = list(call.results[0].shape)
    inputs = [need(call, name) for name in region.inputs]
    offsets = write_offsets("index", shape, [align_strides(o, tuple(shape)) for o in (*inputs, *call.results)])
    total = _product(shape)
    start = "tl.program_id(0)" if isinstance(total, int) and total < 1 << 30 else "tl.program_id(0).to(tl.int64)"
    lines = [f"index = {start} * BLOCK + tl.arange(0, BLOCK)", f"inside = index < {_in_kernel(total)}"]
    lines += [_load(n, o, f"({e}) + index * 0" if e == "0" else e, "inside")
              for n, o, e in zip(region.inputs, inputs, offsets[: len(inputs)], strict=True)]
    lines += _steps(region, call, 1)
    for i, (name, offset) in enumerate(zip(region.outputs, offsets[len(inputs) :], strict=True)):
        lines.append(f"tl.store(result{i or ''}_pointer + {offset}, v_{name}, mask=inside)")
    return (_emit(call, region, lines, {"BLOCK": BLOCK}, f"cdiv({total}, {BLOCK})", [total], 4),)


def _emit(call: OpCall, region: Region, lines: list[str], constants: dict[str, int], grid: str, sizes: list[Size],
          num_warps: int) -> KernelSource:
    body = "\n".join(lines)
    called = [helper for helper in HELPERS if re.search(rf"\b(?<!\.){helper.fn.__name__}\(", body)]
    return emit_kernel(
        name=_kernel_name(call, region), title="Generated: " + ", ".join(step.op for step in region.steps) + ".",
        tiles=called, constants=constants, parameters=_parameters(call, region, sizes), body=body,
        grid=(grid, "1", "1"), num_warps=num_warps,
    )


def find_extents(region: Region, rows: dict[str, str]) -> dict[str, str] | str:
    """Whether each value spans the "row", is "kept" (last size 1), "dropped" (no last dimension) or "any".

    Args:
        rows: the extent of every input. Returns a reason if two values would not broadcast as they are written.
    """
    extents = dict(rows)
    for step in region.steps:
        found = {extents[a] for a in step.args if isinstance(a, str)} - {"any"}
        if "dropped" in found and len(found) > 1:
            return f"step {step.name!r} mixes a value reduced without keepdim with one that has the last dimension"
        own = "row" if "row" in found else found.pop() if found else "any"
        if step.op in REDUCING_OPS:
            if own == "dropped":
                return f"step {step.name!r} reduces a dimension other than the last"
            own = "kept" if step.keepdim else "dropped"
        extents[step.name] = own
    return extents


def _input_extent(operand: Operand, width: Size) -> str:
    if all(size == 1 for size in operand.shape) and width != 1:
        return "any"
    return "row" if operand.shape and operand.shape[-1] == width else "kept"


def _refuse_reduction(call: OpCall, spec: TargetSpec, architecture: Architecture) -> str | None:
    found = _refuse_region(call)
    if isinstance(found, str):
        return found
    region, shape = found
    if not shape or not isinstance(shape[-1], int):
        return "the last dimension must be a number"
    if shape[-1] > MAX_ROW:
        return f"rows of {shape[-1]} elements are longer than {MAX_ROW}"
    extents = find_extents(region, {n: _input_extent(need(call, n), shape[-1]) for n in region.inputs})
    if isinstance(extents, str):
        return extents
    for name, result in zip(region.outputs, call.results, strict=True):
        expected = {"row": shape, "kept": (*shape[:-1], 1), "dropped": shape[:-1]}.get(extents[name])
        if expected != tuple(result.shape):
            return f"output {name!r} has shape {tuple(result.shape)}, the region makes {expected}"
    return None


def _emit_reduction(call: OpCall, spec: TargetSpec, architecture: Architecture) -> tuple[KernelSource, ...]:
    region = Region.from_json(call.attributes)
    inputs = [need(call, name) for name in region.inputs]
    shape = broadcast_shapes([o.shape for o in inputs]) or ()
    width = int(shape[-1])
    rows = list(shape[:-1])
    spans = [_input_extent(o, width) == "row" for o in inputs]
    extents = find_extents(region, {n: _input_extent(o, width) for n, o in zip(region.inputs, inputs, strict=True)})
    assert isinstance(extents, dict)
    strides = [align_strides(o, shape) for o in inputs]
    results = [[*r.strides, 0][: len(shape)] if extents[name] == "dropped" else list(r.strides)
               for name, r in zip(region.outputs, call.results, strict=True)]
    offsets = write_offsets("row", rows, [s[:-1] for s in (*strides, *results)])
    block = next_power_of_two(width)
    lines = ["row = tl.program_id(0).to(tl.int64)", "column = tl.arange(0, BLOCK)", "inside = column < N"]
    loads = zip(region.inputs, inputs, offsets[: len(inputs)], strides, spans, strict=True)
    for name, operand, offset, stride, spanned in loads:
        place = f"{offset} + column * ({stride[-1]})" if spanned else offset
        lines.append(_load(name, operand, place, "inside" if spanned else ""))
    lines += _steps(region, call, width)
    for i, (name, offset, stride) in enumerate(zip(region.outputs, offsets[len(inputs) :], results, strict=True)):
        across, mask = (f" + column * ({stride[-1]})", ", mask=inside") if extents[name] == "row" else ("", "")
        lines.append(f"tl.store(result{i or ''}_pointer + {offset}{across}, v_{name}{mask})")
    warps = max(1, min(16, block // (8 * spec.warp_size)))
    return (_emit(call, region, lines, {"BLOCK": block, "N": width}, str(_product(rows)), rows, warps),)


TEMPLATES = (
    KernelTemplate("pointwise", "pointwise", _refuse_pointwise, _emit_pointwise),
    KernelTemplate("reduction", "reduction", _refuse_reduction, _emit_reduction),
)
