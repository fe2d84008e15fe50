"""Write a graph as MLIR through torch-mlir: torch, linalg, stablehlo or tosa."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, fx
from torch_mlir import fx as torch_mlir
from torch_mlir.extras.fx_decomp_util import get_decomposition_table
from torch_mlir.ir import MLIRError
from torch_mlir.passmanager import PassManager

from mmcompile.core.errors import LoweringError, UsageError, unknown_name
from mmcompile.core.graph import operation_name
from mmcompile.interchange.mlir_reference import ReferenceModule

_TORCH = "func.func(torch-match-quantized-custom-ops),torchdynamo-export-to-torch-backend-pipeline{extra-library=}"
PIPELINES = {
    "torch": (_TORCH,),
    "linalg": (_TORCH, "torch-backend-to-linalg-on-tensors-backend-pipeline"),
    "stablehlo": (_TORCH, "torch-backend-to-stablehlo-backend-pipeline"),
    "tosa": (_TORCH, "torch-backend-to-tosa-backend-pipeline"),
}
# Sizes that stand for a dynamic dimension while the graph is traced: distinct, so that none is taken for another.
_EXAMPLES = (5, 7, 11, 13, 17, 19, 23, 29)


@dataclass(frozen=True)
class MlirModule:
    """A module with one function ``main``: its operation, and the names of its arguments and results in order."""

    module: Any
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: int

    def write(self, stream: BinaryIO, *, bytecode: bool) -> None:
        """Write it as MLIR bytecode, or as text that begins with the names as comments."""
        if bytecode:
            self.module.operation.write_bytecode(stream)
            return
        stream.write(f"// inputs: {', '.join(self.inputs)}\n// results: {', '.join(self.outputs)}\n".encode())
        self.module.operation.print(file=stream, binary=True)


def make_mlir(
    graph_module: fx.GraphModule, *, form: str, sizes: Mapping[str, int], limits: Mapping[str, tuple[int, int]]
) -> MlirModule:
    """A graph of aten and mm:: calls before it has a paged cache, as MLIR.

    Args:
        form: a key of PIPELINES. sizes: values of symbols to fix, "tokens" and "past" among them; others stay
            dynamic. limits: smallest and largest value of each symbol of the graph.

    ``main`` takes the graph's inputs and, of every mm.attention, past_key_<i> and past_value_<i>
    [1, kv_heads, past, d]; it gives the results and present_key_<i>, present_value_<i> [1, kv_heads, past + tokens, d].
    With ``past`` fixed to 0 it takes no past. Raises UsageError for a wrong size, LoweringError for what cannot be
    lowered.
    """
    if any(t.is_meta for t in (*graph_module.parameters(), *graph_module.buffers())):
        raise LoweringError("an MLIR file needs weights", fix="leave --weights none out")
    attention = graph_module.graph.find_nodes(op="call_function", target=torch.ops.mm.attention.default)
    symbols = _Symbols(sizes, {**limits, **({"past": (1, 2**31 - 1)} if attention else {})})
    names, arguments, dynamic = [], [], []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        names.append(str(node.target))
        arguments.append(torch.zeros(symbols.example(value.shape, node), dtype=value.dtype))
        dynamic.append(symbols.dimensions(value.shape))
    outputs = _name_results(graph_module, bool(attention))
    for i, node in enumerate(attention):
        for kind, source in zip(("key", "value"), node.args[1:3], strict=True):
            value = source.meta["val"]
            shape = (1, value.shape[1], symbols.past, value.shape[2])
            outputs.append(f"present_{kind}_{i}")
            if symbols.past != 0:
                names.append(f"past_{kind}_{i}")
                arguments.append(torch.zeros(symbols.example(shape, node), dtype=value.dtype))
                dynamic.append(symbols.dimensions(shape))
    operations = {n.name: operation_name(n.target) for n in graph_module.graph.nodes}
    program = _trace(ReferenceModule(graph_module), operations, tuple(arguments), tuple(dynamic))
    calls = sum(n.op == "call_function" for n in program.graph.nodes)
    module = torch_mlir.export_and_import(program, output_type="raw", decomposition_table={}, func_name="main")
    for pipeline in PIPELINES[form]:
        _run(module, pipeline, form)
    return MlirModule(module, tuple(names), tuple(outputs), calls)


class _Symbols:
    """Values of fixed symbols, and an example and a Dim for each of the others."""

    def __init__(self, sizes: Mapping[str, int], limits: Mapping[str, tuple[int, int]]) -> None:
        for name, size in sizes.items():
            if name not in limits:
                raise unknown_name("size", name, limits)
            low, high = limits[name]
            low = 0 if name == "past" else 1 if low == 2 else low  # 2: what torch.export makes of a size from 1
            if not low <= size <= high:
                raise UsageError(f"the size {name} is from {low} to {high}, not {size}")
        self.values = dict(sizes)
        self.dims = {n: torch.export.Dim(n, min=r[0], max=r[1]) for n, r in limits.items() if n not in sizes}
        examples = zip(self.dims, _EXAMPLES, strict=False)
        self.values |= {n: min(max(e, limits[n][0]), limits[n][1]) for n, e in examples}
        self.past: Any = self.values["past"] if "past" in sizes else "past"

    def example(self, shape: Any, node: fx.Node) -> list[int]:
        """The shape in numbers."""
        return [self._evaluate(size, node) for size in shape]

    def _evaluate(self, size: Any, node: fx.Node) -> int:
        if isinstance(size, int):
            return size
        expression = size if isinstance(size, str) else size.node.expr
        unknown = [] if str(expression) in self.values else [str(s) for s in getattr(expression, "free_symbols", [])]
        moving = [name for name in unknown if name in self.dims or name not in self.values]
        if moving:
            raise LoweringError(
                f"a size is {expression}, which MLIR cannot say of a dynamic input", where=f"node {node.name}",
                fix=f"fix it with --size {moving[0]}=N",
            )  # fmt: skip
        if not unknown:
            return self.values[str(expression)]
        return int(expression.subs({s: self.values[str(s)] for s in expression.free_symbols}))

    def dimensions(self, shape: Any) -> dict[int, Any] | None:
        """The dynamic dimensions of a shape by index."""
        return {i: self.dims[str(s)] for i, s in enumerate(shape) if str(s) in self.dims} or None


def _name_results(graph_module: fx.GraphModule, decoder: bool) -> list[str]:
    (output,) = graph_module.graph.find_nodes(op="output")
    results = output.args[0]
    count = len(results) if isinstance(results, tuple | list) else 1
    base = "logits" if decoder else "result"
    return [base + (str(i) if i else "") for i in range(count)]


def _trace(
    module: ReferenceModule, operations: Mapping[str, str], arguments: tuple[Tensor, ...], dynamic: tuple[Any, ...]
) -> Any:  # fmt: skip
    """Trace to core aten calls, each with the node that it came from as its place."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch.export copies a type of its own that it deprecates
            program = torch.export.export(module, arguments, dynamic_shapes=(dynamic,), strict=False)
            program = program.run_decompositions(get_decomposition_table())
    except LoweringError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        raise LoweringError(
            f"the graph cannot be traced with these sizes: {first}", fix="fix sizes with --size, e.g. --size tokens=1"
        ) from error
    for node in program.graph.nodes:
        places = [path for path, _ in node.meta.get("nn_module_stack", {}).values() if path.startswith("calls.")]
        place = places[-1].removeprefix("calls.") if places else node.name
        place = f"{place}, {operations.get(place, operation_name(node.target))}"
        node.meta["stack_trace"] = f'File "{place}", line 1, in node'  # the only form that the importer reads
    return program


def _run(module: Any, pipeline: str, form: str) -> None:
    """Run a pipeline of torch-mlir over the module. Raises LoweringError that names the operation and its node."""
    try:
        with module.context:
            PassManager.parse(f"builtin.module({pipeline})").run(module.operation)
    except MLIRError as error:
        found = error.error_diagnostics
        what = found[0].message.split("\n")[0].split(": %")[0] if found else "torch-mlir gives no reason"
        places = re.findall(r'"([^"]+)":\d+', str(found[0].location)) if found else []
        raise LoweringError(
            f"torch-mlir cannot lower it to {form}: {what}", where=f"node {places[0]}" if places else "",
            fix="fix sizes with --size, or choose another --format or --after",
        ) from error  # fmt: skip
