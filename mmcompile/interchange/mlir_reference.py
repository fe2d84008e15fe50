"""A graph as a module of aten calls: ``mm::`` operations by their references, caches as inputs and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from mmcompile.core.errors import LoweringError
from mmcompile.core.formats.nvfp4 import BLOCK, E2M1_VALUES
from mmcompile.core.graph import get_parameter, operation_name
from mmcompile.core.ops.attention import attend
from mmcompile.core.ops.define import find_op
from mmcompile.core.ops.linear import apply_epilogue

_MM = torch.ops.mm
_DECODING = (_MM.linear_nvfp4.default, _MM.nvfp4_dequantize.default)
_E4M3_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()


class ReferenceModule(nn.Module):
    """Computes a graph whose ``mm.attention`` calls read ``past`` and give ``present``.

    ``forward(*inputs, *past)`` gives (results of the graph..., present of every attention layer...), both caches as
    key and value by layer, [1, kv_heads, tokens, d]. Without ``past`` it is a prefill. Every call is a submodule named
    like its node, so that what a tracer makes of it says where it came from. Vectors in bfloat16 are stored as matrices
    of one row: IREE 3.13 makes an invalid constant of a vector for the CPU.
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.inputs = len(graph_module.graph.find_nodes(op="placeholder"))
        for node in graph_module.graph.find_nodes(op="get_attr"):
            value = get_parameter(graph_module, str(node.target)).detach()
            decoded = bool(node.users) and all(n.target in _DECODING for n in node.users)
            if decoded and value.dtype == torch.float8_e4m3fn:
                self.register_buffer(f"bytes_{node.name}", value.view(torch.uint8))
            elif value.dtype == torch.bfloat16 and value.dim() == 1:
                self.register_buffer(f"row_{node.name}", value[None])
        self.calls = nn.ModuleDict({n.name: _Call(n) for n in graph_module.graph.nodes if n.op == "call_function"})

    def forward(self, *given: Tensor) -> tuple[Any, ...]:
        stored = dict(self.named_buffers(recurse=False))
        run = _Run(self.graph_module, self.calls, stored, given[self.inputs :])
        results = run.run(*given[: self.inputs])
        results = results if isinstance(results, tuple | list) else (results,)
        return (*results, *run.present)


class _Call(nn.Module):
    """One call of the graph by its lowerable body."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self.name, self.operation = node.name, operation_name(node.target)
        op = find_op(node.target)
        self.body: Any = BODIES.get(node.target, node.target if op is None else op.reference)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.body(*args, **kwargs)
        except Exception as error:
            first = str(error).strip().split("\n")[0]
            raise LoweringError(
                f"{self.operation} cannot be traced to aten calls: {first}", where=f"node {self.name}",
                fix="choose another pass with --after",
            ) from error  # fmt: skip


class _Run(fx.Interpreter):
    """Runs the calls as submodules and keeps the caches."""

    def __init__(
        self, graph_module: fx.GraphModule, calls: nn.ModuleDict, stored: dict[str, Tensor], past: tuple[Tensor, ...]
    ) -> None:
        super().__init__(graph_module)
        self.calls, self.stored, self.past = calls, stored, past
        self.present: list[Tensor] = []

    def run_node(self, n: fx.Node) -> Any:
        if f"bytes_{n.name}" in self.stored:
            return self.stored[f"bytes_{n.name}"]
        if f"row_{n.name}" in self.stored:
            return self.stored[f"row_{n.name}"].view(-1)
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = self.calls[n.name]
        if n.target is not _MM.attention.default:
            return call(*args, **kwargs)
        q, k, v, *rest = args
        layer = len(self.present)
        y, key, value = call(q, k, v, self.past[layer : layer + 2], *rest, **kwargs)
        self.present += [key, value]
        return y


def _attention(
    q: Tensor, k: Tensor, v: Tensor, past: tuple[Tensor, ...], scale: float, window: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """``mm.attention`` of new tokens after those of the cache; also gives the cache with them."""
    if past:
        k, v = torch.cat([past[0][0].transpose(0, 1), k]), torch.cat([past[1][0].transpose(0, 1), v])
    return attend(q, k, v, scale, window), k.transpose(0, 1)[None], v.transpose(0, 1)[None]


def decode_nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """``core.formats.nvfp4.decode_blocks`` by tables alone: no bytes are read as another type.

    packed: uint8 [n, k/2]. scale: [n, k/16], float8_e4m3fn, or its bytes as uint8 where it is a weight, because IREE
    takes no float8 constants. Returns: fp32 [n, k].
    """
    rows, half = packed.shape
    wide = packed.to(torch.int64)
    codes = torch.stack([wide & 15, wide >> 4], dim=-1).reshape(-1)
    table = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
    values = torch.index_select(table, 0, codes).reshape(rows, half * 2 // BLOCK, BLOCK)
    if scale.dtype == torch.uint8:
        flat = torch.index_select(torch.tensor(_E4M3_VALUES), 0, scale.to(torch.int64).reshape(-1))
        scale = flat.reshape(rows, half * 2 // BLOCK)
    return (values * scale.float()[..., None]).reshape(rows, half * 2)


def _linear_nvfp4(
    x: Tensor, packed: Tensor, scale: Tensor, global_scale: Tensor, bias: Tensor | None = None,
    residual: Tensor | None = None, activation: str = "none",
) -> Tensor:  # fmt: skip
    """``mm.linear_nvfp4`` over :func:`decode_nvfp4`."""
    y = (nn.functional.linear(x.float(), decode_nvfp4(packed, scale)) * global_scale).to(x.dtype)
    return apply_epilogue(y, bias, residual, activation)


def _nvfp4_dequantize(packed: Tensor, scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``mm.nvfp4_dequantize`` over :func:`decode_nvfp4`."""
    return (decode_nvfp4(packed, scale) * global_scale[:, None]).to(dtype)


# Operations whose references say what MLIR cannot, in another spelling of the same numbers.
BODIES: Mapping[Any, Callable[..., Any]] = {
    _MM.attention.default: _attention,
    _MM.linear_nvfp4.default: _linear_nvfp4,
    _MM.nvfp4_dequantize.default: _nvfp4_dequantize,
}
