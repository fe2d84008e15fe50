"""W4A4: the inputs of NVFP4 layers are quantized on request, once where layers share them."""

import pytest
import torch

from mmcompile.core.errors import UsageError
from mmcompile.core.passes import PassContext
from mmcompile.core.runner import count_operations, run_passes
from mmcompile.core.sample_inputs import make_decoder_inputs
from mmcompile.passes.pipeline import list_passes, whole_graph


def quantize(graph, **options):
    context = PassContext(quantization="nvfp4", quantization_options=options)
    passes = [
        whole_graph("quantize", "passes.quant", "nvfp4"),
        whole_graph("layout", "passes.layout", "quantize_activations"),
    ]
    return run_passes(graph, passes, context, make_inputs=make_decoder_inputs)[1]


def test_every_layer_on_request_and_shared_inputs_once(standard_decoder):
    graph = standard_decoder(layers=2)
    report = quantize(graph, activations="nvfp4")
    counts = count_operations(graph)
    assert len(report.result.matches) == counts["mm.linear_w4a4"] == 14 and "mm.linear_nvfp4" not in counts
    assert counts["mm.nvfp4_quantize_activations"] == 8  # q, k, v share; gate and up share; o; down
    assert report.certificate.kind == "quantizing" and report.certificate.snr_db > 8
    assert all(m.source for m in report.result.matches)


def test_nothing_without_the_option(standard_decoder):
    graph = standard_decoder(layers=1)
    assert not quantize(graph).result.matches
    assert count_operations(graph)["mm.linear_nvfp4"] == 7


def test_another_format_is_refused(standard_decoder):
    with pytest.raises(UsageError, match="activations of nvfp4 cannot be 'fp8'"):
        quantize(standard_decoder(layers=1), activations="fp8")


def test_only_the_nvfp4_scheme_has_the_pass():
    names = [p.name for p in list_passes("decoder", "nvfp4")]
    assert names.index("quantize_activations") < names.index("fold_constants")
    assert "quantize_activations" not in [p.name for p in list_passes("decoder", "none")]


def test_tokens_do_not_depend_on_each_other():
    x = torch.randn(3, 32)
    whole = torch.ops.mm.nvfp4_quantize_activations(x)
    one = torch.ops.mm.nvfp4_quantize_activations(x[1:2])
    assert all(torch.equal(a[1:2].view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, one, strict=True))
