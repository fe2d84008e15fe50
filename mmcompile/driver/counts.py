"""What a build counts on its graphs: launches before and after every pass, bytes of the checkpoint by format."""

from __future__ import annotations

import json
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from mmcompile.core.formats import WEIGHT_FORMATS
from mmcompile.core.formats.footprint import Weight, count_checkpoint_bytes
from mmcompile.core.graph import depends_only_on_weights
from mmcompile.driver.summary import fill_layers, read_layer
from mmcompile.lower.operands import is_view
from mmcompile.lower.regions import find_regions

FILE = "counts.json"


@dataclass(frozen=True)
class Launches:
    """Launches of one step over a graph: ``step`` in all, ``layer`` in the usual layer (0 if there are none)."""

    step: int
    layer: int


@dataclass
class Counts:
    """What ``counts.json`` of an artifact holds.

    Attributes:
        passes: launches before and after each pass, in the order of the passes.
        checkpoint: bytes of the weights in the graph by format, and "total".
        beside: bytes of what the model's checkpoint holds and the graph does not (vision tower, drafts), by part.
        published: bytes of the model's published checkpoints by their mix of formats, counted from the graph's weights.
    """

    passes: list[tuple[Launches, Launches]] = field(default_factory=list)
    checkpoint: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)


def count_launches(graph_module: fx.GraphModule) -> Launches:
    """Launches of one step if every operation, or group of elementwise ones that lowering would form, were a kernel.

    Views, sizes and what depends on weights alone are free. A call belongs to the layer that its weights and caches are
    numbered by; one that reads none of them to the layer around it.
    """
    groups, constant = find_regions(graph_module), depends_only_on_weights(graph_module)
    sources = _list_sources(graph_module, constant)
    layers: list[int | str | None] = []
    for node in graph_module.graph.nodes:
        if node.op != "call_function" or node in constant or _is_free(node):
            continue
        group = groups.get(node)
        if group is None or node is group.nodes[-1]:
            inputs = group.inputs() if group else node.all_input_nodes
            layers.append(read_layer([name for i in inputs for name in sources.get(i, ())]))
    per_layer: Counter[int] = Counter(layer for layer in fill_layers(layers) if layer is not None)
    usual = Counter(per_layer.values()).most_common(1)
    return Launches(len(layers), usual[0][0] if usual else 0)


def _is_free(node: fx.Node) -> bool:
    value = node.meta["val"]
    numbers = value is not None and not isinstance(value, Tensor | tuple | list)
    return node.target is operator.getitem or numbers or is_view(node)


def _list_sources(graph_module: fx.GraphModule, constant: set[fx.Node]) -> dict[fx.Node, tuple[str, ...]]:
    """Names of the weights that a constant is made of, and of caches."""
    sources: dict[fx.Node, tuple[str, ...]] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr" or node.name.startswith("kv_cache"):
            sources[node] = (str(node.target),)
        elif node in constant:
            sources[node] = tuple(dict.fromkeys(n for i in node.all_input_nodes for n in sources.get(i, ())))
    return sources


def count_checkpoint(
    parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]], outcomes: Mapping[str, str]
) -> dict[str, int]:
    """Bytes by format, and "total", of a checkpoint that stores a model as it was quantized.

    Args:
        parameters: shape and dtype of the captured weights. outcomes: format, or the reason why not, by name.
    """
    weights = []
    for name, (shape, dtype) in parameters.items():
        plain = "fp32" if dtype.itemsize == 4 else "bf16"  # fp16 takes as many bytes
        weights.append(Weight(name, shape, outcomes[name] if outcomes.get(name) in WEIGHT_FORMATS else plain))
    return count_checkpoint_bytes(weights)


def write_counts(folder: Path, counts: Counts) -> None:
    """Write ``folder``/counts.json, keys sorted."""
    (folder / FILE).write_text(json.dumps(asdict(counts), indent=1, sort_keys=True) + "\n", encoding="utf-8")


def read_counts(folder: Path) -> dict[str, Any] | None:
    """The record of ``folder``/counts.json, None for an artifact that was built before there were any."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
