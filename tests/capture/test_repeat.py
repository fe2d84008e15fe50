"""Equal layers are traced twice and repeated: the same graph as in full; near misses are told apart or refused."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmcompile.capture import export
from mmcompile.capture.decoder import capture_decoder, capture_huggingface
from mmcompile.capture.export import Captured, capture_module
from mmcompile.capture.layers import find_equal_layers
from mmcompile.core.graph import print_graph
from mmcompile.models import llama, minimax_m3

DEPTH = 6


def capture_both(monkeypatch: pytest.MonkeyPatch, capture: Callable[[], Captured]) -> tuple[str, Captured]:
    """Capture with repetition and in full; the graphs must be equal node by node. Returns the note and the first."""
    repeated = capture()
    with monkeypatch.context() as patch:
        patch.setattr("mmcompile.capture.repeat.find_equal_layers", lambda model: ([], set()))
        full = capture()
    assert full.note == ""
    assert number_items(print_graph(repeated.graph_module)) == number_items(print_graph(full.graph_module))
    pairs = zip(repeated.graph_module.graph.nodes, full.graph_module.graph.nodes, strict=True)
    for ours, theirs in pairs:
        assert ours.meta.get("nn_module_stack") == theirs.meta.get("nn_module_stack"), ours
    return repeated.note, repeated


def number_items(text: str) -> str:
    """Printed graph with its getitem nodes numbered in order: those of the repeats took numbers before they went."""
    names: dict[str, str] = {}
    return re.sub(r"getitem_\d+", lambda found: names.setdefault(found[0], f"item{len(names)}"), text)


def capture_net(module: nn.Module, **more: Any) -> Captured:
    inputs = {"x": torch.zeros(5, 8)}
    return capture_module(module, inputs, dynamic={"x": {0: "rows"}}, symbols={"rows": (2, 64)}, **more)


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = Norm(1e-5)
        self.linear = nn.Linear(8, 8)
        self.window = 3
        self.skip_norm = False

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.skip_norm else self.norm(x)
        rows = torch.arange(x.shape[0])
        near = (rows[:, None] - rows[None]).abs() < self.window
        return x + near.to(x.dtype) @ self.linear(y)


class Net(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, depth: int = DEPTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(i) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def check_numbers(captured: Captured, module: nn.Module) -> None:
    x = torch.randn(9, 8)
    assert torch.equal(captured.graph_module(x), module(x))


def test_equal_layers_are_repeated(monkeypatch) -> None:
    module = Net().eval()
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note == "4 of 6 equal layers repeated, the others traced"
    check_numbers(captured, module)


def _set(path: str, value: Any) -> Callable[[Net], None]:
    def change(net: Net) -> None:
        owner, _, name = path.rpartition(".")
        setattr(net.layers[3].get_submodule(owner), name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        _set("norm.eps", 1e-3),
        _set("window", 2),
        _set("window", 3.0),
        _set("skip_norm", True),
        _set("linear", nn.Linear(8, 8, bias=False)),
        _set("norm", nn.Identity()),
        _set("linear", nn.Sequential(nn.Linear(8, 8), nn.SiLU())),
    ],
    ids=["eps", "window", "type", "skipped_norm", "bias", "class", "submodule"],
)
def test_a_layer_that_differs_is_another_kind(monkeypatch, change) -> None:
    module = Net()
    change(module)
    module.eval()
    assert "layers.3" not in {layer.path for layer in find_equal_layers(module)[0]}
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note == "3 of 5 equal layers repeated, the others traced"
    check_numbers(captured, module)


@pytest.mark.slow
def test_alternating_kinds_are_repeated_each(monkeypatch) -> None:
    module = Net(depth=8)
    for i in (1, 3, 5, 7):
        module.layers[i].window = 5
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note == "4 of 8 equal layers repeated, the others traced"
    check_numbers(captured, module)


class Arguments(Net):
    """The differences come from outside the layers: a literal, or a tensor of another shape or dtype."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__(Scaled, len(values))
        self.values = values

    def forward(self, x: Tensor) -> Tensor:
        for layer, value in zip(self.layers, self.values, strict=True):
            x = layer(x, scale=value)
        return x


class Scaled(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, *, scale: Any) -> Tensor:
        return self.linear(x) * scale


@pytest.mark.parametrize(
    ("values", "repeated"),
    [
        ([2.0, 2.0, 2.0, 0.5, 2.0], 2),
        ([2.0, 2.0, 2.0, 2, 2.0], 2),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0),
        ([torch.ones(8), torch.ones(8), torch.ones(8), torch.ones(1), torch.ones(8)], 2),
    ],
    ids=["value", "type", "all", "shape"],
)
def test_arguments_decide_too(monkeypatch, values, repeated: int) -> None:
    module = Arguments(values)
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note == (f"{repeated} of 5 equal layers repeated, the others traced" if repeated else "")
    check_numbers(captured, module)


