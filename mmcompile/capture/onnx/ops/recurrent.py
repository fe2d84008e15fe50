"""RNN, GRU and LSTM of ONNX, unrolled over a fixed number of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mmcompile.capture.onnx.values import Call

Activation = Callable[[Tensor], Tensor]
_PLAIN: dict[str, Activation] = {
    "Sigmoid": torch.sigmoid,
    "Tanh": torch.tanh,
    "Relu": F.relu,
    "Softsign": F.softsign,
    "Softplus": F.softplus,
}
_DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def _activations(call: Call, directions: int) -> list[list[Activation]]:
    """Functions of every direction, clipped if the node says so."""
    names = call.attr("activations", _DEFAULTS[call.step.op] * directions)
    clip = call.attr("clip")
    functions = []
    for name in names:
        if name not in _PLAIN:
            raise call.refuse(f"the activation {name} is not supported", fix=f"use {', '.join(_PLAIN)}")
        function = _PLAIN[name]
        functions.append(function if clip is None else lambda x, f=function: f(x.clamp(-clip, clip)))
    per = len(names) // directions
    return [functions[i * per : (i + 1) * per] for i in range(directions)]


def _rnn_step(gates: Tensor, h: Tensor, c: Tensor | None, r: Tensor, rb: Tensor, p: Any, acts: list[Activation]) -> Any:
    return acts[0](gates + F.linear(h, r, rb)), None


def _lstm_step(gates: Tensor, h: Tensor, c: Tensor, r: Tensor, rb: Tensor, p: Any, acts: list[Activation]) -> Any:
    i, o, f, cell = (gates + F.linear(h, r, rb)).chunk(4, -1)
    peep_i, peep_o, peep_f = p if p is not None else (0.0, 0.0, 0.0)
    kept = acts[0](f + peep_f * c) * c + acts[0](i + peep_i * c) * acts[1](cell)
    return acts[0](o + peep_o * kept) * acts[2](kept), kept


def _gru_step(linear_before_reset: bool) -> Callable[..., Any]:
    def step(gates: Tensor, h: Tensor, c: Tensor | None, r: Tensor, rb: Tensor, p: Any, acts: list[Activation]) -> Any:
        size = h.shape[-1]
        from_state = F.linear(h, r[: 2 * size], rb[: 2 * size])
        z, reset = acts[0](gates[..., : 2 * size] + from_state).chunk(2, -1)
        rest, bias = r[2 * size :], rb[2 * size :]
        inner = reset * F.linear(h, rest, bias) if linear_before_reset else F.linear(reset * h, rest, bias)
        new = acts[1](gates[..., 2 * size :] + inner)
        return (1.0 - z) * new + z * h, None

    return step


def _run_direction(
    x: Tensor, w: Tensor, wb: Tensor, state: tuple[Tensor, Tensor | None], lengths: Tensor | None, backwards: bool,
    step: Callable[..., Any], rest: tuple[Any, ...],
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Outputs [time, batch, hidden] and the last states. Beyond a sequence's length the outputs are zero."""
    gates = F.linear(x, w, wb)
    h, c = state
    outputs: list[Tensor] = []
    times = list(range(x.shape[0]))
    for t in reversed(times) if backwards else times:
        new_h, new_c = step(gates[t], h, c, *rest)
        shown = new_h
        if lengths is not None:
            live = (t < lengths)[:, None]
            shown = torch.where(live, new_h, torch.zeros_like(new_h))
            new_h = torch.where(live, new_h, h)
            new_c = None if new_c is None else torch.where(live, new_c, c)
        h, c = new_h, new_c
        outputs.append(shown)
    return torch.stack(outputs[::-1] if backwards else outputs), h, c


def _recurrent(call: Call) -> Any:
    kind = call.step.op
    x, w, r = call.tensor(0), call.tensor(1), call.tensor(2)
    x = x.transpose(0, 1) if call.attr("layout", 0) else x
    if not isinstance(x.shape[0], int):
        raise call.refuse("the number of time steps is dynamic, and it is unrolled", fix="fix it, e.g. --fix DIM=32")
    directions, size = r.shape[0], r.shape[2]
    mode = call.attr("direction", "forward")
    lengths = call.maybe(4)
    step = {"RNN": _rnn_step, "LSTM": _lstm_step, "GRU": _gru_step(bool(call.attr("linear_before_reset", 0)))}[kind]
    bias = call.maybe(3)
    acts = _activations(call, directions)
    if kind == "LSTM" and call.attr("input_forget", 0):
        raise call.refuse("input_forget couples the gates")
    ys, hs, cs = [], [], []
    for d in range(directions):
        b = torch.zeros(2 * w.shape[1], dtype=x.dtype) if bias is None else bias[d]
        wb, rb = b[: w.shape[1]], b[w.shape[1] :]
        h, c = (_initial(call, i, d, x, size) for i in (5, 6))
        peep = call.tensor(7)[d].chunk(3) if kind == "LSTM" and call.has(7) else None
        rest = (r[d], rb, peep, acts[d])
        state = (h, c if kind == "LSTM" else None)
        backwards = mode == "reverse" or d == 1
        y, h, c = _run_direction(x, w[d], wb, state, lengths, backwards, step, rest)  # type: ignore[assignment]
        ys.append(y)
        hs.append(h)
        cs.append(c)
    y, h = torch.stack(ys, 1), torch.stack(hs)
    if call.attr("layout", 0):
        y, h = y.permute(2, 0, 1, 3), h.transpose(0, 1)
    if kind != "LSTM":
        return (y, h)[: len(call.step.outputs)]
    c = torch.stack(cs)
    c = c.transpose(0, 1) if call.attr("layout", 0) else c
    return (y, h, c)[: len(call.step.outputs)]


def _initial(call: Call, index: int, direction: int, x: Tensor, size: int) -> Tensor:
    if not call.has(index) or (index == 6 and call.step.op != "LSTM"):
        return torch.zeros(x.shape[1], size, dtype=x.dtype)
    state = call.tensor(index)
    return state[:, direction] if call.attr("layout", 0) else state[direction]


TABLE: dict[str, Callable[[Call], Any]] = {"RNN": _recurrent, "GRU": _recurrent, "LSTM": _recurrent}
