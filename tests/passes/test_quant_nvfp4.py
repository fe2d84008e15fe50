"""NVFP4 quantization: which layers, why not the others, options, weights stored in the checkpoint."""

import pytest
import torch

from mmcompile.core.errors import UsageError
from mmcompile.core.formats import nvfp4
from mmcompile.core.graph import get_parameter
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import count_operations, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.passes.pipeline import whole_graph

MM = torch.ops.mm
LAYER = ("q", "k", "v", "o", "gate", "up", "down")


def quantize(graph, fold=False, verify=True, scheme="nvfp4", stored=None, **options):
    context = PassContext(quantization=scheme, quantization_options=options, checkpoint_nvfp4=stored or {})
    passes = [whole_graph("quantize", "passes.quant", "nvfp4")]
    passes += [whole_graph("layout", "passes.layout", "fold_constants")] if fold else []
    reports = run_passes(graph, passes, context, make_inputs=make_decoder_inputs if verify else None)
    return reports, context.info["layers"]


def test_all_layers_but_head_and_embedding(standard_decoder):
    graph = standard_decoder(layers=2)
    (report,), layers = quantize(graph)
    quantized = {f"layers.{i}.{name}" for i in range(2) for name in LAYER}
    assert {name for name, outcome in layers.items() if outcome == "nvfp4"} == quantized
    assert "lm_head=true" in layers["head"] and "embedding" in layers["embed"]
    assert len(layers) == len(quantized) + 2
    assert len(report.result.matches) == 14
    assert sorted(report.result.notes) == sorted(f"{n}: {layers[n]}" for n in ("head", "embed"))
    assert count_operations(graph)["mm.linear"] == 1
    assert report.certificate.kind == "quantizing" and report.certificate.snr_db > 8
    assert all(m.source for m in report.result.matches)


def test_lm_head_option(standard_decoder):
    graph = standard_decoder(layers=1)
    reports, layers = quantize(graph, fold=True, lm_head=True)
    assert layers["head"] == "nvfp4"
    assert "mm.linear" not in count_operations(graph)
    assert reports[1].certificate.max_error == 0.0


def test_head_under_a_soft_cap_is_still_the_head(standard_decoder):
    graph = standard_decoder(layers=1)
    (output,) = graph.graph.find_nodes(op="output")
    (value,) = output.all_input_nodes
    with graph.graph.inserting_before(output):
        cap = graph.graph.call_function(torch.ops.aten.tanh.default, (value,))
    cap.meta["val"] = value.meta["val"]
    output.replace_input_with(value, cap)
    graph.recompile()
    _, layers = quantize(graph)
    assert "output projection" in layers["head"]


def test_exclude(standard_decoder):
    graph = standard_decoder(layers=2)
    _, layers = quantize(graph, exclude=("layers.0.*", "*.down"))
    assert {n for n, outcome in layers.items() if outcome == "excluded by option"} == {
        *(f"layers.0.{n}" for n in LAYER), "layers.1.down",
    }  # fmt: skip


def test_exclude_that_fits_nothing(standard_decoder):
    with pytest.raises(UsageError, match="unknown layer to exclude 'layers.7.q'"):
        quantize(standard_decoder(layers=1), exclude=("layers.7.q",))


def test_unknown_option(standard_decoder):
    with pytest.raises(UsageError, match="unknown option of nvfp4 'lmhead'; did you mean 'lm_head'"):
        quantize(standard_decoder(layers=1), lmhead=True)


@pytest.mark.parametrize(("name", "value"), [("method", "max5"), ("lm_head", "perhaps"), ("exclude", 3)])
def test_wrong_value(standard_decoder, name, value):
    with pytest.raises(UsageError, match=f"the option {name} of nvfp4 cannot be {value!r}"):
        quantize(standard_decoder(layers=1), **{name: value})


def test_text_values_of_the_command_line(standard_decoder):
    _, layers = quantize(standard_decoder(layers=1), lm_head="true", method="search")
    assert layers["head"] == "nvfp4"


def test_odd_widths_stay(standard_decoder):
    _, layers = quantize(standard_decoder(layers=1, inter=72))
    assert layers["layers.0.down"] == "its 72 input features are no multiple of 16"
    assert layers["layers.0.up"] == "nvfp4"


def test_folded_weights_are_the_encoding(standard_decoder):
    graph = standard_decoder(layers=1)
    weight = get_parameter(graph, "layers.0.o").clone()
    quantize(graph, fold=True, method="search")
    want = nvfp4.encode(weight, method="search")
    nodes = list(graph.graph.find_nodes(op="call_function", target=MM.linear_nvfp4.default))
    held = [[get_parameter(graph, str(a.target)) for a in node.args[1:4]] for node in nodes]
    matches = [h for h in held if torch.equal(h[0], want[0])]
    assert len(matches) == 1
    assert torch.equal(matches[0][1].float(), want[1].float())
    assert torch.equal(matches[0][2], want[2].expand(64))
    assert "layers.0.o" not in dict(graph.named_parameters())


def stored_weight(graph, name, seed=3):
    """An encoding that quantizing the graph's weight would not give."""
    rows, columns = get_parameter(graph, name).shape
    packed, scale, global_scale = nvfp4.encode(
        torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    )
    return packed, scale, global_scale.expand(rows).contiguous()


@pytest.mark.parametrize("scheme", ["nvfp4", "none"])
def test_checkpoint_weights_are_taken_verbatim(standard_decoder, scheme):
    graph = standard_decoder(layers=1)
    stored = {"layers.0.up": stored_weight(graph, "layers.0.up"), "head": stored_weight(graph, "head")}
    _, layers = quantize(graph, verify=False, scheme=scheme, stored=stored)
    assert layers["head"] == layers["layers.0.up"] == "nvfp4"  # the checkpoint decides, not lm_head
    for name, parts in stored.items():
        for suffix, tensor in zip(("packed", "scale", "global_scale"), parts, strict=True):
            held = get_parameter(graph, f"{name}_{suffix}")
            assert held.dtype == tensor.dtype and torch.equal(held.view(torch.uint8), tensor.view(torch.uint8))
    if scheme == "none":
        assert "no quantization was asked for" in layers["layers.0.q"]
        assert count_operations(graph)["mm.linear_nvfp4"] == 2


def test_an_excluded_layer_stays_decoded_even_if_stored(standard_decoder):
    graph = standard_decoder(layers=1)
    stored = {"layers.0.up": stored_weight(graph, "layers.0.up")}
    _, layers = quantize(graph, verify=False, stored=stored, exclude=("layers.0.up",))
    assert layers["layers.0.up"] == "excluded by option"
