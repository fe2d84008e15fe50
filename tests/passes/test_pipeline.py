"""The whole pipeline on standardised decoders: operation counts, certificates, decode copy, equal layers."""

import pytest
import torch

from mmcompile.core.passes import PassContext
from mmcompile.core.runner import copy_graph, count_operations, run_passes
from mmcompile.core.sample_inputs import make_decode_inputs, make_decoder_inputs
from mmcompile.passes.pipeline import list_decode_passes, list_passes


def lower(graph, quantization="none", verify=True, **options):
    context = PassContext(cache_dtype="auto", page_size=4, quantization=quantization, quantization_options=options)
    make_inputs = make_decoder_inputs if verify else None
    return run_passes(graph, list_passes("decoder", quantization), context, make_inputs=make_inputs)


def expected_operations(layers, linear="mm.linear", head="mm.linear"):
    """Eight launches a layer: norm, QKV, QK, attention, output, norm, gate/up, down; views cost nothing.

    The first norm follows the embedding and the last one the gather; all others take the sum before them.
    """
    sums = 2 * layers - 1
    counts = {
        "mm.embedding": 1, "mm.gather_last": 1, "mm.sample": 1, "mm.rms_norm": 2, "mm.add_rms_norm": sums,
        "getitem": 2 * sums,
        "mm.qk_norm_rope_insert": layers, "mm.paged_attention": layers, "aten.reshape.default": layers,
    }  # fmt: skip
    counts[linear] = 4 * layers
    counts[head] = counts.get(head, 0) + 1
    return counts


@pytest.mark.parametrize(
    ("dtype", "qk_norm", "bias"),
    [
        (torch.float32, False, False),
        (torch.float32, True, False),
        (torch.float32, False, True),
        (torch.bfloat16, True, True),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_full_pipeline(standard_decoder, dtype, qk_norm, bias, quantization):
    graph = standard_decoder(dtype=dtype, qk_norm=qk_norm, bias=bias)
    reports = lower(graph, quantization)
    linear = "mm.linear" if quantization == "none" else "mm.linear_nvfp4"
    assert count_operations(graph) == expected_operations(2, linear)
    assert all(r.certificate is not None for r in reports if r.result.matches)
    kinds = {r.name: r.certificate.kind for r in reports if r.certificate is not None}
    assert kinds["gather_last_token"] == "last_token" and kinds["fold_constants"] == "bitwise"
    assert (kinds.get("nvfp4") == "quantizing") == (quantization == "nvfp4")


@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_decode_copy_equals_the_prefill_graph(standard_decoder, quantization):
    """One token for each of three sequences of different lengths, inputs by hand, both graphs."""
    prefill = standard_decoder(qk_norm=True)
    lower(prefill, quantization, verify=False)
    decode = copy_graph(prefill)
    reports = run_passes(decode, list_decode_passes(), PassContext(), make_inputs=make_decode_inputs)
    assert all(r.certificate is not None for r in reports if r.result.matches)
    lengths = torch.tensor([4, 9, 1], dtype=torch.int32)
    table = torch.tensor([[5, -1, -1], [2, 7, 0], [4, -1, -1]], dtype=torch.int32)
    slots = torch.tensor([5 * 4 + 3, 0 * 4 + 0, 4 * 4 + 0])
    caches = [torch.randn(8, 2, 4, 32, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    sampling = [torch.zeros(3), torch.zeros(3).int(), torch.ones(3), torch.zeros(3).long(), lengths]
    results = []
    for graph in (prefill, decode):
        own = [c.clone() for c in caches]
        ids = torch.tensor([3, 1, 4], dtype=torch.int32)
        tokens = [ids, lengths - 1, slots, table, lengths, torch.arange(4, dtype=torch.int32)]
        with torch.no_grad():
            logits, chosen = graph(*tokens, *own, *sampling)
        assert all(int((c != o).flatten(1).any(1).sum()) == 3 for c, o in zip(caches, own, strict=True))
        results.append([logits, chosen, *own])
    for want, have in zip(*results, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_many_layers_behave_like_two(standard_decoder):
    graph = standard_decoder(layers=30, hidden=32, heads=2, kv_heads=1, inter=32)
    reports = lower(graph, verify=False)
    assert count_operations(graph) == expected_operations(30)
    assert {r.name: len(r.result.matches) for r in reports if r.phase == "fuse"} == {
        "merge_linears": 60, "qk_norm_rope_insert": 30, "linear_swiglu": 30, "add_rms_norm": 59, "linear_residual": 1,
    }  # fmt: skip


def test_folded_parameters_have_their_own_names(standard_decoder):
    graph = standard_decoder(layers=2)
    lower(graph, "nvfp4", lm_head=True)
    names = [str(n.target) for n in graph.graph.find_nodes(op="get_attr")]
    assert len(names) == len(set(names)) and set(names) == {n for n, _ in graph.named_parameters()} | {
        n for n, _ in graph.named_buffers()
    }
    assert "layers.1.q_k_v_packed" in names and "layers.0.gate_up_global_scale" in names
