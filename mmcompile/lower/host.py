"""Prepare a graph for a target without kernels: weights are decoded and arranged once, at load."""

from __future__ import annotations

import torch
from torch import fx

from mmcompile.core.graph import full_arguments, infer_meta, source_of

_MM = torch.ops.mm
_ATEN = torch.ops.aten
_NVFP4, _MXFP8 = ("packed", "scale", "global_scale"), ("values", "scale")
# Operation on quantized weights -> the same on dense ones, the parts of the weight, and what decodes them.
_DENSE = {
    _MM.linear_nvfp4.default: (_MM.linear.default, _NVFP4, _MM.nvfp4_dequantize.default),
    _MM.linear_mxfp8.default: (_MM.linear.default, _MXFP8, _MM.mxfp8_dequantize.default),
    _MM.qkv_norm_rope_insert_nvfp4.default: (
        _MM.qkv_norm_rope_insert.default, _NVFP4, _MM.nvfp4_dequantize.default,
    ),
    _MM.qkv_norm_rope_insert_mxfp8.default: (
        _MM.qkv_norm_rope_insert.default, _MXFP8, _MM.mxfp8_dequantize.default,
    ),
    _MM.qkv_norm_rope_insert_index_nvfp4.default: (
        _MM.qkv_norm_rope_insert_index.default, _NVFP4, _MM.nvfp4_dequantize.default,
    ),
    _MM.qkv_norm_rope_insert_index_mxfp8.default: (
        _MM.qkv_norm_rope_insert_index.default, _MXFP8, _MM.mxfp8_dequantize.default,
    ),
}  # fmt: skip


def prepare_for_host(graph_module: fx.GraphModule) -> None:
    """Decode quantized weights and arrange fp32 ones, in place; both in the phase "load"."""
    decode_weights_at_load(graph_module)
    transpose_wide_weights(graph_module)
    graph_module.recompile()


def transpose_wide_weights(graph_module: fx.GraphModule) -> None:
    """linear(x, w) -> linear(x, t(contiguous(t(w)))) for fp32 weights with more rows than columns.

    The value is the same; a CPU's fp32 product of one token with [k, n] memory runs 1.6 times faster than with [n, k].
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target not in {dense for dense, _, _ in _DENSE.values()}:
            continue
        weight = node.args[1]
        rows, columns = weight.meta["val"].shape
        if weight.meta["val"].dtype != torch.float32 or rows < columns:
            continue
        with graph.inserting_before(node):
            turned = graph.call_function(_ATEN.t.default, (weight,))
            stored = graph.call_function(_ATEN.contiguous.default, (turned,))
            stored.name = f"{weight.name}_transposed"
            back = graph.call_function(_ATEN.t.default, (stored,))
        infer_meta(graph_module, [turned, stored, back])
        node.replace_input_with(weight, back)


def decode_weights_at_load(graph_module: fx.GraphModule) -> None:
    """linear_nvfp4(x, packed, ...) -> linear(x, nvfp4_dequantize(packed, ...)), in place; MXFP8 likewise.

    Experts stay packed: a step reads few of them.

    The decoded weight depends on weights alone, so lowering puts it into the phase "load". It is rounded to the
    activation dtype, where the reference multiplies by the global scale after the accumulation.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.target not in _DENSE:
            continue
        dense, names, decode = _DENSE[node.target]
        arguments = full_arguments(node)
        dtype = arguments["x"].meta["val"].dtype
        with graph.inserting_before(node):
            parts = [arguments.pop(k) for k in names]
            weight = graph.call_function(decode, (*parts, dtype))
            weight.name = f"{parts[0].name}_decoded"
            x = arguments.pop("x")
            call = graph.call_function(dense, (x, weight, *arguments.values()))
        infer_meta(graph_module, [weight, call])
        call.meta["source"] = source_of(node)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
