"""The mix of formats: experts in NVFP4, projections in MXFP8, embedding, head and router as they are."""

import pytest
import torch
from torch import nn

from mmcompile.capture.export import capture_module
from mmcompile.core.errors import UsageError
from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.core.graph import get_parameter
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import count_operations, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.lower.host import prepare_for_host
from mmcompile.passes.pipeline import list_passes, rule_file, whole_graph

MM = torch.ops.mm
STACKS = ("experts.gate_up_proj", "experts.down_proj")
PROJECTIONS = ("q_proj.weight", "k_proj.weight", "o_proj.weight")


class Block(nn.Module):
    """Projections, a router in fp32, experts with a shared expert's output as residual, and a head."""

    def __init__(self, hidden=64, width=32, experts=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(40, hidden))
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))
        self.gate = nn.Linear(hidden, experts, bias=False)
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.randn(experts, 2 * width, hidden) * 0.2)
        self.experts.down_proj = nn.Parameter(torch.randn(experts, hidden, width) * 0.2)
        self.head = nn.Linear(hidden, 40, bias=False)

    def forward(self, input_ids):
        x = MM.embedding(input_ids, self.embed)
        a = MM.linear(x, self.q_proj.weight) * MM.linear(x, self.k_proj.weight)
        x = x + MM.linear(torch.tanh(a), self.o_proj.weight)
        weights, chosen = MM.route_top_k(MM.linear(x.float(), self.gate.weight) * 2.0, None, 2, 1.0)
        x = MM.moe(x, chosen, weights, self.experts.gate_up_proj, self.experts.down_proj, x, "swiglu_oai", 1.7, 7.0)
        return MM.linear(x, self.head.weight)


def export(**options):
    example = {"input_ids": torch.arange(6)}
    captured = capture_module(
        Block(**options), example, dynamic={"input_ids": {0: "tokens"}}, symbols={"tokens": (2, 64)}
    )
    return captured.graph_module


def make_inputs(graph_module, seed=0):
    return (torch.randint(0, 40, (7,), generator=torch.Generator().manual_seed(seed)),)


def quantize(graph, fold=False, scheme="nvfp4_mxfp8", packed=None, scaled=None, **options):
    context = PassContext(
        quantization=scheme, quantization_options=options, checkpoint_nvfp4=packed or {}, checkpoint_mxfp8=scaled or {}
    )
    passes = [whole_graph("quantize", "passes.quant", "nvfp4_mxfp8")]
    passes += [whole_graph("fuse", "passes.fusion", "merge_linears")] if fold else []
    passes += [whole_graph("layout", "passes.layout", "fold_constants")] if fold else []
    reports = run_passes(graph, passes, context)
    return reports, context.info["layers"]


def test_which_layers_get_which_format():
    graph = export()
    (report,), layers = quantize(graph)
    assert {name for name, outcome in layers.items() if outcome == "nvfp4"} == set(STACKS)
    assert {name for name, outcome in layers.items() if outcome == "mxfp8"} == set(PROJECTIONS)
    assert "router" in layers["gate.weight"] and "lm_head=true" in layers["head.weight"]
    assert "embedding" in layers["embed"]
    assert sorted(report.result.notes) == sorted(f"{n}: {layers[n]}" for n in ("gate.weight", "head.weight", "embed"))
    counts = count_operations(graph)
    assert counts["mm.moe_nvfp4"] == 1 and counts["mm.linear_mxfp8"] == 3 and counts["mm.linear"] == 2
    assert "mm.moe" not in counts
    assert {m.rule for m in report.result.matches} == {"quantize_nvfp4_experts", "quantize_mxfp8"}
    assert all(m.source for m in report.result.matches)


