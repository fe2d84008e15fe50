"""Write a graph as ONNX: ``mm::`` operations as standard operators, attention with its cache as inputs and outputs."""

from __future__ import annotations

from typing import Any, Literal

import onnx
import torch
from onnx import TensorProto, helper
from torch import fx

from mmcompile.core.errors import LoweringError
from mmcompile.core.graph import depends_only_on_weights, get_parameter
from mmcompile.interchange.onnx_builder import ELEMENT_TYPES, Builder, describe_shape
from mmcompile.interchange.onnx_functions import make_add_rms_norm, make_nvfp4_dequantize, make_swiglu
from mmcompile.interchange.onnx_operations import Context, Writer, write_call

_MM = torch.ops.mm
Nvfp4Form = Literal["standard", "function"]


def write_onnx(graph_module: fx.GraphModule, *, name: str, nvfp4: Nvfp4Form = "standard") -> onnx.ModelProto:
    """ONNX model of a graph of aten and mm:: calls before it has a paged cache.

    Args:
        name: of the graph. nvfp4: NVFP4 weights as DequantizeLinear over FLOAT4E2M1 in blocks of 16 ("standard"), or
            by the function mm.nvfp4_dequantize over packed bytes, for runtimes without that type ("function").

    Every mm.attention reads ``past_key_<i>`` and ``past_value_<i>`` [1, kv_heads, past, d], gives ``present_key_<i>``
    and ``present_value_<i>``: with no past the graph is a prefill, with one new token it is a decode step. What
    depends on weights alone is computed here. Raises LoweringError for a call that has no ONNX form.
    """
    builder = Builder()
    context = _MmContext(builder, graph_module, nvfp4)
    values = _compute_constants(graph_module)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            _add_input(context, node)
        elif node.op == "output":
            _add_outputs(context, node)
        elif node in values:
            _add_constant(context, node, values[node])
        elif node.op == "call_function":
            write_call(context, node, MM_TABLE)
    model = builder.finish(name, {"attention_layers": str(context.layers)})
    used = {i for n in model.graph.node for i in n.input} | {o.name for o in model.graph.output}
    kept = [t for t in model.graph.initializer if t.name in used]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return model


class _MmContext(Context):
    """Also counts attention layers and knows the values of constants."""

    def __init__(self, builder: Builder, graph_module: fx.GraphModule, nvfp4: Nvfp4Form) -> None:
        super().__init__(builder)
        self.graph_module, self.nvfp4, self.layers = graph_module, nvfp4, 0
        self.constants: dict[fx.Node, Any] = {}
        self.presents: list[onnx.ValueInfoProto] = []