class IndexScale(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class IndexBranch(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.index == 4 else super().forward(x)


class Counting(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls += 1
        return super().forward(x) * (2.0 if Counting.calls % DEPTH == 5 else 1.0)


class Remembering(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


SIDE: list[Tensor] = []


class Leaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SIDE.append(x.sum())
        return super().forward(x)


class Keeping(Layer):
    def forward(self, x: Tensor) -> Tensor:
        SIDE.append(x)
        return super().forward(x)


class Listening(Net):
    def forward(self, x: Tensor) -> Tensor:
        SIDE.clear()
        return super().forward(x) + torch.stack(SIDE).sum()


class Reaching(Layer):
    """Reads a tensor that is neither argument nor weight of its own."""

    outside: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + Reaching.outside


class Reached(Net):
    def forward(self, x: Tensor) -> Tensor:
        Reaching.outside = x * 2
        return super().forward(x)


class Writing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class Fresh(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 1)


class Viewing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.linear(x).relu_()
        return x[:]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net(IndexScale), "reads its own index, IndexScale.index"),
        (lambda: Net(IndexBranch), "reads its own index, IndexBranch.index"),
        (lambda: Listening(Leaking), "which layers.1 does not return"),
        (lambda: Listening(Keeping), "keeps a tensor somewhere else than in its result"),
        (lambda: Reached(Reaching), "reads mul, which is no argument of it"),
        (lambda: Fresh(Writing), "writes into a tensor that is not its own"),
        (lambda: Net(Viewing), "returns a view of another tensor"),
    ],
    ids=["index_scale", "index_branch", "side_channel", "kept_input", "closure", "write", "view"],
)
def test_what_cannot_be_proved_is_traced_in_full(monkeypatch, make, reason: str) -> None:
    module = make().eval()
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note.startswith("every layer traced: ")
    assert reason in note
    check_numbers(captured, module)


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Remembering, "changes its own attributes while it runs"),
        (Counting, "does not run the operations of layers.1"),
    ],
)
def test_state_beside_the_tensors_is_refused(layer: type[Layer], reason: str) -> None:
    Counting.calls = 0
    assert reason in capture_net(Net(layer)).note


def test_shared_weights_and_hooks_are_never_repeated(monkeypatch) -> None:
    shared = Net()
    for layer in shared.layers[1:]:
        layer.linear = shared.layers[0].linear
    hooked = Net()
    for layer in hooked.layers:
        layer.norm.register_forward_hook(lambda module, args, result: result * 2)
    for module in (shared, hooked):
        assert find_equal_layers(module)[0] == []
        check_numbers(capture_net(module), module)


def test_writes_within_a_layer_are_repeated(monkeypatch) -> None:
    class InPlace(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y[0] += 1
            return y

    module = Net(InPlace)
    note, captured = capture_both(monkeypatch, lambda: capture_net(module))
    assert note == "4 of 6 equal layers repeated, the others traced"
    check_numbers(captured, module)


def test_classes_are_left_as_they_were() -> None:
    before = dict(vars(Layer)), dict(vars(nn.Linear))
    capture_net(Net())
    assert (dict(vars(Layer)), dict(vars(nn.Linear))) == before


def test_failure_is_that_of_the_full_capture() -> None:
    class Branching(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(export.CaptureError, match="cannot be exported"):
        capture_net(Net(Branching))


@pytest.mark.parametrize("qk_norm", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_models_door(monkeypatch, qk_norm: bool) -> None:
    config = dataclasses.replace(llama.MODELS["smollm2-tiny"], num_layers=6, qk_norm=qk_norm)
    note, _ = capture_both(
        monkeypatch,
        lambda: capture_decoder(lambda: llama.build(config), dtype=torch.float32, max_positions=256, weights="random"),
    )
    assert note == "3 of 6 equal layers repeated, the others traced"


@pytest.mark.slow
def test_layers_of_minimax_m3_that_take_a_named_tuple(monkeypatch) -> None:
    """Dense, then experts; the first layer of all gets no chosen blocks, so it is a call of its own."""
    dense, experts = 4, 3
    kinds = (0,) * dense + (1,) * experts
    config = dataclasses.replace(
        minimax_m3.MODELS["minimax-m3.1-flash-tiny"], num_layers=dense + experts, moe_layer_freq=kinds,
        sparse_attention_freq=(1,) * (dense + experts),
    )  # fmt: skip
    note, _ = capture_both(
        monkeypatch,
        lambda: capture_decoder(
            lambda: minimax_m3.build(config), dtype=torch.float32, max_positions=1024, weights="none"
        ),
    )
    assert note == "2 of 7 equal layers repeated, the others traced"


BASE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention"] * 4
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": ({}, 2),
    "mistral": ({"sliding_window": 6}, 2),
    "ministral": ({"num_hidden_layers": 8, "sliding_window": 6, "layer_types": ALTERNATING}, 3),
    "qwen3": ({"num_hidden_layers": 7, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 4}, 2),
    "qwen3_moe": (
        {"num_hidden_layers": 6, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
         "mlp_only_layers": [3]}, 2,
    ),
    "gemma3_text": ({"num_hidden_layers": 8, "sliding_window": 6}, 4),
}  # fmt: skip


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=[pytest.mark.slow] if f != "llama" else []) for f in FAMILIES]
)
def test_huggingface_door(monkeypatch, tmp_path: Path, family: str) -> None:
    pytest.importorskip("transformers")
    changes, repeated = FAMILIES[family]
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": family, **BASE, **changes}))
    note, _ = capture_both(monkeypatch, lambda: capture_huggingface(path, dtype=torch.float32, weights="none"))
    assert note.startswith(f"{repeated} of "), note