def test_the_result_is_the_model_on_decoded_weights():
    module, graph = Block(), export()
    quantize(graph)
    with torch.no_grad():
        for name in PROJECTIONS:
            parameter = module.get_parameter(name)
            parameter.copy_(mxfp8.decode(*mxfp8.encode(parameter)))
        for name in STACKS:
            stack = module.get_parameter(name)
            stack.copy_(MM.nvfp4_dequantize_experts(*MM.nvfp4_quantize_experts(stack), torch.float32))
        inputs = make_inputs(graph)
        graph.recompile()
        torch.testing.assert_close(graph(*inputs), module(*inputs), rtol=1e-5, atol=1e-5)
        plain = Block()(*inputs)
        error = float((graph(*inputs) - plain).norm() / plain.norm())
    assert 0.001 < error < 0.2


def test_weights_are_folded_and_merged():
    graph = export()
    quantize(graph, fold=True, method="search", rule="ocp")
    counts = count_operations(graph)
    assert counts["mm.linear_mxfp8"] == 2, "q and k read the same input"
    assert not {name for name in counts if "quantize" in name}
    held = dict(graph.named_parameters())
    assert not set(STACKS + PROJECTIONS) & set(held) or all(held[n] is None for n in STACKS + PROJECTIONS)
    (node,) = graph.graph.find_nodes(op="call_function", target=MM.moe_nvfp4.default)
    want = MM.nvfp4_quantize_experts(Block().experts.gate_up_proj, "search")
    for argument, tensor in zip(node.args[3:6], want, strict=True):
        have = get_parameter(graph, str(argument.target))
        assert torch.equal(have.view(torch.uint8), tensor.view(torch.uint8))
    values = [get_parameter(graph, str(n.args[1].target))
              for n in graph.graph.find_nodes(op="call_function", target=MM.linear_mxfp8.default)]  # fmt: skip
    o_proj = mxfp8.encode(Block().o_proj.weight, rule="ocp")[0]
    assert any(v.shape == o_proj.shape and torch.equal(v.view(torch.uint8), o_proj.view(torch.uint8)) for v in values)


def stored_parts():
    packed = {
        "experts.gate_up_proj": MM.nvfp4_quantize_experts(torch.randn(4, 64, 64)),
        "experts.down_proj": MM.nvfp4_quantize_experts(torch.randn(4, 64, 32)),
        "k_proj": MM.nvfp4_quantize(torch.randn(64, 64)),
    }
    return packed, {"q_proj": mxfp8.encode(torch.randn(64, 64)), "head": mxfp8.encode(torch.randn(40, 64))}


@pytest.mark.parametrize("scheme", ["nvfp4_mxfp8", "none"])
def test_stored_weights_are_taken_verbatim(scheme):
    graph = export()
    packed, scaled = stored_parts()
    _, layers = quantize(graph, scheme=scheme, packed=packed, scaled=scaled)
    assert layers["head.weight"] == layers["q_proj.weight"] == "mxfp8"  # the checkpoint decides
    assert layers["k_proj.weight"] == layers["experts.down_proj"] == "nvfp4"
    names = {"packed": 0, "scale": 1, "global_scale": 2}
    for module, parts in packed.items():
        base = module if module.startswith("experts") else f"{module}.weight"
        for suffix, i in names.items():
            assert torch.equal(get_parameter(graph, f"{base}_{suffix}").view(torch.uint8), parts[i].view(torch.uint8))
    for module, parts in scaled.items():
        for suffix, tensor in zip(("values", "scale"), parts, strict=True):
            held = get_parameter(graph, f"{module}.weight_{suffix}")
            assert torch.equal(held.view(torch.uint8), tensor.view(torch.uint8))
    if scheme == "none":
        assert "no quantization was asked for" in layers["o_proj.weight"]
        assert "no quantization was asked for" in layers["gate.weight"]