def _compute_constants(graph_module: fx.GraphModule) -> dict[fx.Node, Any]:
    """Values of the nodes that depend on weights alone. Raises LoweringError if weights were left out."""
    constant = depends_only_on_weights(graph_module)
    values: dict[fx.Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node not in constant:
            continue
        if node.op == "get_attr":
            values[node] = get_parameter(graph_module, str(node.target))
            if values[node].is_meta:
                raise LoweringError("an ONNX file needs weights", fix="leave --weights none out")
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    return values


def _add_input(context: _MmContext, node: fx.Node) -> None:
    value = node.meta["val"]
    context.names[node] = str(node.target)
    shape = describe_shape(value)
    context.builder.inputs.append(helper.make_tensor_value_info(str(node.target), ELEMENT_TYPES[value.dtype], shape))


def _add_constant(context: _MmContext, node: fx.Node, value: Any) -> None:
    context.constants[node] = value
    if isinstance(value, torch.Tensor) and value.dtype in ELEMENT_TYPES:
        name = str(node.target) if node.op == "get_attr" else node.name
        context.names[node] = context.builder.weight(name, value)


def _add_outputs(context: _MmContext, node: fx.Node) -> None:
    results = node.args[0]
    results = list(results) if isinstance(results, tuple | list) else [results]
    decoder = context.layers > 0
    for i, result in enumerate(results):
        value = result.meta["val"]  # type: ignore[union-attr]
        name = ("logits" if decoder else "result") + (str(i) if i else "")
        context.builder.add("Identity", [context.name(result)], outputs=[name])
        context.builder.outputs.append(
            helper.make_tensor_value_info(name, ELEMENT_TYPES[value.dtype], describe_shape(value))
        )
    context.builder.outputs.extend(context.presents)


def _rms_norm(c: Any, n: fx.Node, a: dict[str, Any]) -> str:
    weight = _offset_weight(c, a)
    return str(c.builder.add("RMSNormalization", [c.name(a["x"]), weight], name=n.name, axis=-1, epsilon=a["eps"]))


def _offset_weight(c: _MmContext, a: dict[str, Any]) -> str:
    """The weight, with the offset that some models add to it."""
    if a["weight_offset"] == 0.0:
        return c.name(a["weight"])
    weight = c.constants[a["weight"]]
    return c.builder.weight(f"{c.name(a['weight'])}_offset", weight + a["weight_offset"])


def _add_rms_norm(c: Any, n: fx.Node, a: dict[str, Any]) -> list[str]:
    given = [c.name(a["x"]), c.name(a["residual"]), _offset_weight(c, a)]
    made = c.builder.call(make_add_rms_norm(), given, name=n.name, epsilon=a["eps"])
    return list(made)


def _swiglu(c: Any, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.call(make_swiglu(), [c.name(a["gate"]), c.name(a["up"])], name=n.name))


def _embedding(c: Any, n: fx.Node, a: dict[str, Any]) -> str:
    return str(c.builder.add("Gather", [c.name(a["weight"]), c.name(a["ids"])], name=n.name, axis=0))


def _linear(c: Any, n: fx.Node, a: dict[str, Any]) -> str:
    return _finish_linear(c, n, a, c.name(a["weight"]))


def _finish_linear(c: Any, n: fx.Node, a: dict[str, Any], weight: str) -> str:
    """``x @ weight.T`` with bias, activation and residual, in that order."""
    turned = c.builder.add("Transpose", [weight], perm=[1, 0])
    y = c.builder.add("MatMul", [c.name(a["x"]), turned], name=n.name)
    if a["bias"] is not None:
        y = c.builder.add("Add", [y, c.name(a["bias"])], name=n.name)
    if a["activation"] == "swiglu":
        gate, up = c.builder.add("Split", [y], name=n.name, outputs=2, axis=-1, num_outputs=2)
        y = c.builder.call(make_swiglu(), [gate, up], name=n.name)
    elif a["activation"] != "none":
        raise c.refuse(n, f"the activation {a['activation']!r} has no form")
    return str(y if a["residual"] is None else c.builder.add("Add", [y, c.name(a["residual"])], name=n.name))


def _linear_nvfp4(c: _MmContext, n: fx.Node, a: dict[str, Any]) -> str:
    packed, scale, multiplier = (c.constants[a[k]] for k in ("packed", "scale", "global_scale"))
    name = str(a["packed"].target) if a["packed"].op == "get_attr" else a["packed"].name
    name = name.removesuffix("_packed").removesuffix(".packed")
    rows, half = packed.shape
    scales = c.builder.weight(f"{name}.scale", scale)
    if c.nvfp4 == "function":
        given = [
            c.builder.weight(f"{name}.packed", packed), scales,
            c.builder.weight(f"{name}.multiplier", multiplier.reshape(-1, 1)),
        ]  # fmt: skip
        weight = c.builder.call(make_nvfp4_dequantize(), given, name=name)
    else:
        codes = c.builder.weight(f"{name}.e2m1", packed, TensorProto.FLOAT4E2M1, [rows, half * 2])
        single = bool((multiplier == multiplier[0]).all())
        whole = c.builder.weight(f"{name}.multiplier", multiplier[0].reshape(()) if single else multiplier)
        wide = c.builder.add(
            "DequantizeLinear", [scales, whole], name=f"{name}.scales", **({} if single else {"axis": 0})
        )
        weight = c.builder.add("DequantizeLinear", [codes, wide], name=f"{name}.weight", axis=1, block_size=16)
    dtype = a["x"].meta["val"].dtype
    weight = weight if dtype == torch.float32 else c.cast(weight, dtype)
    return _finish_linear(c, n, a, weight)


def _rope(c: _MmContext, n: fx.Node, a: dict[str, Any]) -> str:
    """RotaryEmbedding over [1, tokens, heads * d]."""
    table, x = c.constants[a["cos_sin"]], a["x"].meta["val"]
    _, heads, width = x.shape
    half = table.shape[1] // 2
    base = c.name(a["cos_sin"])
    cos = c.builder.weight(f"{base}.cos.{x.dtype}", table[:, :half].to(x.dtype))
    sin = c.builder.weight(f"{base}.sin.{x.dtype}", table[:, half:].to(x.dtype))
    flat = c.builder.add("Reshape", [c.name(a["x"]), c.builder.constant([1, -1, int(heads * width)], "shape")])
    axes = c.builder.constant([0], "axes")
    places = c.name(a["positions"])
    places = places if a["positions"].meta["val"].dtype == torch.int64 else c.cast(places, torch.int64)
    places = c.builder.add("Unsqueeze", [places, axes])
    y = c.builder.add(
        "RotaryEmbedding", [flat, cos, sin, places], name=n.name, num_heads=int(heads),
        rotary_embedding_dim=0 if 2 * half == width else 2 * half,
    )  # fmt: skip
    return str(c.builder.add("Reshape", [y, c.builder.constant([-1, int(heads), int(width)], "shape")]))


def _attention(c: _MmContext, n: fx.Node, a: dict[str, Any]) -> str:
    """Attention over [1, tokens, heads * d] with the layer's past."""
    if a["window"]:
        raise c.refuse(n, f"it has a window of {a['window']} tokens, which opset 23 cannot say")
    q, k = a["q"].meta["val"], a["k"].meta["val"]
    heads, kv_heads, width = int(q.shape[1]), int(k.shape[1]), int(q.shape[2])
    layer, elem_type = c.layers, ELEMENT_TYPES[k.dtype]
    c.layers += 1
    for kind in ("key", "value"):
        shape = [1, kv_heads, "past", width]
        c.builder.inputs.append(helper.make_tensor_value_info(f"past_{kind}_{layer}", elem_type, shape))
        shape = [1, kv_heads, "past_and_tokens", width]
        c.presents.append(helper.make_tensor_value_info(f"present_{kind}_{layer}", elem_type, shape))
    flat = [
        c.builder.add("Reshape", [c.name(a[x]), c.builder.constant([1, -1, count * width], "shape")])
        for x, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    ]
    y = c.builder.new_name(n.name)
    c.builder.add(
        "Attention", [*flat, "", f"past_key_{layer}", f"past_value_{layer}"], name=n.name,
        outputs=[y, f"present_key_{layer}", f"present_value_{layer}"], scale=a["scale"], is_causal=1,
        q_num_heads=heads, kv_num_heads=kv_heads,
    )  # fmt: skip
    return str(c.builder.add("Reshape", [y, c.builder.constant([-1, heads, width], "shape")]))


MM_TABLE: dict[Any, Writer] = {
    _MM.embedding.default: _embedding,
    _MM.linear.default: _linear,
    _MM.linear_nvfp4.default: _linear_nvfp4,
    _MM.rms_norm.default: _rms_norm,
    _MM.add_rms_norm.default: _add_rms_norm,
    _MM.swiglu.default: _swiglu,
    _MM.rope.default: _rope,
    _MM.attention.default: _attention,
}


def list_functions(model: onnx.ModelProto) -> list[str]:
    """Names of the ``mm`` functions that a model brings along."""
    return [f"{f.domain}.{f.name}" for f in model.functions]
