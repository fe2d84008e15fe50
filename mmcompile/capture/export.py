"""torch.export of a module to a canonical FX graph, and the record that every capture door returns."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from mmcompile.capture.canonical import canonicalise, getattr_or_none, is_model_code, shorten_path
from mmcompile.capture.repeat import NotProvedError, Repeater
from mmcompile.core.errors import CaptureError


@dataclass(frozen=True)
class Input:
    """An input of a captured graph: shape over ints and symbol names, dtype by torch's name."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass
class Captured:
    """A model as a canonical graph.

    Attributes:
        graph_module: aten calls; weights are get_attr nodes under their state-dict names, real tensors, or meta tensors
            where the weights were left out. See :func:`mmcompile.capture.canonical.canonicalise`.
        symbols: symbol -> (smallest, largest) value.
        inputs: the placeholders, in order.
        kind: "decoder" (input_ids and positions to logits of every token) or "module" (anything else).
        config: facts about the model: vocab_size, max_positions, eos_token_ids, ... (decoders only).
        tokenizer: bytes of a tokenizer.json, if known. chat_template: Jinja text, if known.
        nvfp4: module path -> (packed, scale, global scale) of the weights that the checkpoint stores in NVFP4, which
            the graph holds decoded; a stack of experts by the name of its parameter. mxfp8: likewise (values, scale).
        source: where it was captured from. note: how equal layers were captured, "" if there are none.
    """

    graph_module: fx.GraphModule
    symbols: dict[str, tuple[int, int]]
    inputs: tuple[Input, ...]
    kind: str
    source: str
    note: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    tokenizer: bytes | None = None
    chat_template: str | None = None
    nvfp4: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    mxfp8: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def capture_module(
    module: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    *,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    symbols: Mapping[str, tuple[int, int]] | None = None,
    constants: Mapping[str, Any] | None = None,
    kind: str = "module",
    source: str = "",
) -> Captured:
    """Export ``module`` in evaluation mode.

    Args:
        inputs: example tensors by parameter name of ``forward``; a dynamic axis needs an example size of at least 2.
        dynamic: input -> {axis: symbol}. symbols: symbol -> (smallest, largest) size.
        constants: further arguments of ``forward`` that are no tensors; they are baked in.

    A weight on the meta device, or one that :func:`without_weights` made, becomes a meta tensor in the result.
    Raises CaptureError naming the model's source line if torch.export cannot trace the module.
    """
    dynamic, symbols = dict(dynamic or {}), dict(symbols or {})
    dims = {
        name: torch.export.Dim(name, min=low, max=high) if high > 2 else torch.export.Dim(name)
        for name, (low, high) in symbols.items()
    }
    specs: dict[str, Any] = {
        name: {axis: dims[symbol] for axis, symbol in dynamic.get(name, {}).items()} for name in inputs
    }
    constants = dict(constants or {})
    specs |= dict.fromkeys(constants)
    meta_names = _stand_in_for_meta(module)
    exported, note = _export(module.eval(), dict(inputs) | constants, specs)
    shapes = {
        name: tuple(dynamic.get(name, {}).get(i, int(d)) for i, d in enumerate(tensor.shape))
        for name, tensor in inputs.items()
    }
    graph_module = canonicalise(exported, symbols, shapes)
    _restore_meta(graph_module, meta_names)
    listed = tuple(Input(n, shapes[n], str(t.dtype).removeprefix("torch.")) for n, t in inputs.items())
    source = "; ".join(part for part in (source or type(module).__name__, note) if part)
    return Captured(graph_module, symbols, listed, kind, source, note=note)


def _export(module: nn.Module, arguments: dict[str, Any], specs: dict[str, Any]) -> tuple[nn.Module, str]:
    """The exported module, and how its equal layers were captured ("" if it has none).

    Equal layers are traced twice and repeated; if that fails or cannot be proved, everything is traced, and the note
    says why.
    """
    repeater, note = Repeater(module), ""

    def run() -> torch.export.ExportedProgram:
        program = torch.export.export(module, (), arguments, dynamic_shapes=specs)
        is_pure = not any(_is_mutating(node) for node in program.graph.nodes)
        return program if is_pure else program.run_decompositions({})

    if repeater.layers:
        try:
            return repeater.export(run), repeater.describe()
        except Exception as error:
            reason = next(iter(str(error).splitlines()), "")
            known = isinstance(error, NotProvedError)
            note = f"every layer traced: {reason if known else f'{type(error).__name__}: {reason}'}"
    try:
        program = run()
    except Exception as error:
        raise _explain(error, module) from error
    return program.module(check_guards=False), note


def _is_mutating(node: fx.Node) -> bool:
    """True for a call that writes an argument, such as ``aten.div_``; run_decompositions makes those pure."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextmanager
def without_weights() -> Iterator[None]:
    """Modules built inside get their parameters on the meta device, while buffers (RoPE frequencies) stay real."""
    original = nn.Module.register_parameter

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        original(self, name, param)

    nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _stand_in_for_meta(module: nn.Module) -> set[str]:
    """Replace meta parameters by tensors of one element repeated, since export wants a single device."""
    names = {name for name, p in module.named_parameters(remove_duplicate=False) if p.is_meta}
    made: dict[int, nn.Parameter] = {}
    for name in sorted(names):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        meta = getattr(owner, leaf)
        if id(meta) not in made:
            made[id(meta)] = nn.Parameter(torch.zeros((), dtype=meta.dtype).expand(meta.shape), requires_grad=False)
        setattr(owner, leaf, made[id(meta)])
    return names


def _restore_meta(graph_module: fx.GraphModule, names: set[str]) -> None:
    """Put meta tensors back under ``names``; detach all the other weights from autograd."""
    for node in graph_module.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        tensor = getattr_or_none(graph_module, name)
        if tensor is None:
            continue
        path, _, leaf = name.rpartition(".")
        owner = graph_module.get_submodule(path)
        if name in names:
            setattr(owner, leaf, nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), False))
        elif isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(False)


def _explain(error: Exception, module: nn.Module) -> CaptureError:
    """Turn a failure of torch.export into one sentence that names the innermost line of the model."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_model_code(f.filename)]
    where = f"{shorten_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else type(module).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return CaptureError(
        f"{type(module).__name__} cannot be exported: {first.rstrip('.')}",
        where=where,
        fix="make the control flow and the shapes on that line independent of tensor values",
    )
