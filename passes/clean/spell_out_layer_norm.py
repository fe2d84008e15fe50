"""layer_norm(x)  ->  mean, variance, scale and shift     steps that a generated row kernel computes in one launch."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mmcompile.core.graph import full_arguments
from mmcompile.core.passes import PassContext, PassResult
from mmcompile.passes._edit import Refusal, dtype_of, emit, finish, is_call, replace

DESCRIPTION = "spell layer norm over the last dimension out in steps that one generated kernel computes"
EFFECT = "bounded"
aten = torch.ops.aten
_RULE = "spell_out_layer_norm"


def run(graph_module: fx.GraphModule, context: PassContext) -> PassResult:
    """``(x - mean) * rsqrt(variance + eps) * weight + bias`` (Ba et al. 2016), statistics in fp32."""
    result = PassResult()
    for node in [n for n in graph_module.graph.nodes if is_call(n, aten.layer_norm.default)]:
        try:
            with graph_module.graph.inserting_before(node):
                replace(graph_module, _RULE, node, _spell_out(graph_module, node), result)
        except Refusal as refusal:
            result.near_misses.append(refusal.as_near_miss(_RULE))
    return finish(graph_module, result)


def _spell_out(graph_module: fx.GraphModule, node: fx.Node) -> fx.Node:
    arguments = full_arguments(node)
    x, eps = arguments["input"], arguments["eps"]
    if len(arguments["normalized_shape"]) != 1:
        raise Refusal(node, f"it normalises over {len(arguments['normalized_shape'])} dimensions, not one")

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return emit(graph_module, node, target, *args, **kwargs)

    dtype = dtype_of(x)
    narrow = dtype != torch.float32
    wide = call(aten.to.dtype, x, torch.float32) if narrow else x
    centred = call(aten.sub.Tensor, wide, call(aten.mean.dim, wide, [-1], True))
    variance = call(aten.mean.dim, call(aten.mul.Tensor, centred, centred), [-1], True)
    value = call(aten.mul.Tensor, centred, call(aten.rsqrt.default, call(aten.add.Tensor, variance, eps)))
    for target, name in ((aten.mul.Tensor, "weight"), (aten.add.Tensor, "bias")):
        if arguments[name] is not None:
            operand = arguments[name]
            value = call(target, value, call(aten.to.dtype, operand, torch.float32) if narrow else operand)
    return call(aten.to.dtype, value, dtype) if narrow else value
