"""A graph as MLIR for reading: the torch dialect with ``mm::`` operations kept as they are and weights left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch_mlir.dialects import torch as torch_dialect
from torch_mlir.extras.fx_importer import FxImporter, FxImporterHooks, GraphNodeImporter, create_mlir_tensor_type
from torch_mlir.ir import Attribute, Context, InsertionPoint, Location, Operation

from mmcompile.core.graph import get_parameter
from mmcompile.core.runner import copy_graph


def format_mlir(graph_module: fx.GraphModule) -> str:
    """The graph as text: ``torch.aten`` operations, ``torch.operator "torch.mm.<name>"`` and elided weights."""
    flat = copy_graph(graph_module)
    for node in flat.graph.find_nodes(op="get_attr"):
        name = str(node.target).replace(".", "_")
        setattr(flat, name, get_parameter(flat, str(node.target)))
        node.target = name
    context = Context()
    torch_dialect.register_dialect(context)
    importer = FxImporter(context=context, hooks=_ElideWeights(), graph_node_importer_cls=_NodeImporter)
    importer.import_stateless_graph(flat.graph, func_name="main")
    return str(importer.module)


class _NodeImporter(GraphNodeImporter):  # type: ignore[misc]
    """Lets a weight be read more than once: the importer binds it at every use."""

    def bind_node_value(self, node: Any, value: Any, result_index: int = 0) -> None:
        if (node, result_index) not in self._v:
            super().bind_node_value(node, value, result_index)


class _ElideWeights(FxImporterHooks):  # type: ignore[misc]
    """Literals with their types and without their bytes, each once."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}

    def resolve_literal(self, gni: Any, literal: Any, info: Any) -> Any:
        if not isinstance(literal, torch.Tensor):
            return None
        if id(literal) not in self.values:
            place = Location.unknown(gni._c)
            with place:
                value = Attribute.parse(f"dense_resource<__elided__> : {create_mlir_tensor_type(literal)}")
            kind = gni._cc.tensor_to_vtensor_type(literal)
            made = Operation.create(
                "torch.vtensor.literal",
                results=[kind],
                attributes={"value": value},
                loc=place,
                ip=InsertionPoint(gni._b),
            )
            self.values[id(literal)] = made.result
        return self.values[id(literal)]
