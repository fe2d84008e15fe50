"""Look-alikes must not match, and must be reported with the reason and the model's source line."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mmcompile.capture.export import capture_module
from mmcompile.core.graph import operation_name
from mmcompile.core.passes import NearMiss, PassContext, PassResult
from mmcompile.passes.clean import cancel_views, drop_no_ops, fold_literals, merge_common
from mmcompile.passes.standardise import match_attention, match_linear, match_rms_norm, match_rope, match_swiglu

WIDTH = 8
CONTEXT = PassContext(max_context=64)


class Scaled(nn.Module):
    """A function of the inputs and of a weight [8]."""

    def __init__(self, function, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=dtype))

    def forward(self, **inputs: Tensor) -> Tensor:
        raise NotImplementedError


class OfX(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


class OfQ(Scaled):
    def forward(self, q: Tensor, positions: Tensor) -> Tensor:
        return self.function(q, positions)


def _run(module: nn.Module, inputs: dict[str, Tensor], axes: dict[str, int], step) -> tuple[fx.GraphModule, PassResult]:
    captured = capture_module(
        module, inputs, dynamic={n: {a: "tokens"} for n, a in axes.items()}, symbols={"tokens": (2, 64)}
    )
    for clean in (drop_no_ops, merge_common):
        clean.run(captured.graph_module, CONTEXT)
    result = step.run(captured.graph_module, CONTEXT)
    return captured.graph_module, result


def _count(graph_module: fx.GraphModule, name: str) -> int:
    return sum(operation_name(n.target) == name for n in graph_module.graph.nodes if n.op == "call_function")


def _source_line(miss: NearMiss) -> str:
    number = int(miss.source.rpartition(":")[2])
    return inspect.getsource(inspect.getmodule(_run)).splitlines()[number - 1]


# RMSNorm ------------------------------------------------------------------------------------------------------------


def _norm(x: Tensor, w: Tensor, eps=1e-5, dims=-1, keepdim=True, power=2) -> Tensor:
    wide = x.float()
    return w * (wide * torch.rsqrt(wide.pow(power).mean(dims, keepdim=keepdim) + eps)).to(x.dtype)


GOOD_NORMS = {
    "llama": (_norm, 1e-5, 0.0, True),
    "product": (lambda x, w: w * (x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, True) + 1e-5)).to(x.dtype),
                1e-5, 0.0, True),
    "gemma": (lambda x, w: ((1.0 + w.float()) * (x.float() * (x.float().pow(2).mean(-1, True) + 1e-6).rsqrt()))
              .to(x.dtype), 1e-6, 1.0, False),
    "wide scale": (lambda x, w: (w * (x.float() * (x.float().square().mean(-1, True) + 1e-3).rsqrt())).to(x.dtype),
                   1e-3, 0.0, False),
    "built in": (lambda x, w: F.rms_norm(x, (WIDTH,), w, 1e-5), 1e-5, 0.0, False),
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_norms_match_bitwise(name: str, dtype: torch.dtype) -> None:
    function, eps, offset, rounds = GOOD_NORMS[name]
    module = OfX(function, dtype)
    graph_module, result = _run(module, {"x": torch.zeros(5, WIDTH, dtype=dtype)}, {"x": 0}, match_rms_norm)
    (node,) = [n for n in graph_module.graph.nodes if operation_name(n.target) == "mm.rms_norm"]
    assert node.args[2:4] == (eps, offset)
    if dtype != torch.float32:
        assert node.args[4] is rounds
    assert _count(graph_module, "aten.rsqrt.default") == 0
    assert len(result.matches) == 1
    x = torch.randn(9, WIDTH).to(dtype) * 3
    torch.testing.assert_close(graph_module(x), function(x, module.weight), rtol=0, atol=0)


BAD_NORMS = {
    "tensor eps": (lambda x, w: _norm(x, w, eps=w.mean()), "needs a literal number"),
    "other dimension": (lambda x, w: _norm(x, w, dims=0), "not over the last one"),
    "no keepdim": (lambda x, w: _norm(x[:, None], w, keepdim=False), "keepdim is False"),
    "third power": (lambda x, w: _norm(x, w, power=3), "powers 3"),
    "no weight": (lambda x, w: _norm(x, 2.0) + w, "not by a weight"),
    "used twice": (
        lambda x, w: (lambda r: w * (x * r) + r)(torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        "2 users",
    ),
    "other value": (
        lambda x, w: w * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)),
        "does not multiply the value whose squares",
    ),
}


@pytest.mark.parametrize("name", BAD_NORMS)
def test_norm_near_misses(name: str) -> None:
    function, reason = BAD_NORMS[name]
    graph_module, result = _run(OfX(function), {"x": torch.zeros(5, WIDTH)}, {"x": 0}, match_rms_norm)
    assert _count(graph_module, "mm.rms_norm") == 0
    (miss,) = result.near_misses
    assert reason in miss.reason
    assert miss.source.rpartition(":")[0].endswith("test_standardise_near_misses.py")


def test_norm_in_bf16_is_refused() -> None:
    module = OfX(lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)), torch.bfloat16)
    _, result = _run(module, {"x": torch.zeros(5, WIDTH, dtype=torch.bfloat16)}, {"x": 0}, match_rms_norm)
    assert "computed in torch.bfloat16" in result.near_misses[0].reason


# SwiGLU and linear --------------------------------------------------------------------------------------------------


def test_gelu_is_no_swiglu() -> None:
    graph_module, result = _run(
        OfX(lambda x, w: F.gelu(x) * (x + w)), {"x": torch.zeros(5, WIDTH)}, {"x": 0}, match_swiglu
    )
    assert _count(graph_module, "mm.swiglu") == 0
    assert "aten.gelu.default" in result.near_misses[0].reason
    assert "self.function(x, self.weight)" in _source_line(result.near_misses[0])


def test_silu_of_a_sum_is_no_swiglu() -> None:
    _, result = _run(OfX(lambda x, w: F.silu(x) + w), {"x": torch.zeros(5, WIDTH)}, {"x": 0}, match_swiglu)
    assert "found aten.add.Tensor after silu" in result.near_misses[0].reason


def test_swiglu_with_operands_swapped_matches() -> None:
    graph_module, result = _run(
        OfX(lambda x, w: (x + w) * F.silu(x)), {"x": torch.zeros(5, WIDTH)}, {"x": 0}, match_swiglu
    )
    assert (len(result.matches), result.near_misses) == (1, [])
    x = torch.randn(4, WIDTH)
    w = torch.linspace(0.5, 1.5, WIDTH)
    assert torch.equal(graph_module(x), F.silu(x) * (x + w))


class Matrices(nn.Module):
    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 4)), nn.Parameter(torch.randn(4, WIDTH))
        self.bias, self.alpha = nn.Parameter(torch.randn(4)), alpha

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.a + torch.addmm(self.bias, x, self.b.t(), alpha=self.alpha) + x @ x.t()[:, :4]


def test_products_with_weights_become_linear() -> None:
    module = Matrices()
    graph_module, result = _run(module, {"x": torch.zeros(WIDTH, WIDTH)}, {}, match_linear)
    assert _count(graph_module, "mm.linear") == 2
    assert _count(graph_module, "aten.matmul.default") == 1
    assert result.near_misses == []
    x = torch.randn(WIDTH, WIDTH)
    torch.testing.assert_close(graph_module(x), module(x))


def test_scaled_addmm_is_refused() -> None:
    _, result = _run(Matrices(alpha=2.0), {"x": torch.zeros(WIDTH, WIDTH)}, {}, match_linear)
    assert "alpha=2.0" in result.near_misses[0].reason


# RoPE ---------------------------------------------------------------------------------------------------------------


def _angles(positions: Tensor, width: int = WIDTH, interleave: bool = False) -> tuple[Tensor, Tensor]:
    angle = positions[:, None].float() / 100.0 ** (torch.arange(0, width, 2) / width)
    angle = angle.repeat_interleave(2, -1) if interleave else torch.cat([angle, angle], -1)
    return angle.cos()[:, None], angle.sin()[:, None]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def _partial(q: Tensor, positions: Tensor) -> Tensor:
    return torch.cat([_rotate(q[..., :4], *_angles(positions, 4)), q[..., 4:]], -1)


def _wrong_sign(q: Tensor, positions: Tensor) -> Tensor:
    cos, sin = _angles(positions)
    first, second = q.chunk(2, -1)
    return q * cos + torch.cat([second, -first], -1) * sin


def _subtracted(q: Tensor, positions: Tensor) -> Tensor:
    cos, sin = _angles(positions)
    first, second = q.chunk(2, -1)
    return q * cos - torch.cat([-second, first], -1) * sin


def _uneven(q: Tensor, positions: Tensor) -> Tensor:
    cos, sin = _angles(positions)
    return q * cos + torch.cat([-q[..., 2:], q[..., :2]], -1) * sin


def _interleaved(q: Tensor, positions: Tensor) -> Tensor:
    cos, sin = _angles(positions, interleave=True)
    turned = torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2)
    return q * cos + turned * sin


def _dynamic(q: Tensor, positions: Tensor) -> Tensor:
    """Dynamic NTK in spirit: the longest position changes the angles of all."""
    return _rotate(q, *_angles(positions * (1 + positions.max())))


def _run_rope(function, tokens: int = 7) -> tuple[fx.GraphModule, PassResult]:
    inputs = {"q": torch.zeros(tokens, 3, WIDTH), "positions": torch.arange(tokens)}
    return _run(OfQ(function), inputs, {"q": 0, "positions": 0}, match_rope)


@pytest.mark.parametrize("function", [lambda q, p: _rotate(q, *_angles(p)), _partial], ids=["full", "partial"])
def test_rope_matches(function) -> None:
    graph_module, result = _run_rope(function)
    assert (len(result.matches), result.near_misses) == (1, [])
    assert _count(graph_module, "aten.cos.default") == 0
    assert graph_module.cos_sin_table.shape == (64, WIDTH if function is not _partial else 4)
    q, positions = torch.randn(20, 3, WIDTH), torch.randint(0, 64, (20,))
    torch.testing.assert_close(graph_module(q, positions), function(q, positions), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_wrong_sign, "the rotation runs the other way"),
        (_subtracted, "the rotation runs the other way"),
        (_uneven, "the rotation needs 4 to 8"),
        (_interleaved, "rotate_half"),
        (_dynamic, "depend on the other tokens too"),
    ],
)
def test_rope_near_misses(function, reason: str) -> None:
    graph_module, result = _run_rope(function)
    assert _count(graph_module, "mm.rope") == 0
    assert any(reason in miss.reason for miss in result.near_misses), result.near_misses
    assert all("test_standardise_near_misses.py" in miss.source for miss in result.near_misses)


# Attention ----------------------------------------------------------------------------------------------------------


def _mask(q: Tensor, keep) -> Tensor:
    tokens = q.shape[-2]
    row, column = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    return keep(row, column)


def _attend(q: Tensor, keep) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, attn_mask=_mask(q, keep)[None, None])


def _attend_spelled_out(q: Tensor, keep, scale: float = 0.5, cap: float = 0.0, bias: float = float("-inf")) -> Tensor:
    scores = q @ q.transpose(-1, -2) * scale
    scores = (scores / cap).tanh() * cap if cap else scores
    mask = torch.where(_mask(q, keep), 0.0, bias)
    return torch.softmax(scores + mask, -1, dtype=torch.float32) @ q


def _run_attention(function) -> tuple[fx.GraphModule, PassResult]:
    return _run(OfX(lambda x, w: function(x)), {"x": torch.zeros(1, 2, 7, WIDTH)}, {"x": 2}, match_attention)


def _causal(row: Tensor, column: Tensor) -> Tensor:
    return column <= row


@pytest.mark.parametrize(
    ("function", "scale", "window"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), 1 / math.sqrt(WIDTH), 0),
        (lambda q: _attend(q, _causal), 1 / math.sqrt(WIDTH), 0),
        (lambda q: _attend(q, lambda r, c: (c <= r) & (c > r - 5)), 1 / math.sqrt(WIDTH), 5),
        (lambda q: _attend_spelled_out(q, _causal), 0.5, 0),
        (lambda q: _attend_spelled_out(q, lambda r, c: (c <= r) & (r - c < 40)), 0.5, 40),
    ],
    ids=["is_causal", "causal mask", "window 5", "spelled out", "spelled out, window 40"],
)
def test_attention_matches(function, scale: float, window: int) -> None:
    graph_module, result = _run_attention(function)
    assert (len(result.matches), result.near_misses) == (1, [])
    (node,) = [n for n in graph_module.graph.nodes if operation_name(n.target) == "mm.attention"]
    assert node.args[3:] == (pytest.approx(scale), window)
    x = torch.randn(1, 2, 50, WIDTH)
    torch.testing.assert_close(graph_module(x), function(x), rtol=0, atol=2e-6)


@settings(max_examples=6, deadline=None)
@given(window=st.integers(1, 45))
def test_any_window_is_found(window: int) -> None:
    graph_module, _ = _run_attention(lambda q: _attend(q, lambda r, c: (c <= r) & (c > r - window)))
    (node,) = [n for n in graph_module.graph.nodes if operation_name(n.target) == "mm.attention"]
    assert node.args[4] == window


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q: F.scaled_dot_product_attention(q, q, q), "every token sees the later ones"),
        (lambda q: _attend(q, lambda r, c: c <= r + 1), "(row, column) = (0, 1) is seen"),
        (lambda q: _attend(q, lambda r, c: (c <= r) & ((c > r - 5) | (c == 0))), "(row, column) = "),
        (lambda q: _attend(q, lambda r, c: (c <= r) & (r // 4 == c // 4)), "is not causal with a window of"),
        (lambda q: _attend(q, lambda r, c: (c <= r) | (r < 3)), "(row, column) = (0, 1) is seen"),
        (lambda q: _attend_spelled_out(q, _causal, bias=-2.0), "the mask adds -2"),
        (lambda q: _attend_spelled_out(q, _causal, cap=30.0), "aten.tanh.default"),
    ],
    ids=["no mask", "one ahead", "window and sink", "blocks", "prefix", "weak mask", "soft cap"],
)
def test_attention_near_misses(function, reason: str) -> None:
    graph_module, result = _run_attention(function)
    assert _count(graph_module, "mm.attention") == 0
    (miss,) = result.near_misses
    assert reason in miss.reason, miss.reason
    assert "test_standardise_near_misses.py" in miss.source


# Clean --------------------------------------------------------------------------------------------------------------


def _untidy(x: Tensor, w: Tensor) -> Tensor:
    y = F.dropout(x.clone().contiguous() * 1.0, 0.5, training=False)
    constant = torch.full((1,), 3.0) * 2
    return (y.transpose(0, 1).transpose(0, 1) + w) * constant + (x + w).view(-1, 2, 4).reshape(-1, WIDTH)


def test_clean_passes_keep_the_values() -> None:
    module = OfX(_untidy)
    captured = capture_module(
        module, {"x": torch.zeros(5, WIDTH)}, dynamic={"x": {0: "tokens"}}, symbols={"tokens": (2, 64)}
    )
    for step in (drop_no_ops, fold_literals, cancel_views, drop_no_ops, merge_common):
        step.run(captured.graph_module, CONTEXT)
    counts = [operation_name(n.target) for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    assert sorted(counts) == ["aten.add.Tensor", "aten.add.Tensor", "aten.mul.Tensor"]
    x = torch.randn(6, WIDTH)
    assert torch.equal(captured.graph_module(x), _untidy(x, module.weight))


def test_active_dropout_and_random_numbers_stay() -> None:
    def noisy(x: Tensor, w: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True) + torch.rand_like(x) * torch.rand_like(x) * w

    graph_module, _ = _run(OfX(noisy), {"x": torch.zeros(5, WIDTH)}, {"x": 0}, merge_common)
    assert _count(graph_module, "aten.dropout.default") == 1
    assert _count(graph_module, "aten.rand_like.default") == 2