class BareRouter(nn.Module):
    """A router and experts that no pass has recognised."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gate = nn.Parameter(torch.randn(40, 64)), nn.Linear(64, 4, bias=False)
        self.bias, self.experts = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4, 64, 64) * 0.1)
        self.head = nn.Linear(64, 40, bias=False)

    def forward(self, input_ids):
        x = MM.embedding(input_ids, self.embed)
        scores = torch.sigmoid(MM.linear(x, self.gate.weight).double())
        best = torch.topk(scores + self.bias, 1, dim=-1).indices[:, 0]
        x = torch.bmm(self.experts[best], x[..., None])[..., 0] * scores.gather(1, best[:, None]).float()
        return MM.linear(x, self.head.weight)


def test_a_router_is_found_without_moe():
    example = {"input_ids": torch.arange(6)}
    symbols = {"tokens": (2, 64)}
    graph = capture_module(BareRouter(), example, dynamic={"input_ids": {0: "tokens"}}, symbols=symbols).graph_module
    _, layers = quantize(graph, lm_head=True)
    assert "router" in layers["gate.weight"] and layers["head.weight"] == "mxfp8"


def test_options():
    graph = export()
    _, layers = quantize(graph, exclude=("q_proj*", "experts.down_proj"), lm_head="true")
    assert layers["q_proj.weight"] == "excluded by option" and layers["head.weight"] == "mxfp8"
    assert layers["experts.gate_up_proj"] == layers["experts.down_proj"] == "excluded by option", "both or neither"
    assert count_operations(graph)["mm.moe"] == 1
    with pytest.raises(UsageError, match="unknown layer to exclude 'v_proj'"):
        quantize(export(), exclude=("v_proj",))
    with pytest.raises(UsageError, match="unknown option of nvfp4_mxfp8 'rules'; did you mean 'rule'"):
        quantize(export(), rules="ocp")
    with pytest.raises(UsageError, match="the option rule of nvfp4_mxfp8 cannot be 'nearest'"):
        quantize(export(), rule="nearest")


def test_widths_that_do_not_fit_stay():
    graph = export(hidden=48, width=24)
    _, layers = quantize(graph)
    assert layers["q_proj.weight"] == "its 48 input features are no multiple of 32"
    assert layers["experts.gate_up_proj"] == layers["experts.down_proj"]
    assert layers["experts.down_proj"] == "its 24 input features are no multiple of 16"
    assert nvfp4.BLOCK == 16 and mxfp8.BLOCK == 32


def test_the_scheme_is_in_the_pipeline_by_its_name():
    names = [p.name for p in list_passes("decoder", "nvfp4_mxfp8")]
    assert "nvfp4_mxfp8" in names and "quantize_activations" not in names
    assert "nvfp4_mxfp8" in [p.name for p in list_passes("decoder", "none", stored="nvfp4_mxfp8")]
    assert "nvfp4_mxfp8" not in [p.name for p in list_passes("decoder", "none")]


def test_projections_take_the_epilogues_of_dense_ones(standard_decoder):
    graph = standard_decoder(layers=2)
    context = PassContext(quantization="nvfp4_mxfp8")
    passes = [whole_graph("quantize", "passes.quant", "nvfp4_mxfp8")]
    passes += [whole_graph("fuse", "passes.fusion", "merge_linears")]
    passes += [rule_file("fuse", "passes.fusion", name) for name in ("linear_swiglu", "linear_residual")]
    run_passes(graph, passes, context, make_inputs=make_decoder_inputs)
    calls = graph.graph.find_nodes(op="call_function", target=MM.linear_mxfp8.default)
    epilogues = [(n.args[5] if len(n.args) > 5 else n.kwargs.get("activation", "none")) for n in calls]
    assert epilogues.count("swiglu") == 2
    residuals = [(n.args[4] if len(n.args) > 4 else n.kwargs.get("residual")) for n in calls]
    assert sum(r is not None for r in residuals) == 4


def test_a_cpu_decodes_projections_once_at_load(standard_decoder):
    graph = standard_decoder(layers=1)
    quantize(graph)
    inputs = list(make_decoder_inputs(graph, seed=0).values())
    before = graph(*inputs)
    prepare_for_host(graph)
    counts = count_operations(graph)
    assert "mm.linear_mxfp8" not in counts and counts["mm.mxfp8_dequantize"] == 7
    torch.testing.assert_close(graph(*inputs), before, rtol=1e-5, atol=1e-5)
