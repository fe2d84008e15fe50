"""Every mm:: operation: the reference against a float64 formulation, fake against real, mutation annotations."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.core.errors import UsageError
from mmcompile.core.formats import mxfp8, nvfp4
from mmcompile.core.ops.define import OPS, define_op, find_op, get_op

MM = torch.ops.mm
CHECKS = ("test_schema", "test_faketensor")
WRITTEN = {"insert_index": {"index_cache"}}
WRITTEN |= {f"{name}_norm_rope_insert_index{weights}": {"kv_cache", "index_cache"}
            for name in ("qk", "qkv") for weights in ("", "_nvfp4", "_mxfp8")}  # fmt: skip


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles_table(positions=32, rotary=8):
    angles = torch.outer(torch.arange(positions).float(), 100.0 ** (-torch.arange(0, rotary, 2).float() / rotary))
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def quantized(rows=12, columns=32, seed=5):
    packed, scale, global_scale = nvfp4.encode(noise(rows, columns, seed=seed))
    return packed, scale, global_scale.expand(rows).contiguous()


def quantized_experts(experts, rows, columns):
    return MM.nvfp4_quantize_experts(noise(experts, rows, columns, seed=5))


def arguments_of_quantized(x, w):
    """Arguments of the operations on quantized weights and activations, by name."""
    return {
        "linear_nvfp4": (x, *quantized(), noise(12), noise(6, 12), "none"),
        "linear_w4a4": (*nvfp4.encode_rows(x), *quantized(), torch.float32, noise(12), noise(6, 12), "none"),
        "linear_mxfp8": (x, *mxfp8.encode(w), noise(12), noise(6, 12), "none"),
        "mxfp8_quantize": (w, "ocp"),
        "mxfp8_dequantize": (*mxfp8.encode(w), torch.bfloat16),
        "nvfp4_quantize": (w, "search"),
        "nvfp4_quantize_activations": (x,),
        "nvfp4_dequantize": (*quantized(), torch.bfloat16),
        "nvfp4_quantize_experts": (noise(3, 4, 32), "max6"),
        "nvfp4_dequantize_experts": (*quantized_experts(3, 4, 32), torch.bfloat16),
    }


def arguments_of(name):
    """Arguments of one call of every operation, for the checks that all of them must pass."""
    x, w, eps = noise(6, 32), noise(12, 32, seed=1), 1e-5
    q, k, v = noise(6, 4, 16), noise(6, 2, 16, seed=1), noise(6, 2, 16, seed=2)
    positions, table = torch.arange(6, dtype=torch.int32), angles_table(rotary=16)
    cache, slots = torch.zeros(4, 2, 4, 32), torch.tensor([0, 1, 2, 9, -1, 13])
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    heads = (noise(16), noise(16), positions, table, cache, slots, 4, 2, 16, eps, 0.0, True)
    caches = cache, torch.zeros(4, 4, 16), slots
    index_heads = (*(noise(16, seed=i) for i in range(4)), positions, table, *caches, 4, 2, 3, 16, eps, 1.0, False)
    plain, wide = ("linear", "linear"), noise(128, 32, seed=3)
    batch = torch.tensor([0.0, 0.7, 1.3])
    return {
        "embedding": (torch.tensor([3, 1]), w),
        "linear": (x, w, noise(12), noise(6, 6), "swiglu"),
        **arguments_of_quantized(x, w),
        "rms_norm": (x, noise(32), eps, 1.0, False),
        "add_rms_norm": (x, noise(6, 32, seed=4), noise(32), eps, 0.0, True),
        "swiglu": (noise(6, 64)[:, :32], noise(6, 64)[:, 32:]),
        "rope": (q, positions, angles_table()),
        "attention": (q, k, v, 0.25, 3),
        "insert_kv": (k, v, cache, slots, "linear"),
        "paged_attention": (
            q, noise(4, 2, 4, 32), torch.tensor([[2, 0], [1, 3]]), torch.tensor([7, 4]), starts, 0.25, 0, "linear",
        ),
        "gather_last": (x, starts),
        "index_score": (q, k[:, 0], 4),
        "insert_index": (noise(6, 16), torch.zeros(4, 4, 16), slots, "linear"),
        "paged_index_score": (
            q, noise(4, 4, 16), torch.tensor([[2, 0], [1, 3]]), torch.tensor([7, 4]), starts, "linear",
        ),
        "block_top_k": (noise(6, 2, 3), positions, 2, 2, 1, 1),
        "block_sparse_attention": (q, k, v, torch.tensor([[[0, 1], [1, -1]]] * 6), 0.25, 3),
        "paged_block_sparse_attention": (
            q, noise(4, 2, 4, 32), torch.tensor([[[0, 1]]] * 6), torch.tensor([[2, 0], [1, 3]]), torch.tensor([7, 4]),
            starts, 0.25, "linear",
        ),
        "swiglu_oai": (noise(6, 64)[:, :32] * 8, noise(6, 64)[:, 32:], 1.702, 7.0),
        "route_top_k": (noise(6, 5), noise(5, seed=1), 2, 2.0, "softmax", True),
        "moe": (
            x, torch.tensor([[0, 2], [1, -1]] * 3), noise(6, 2), noise(3, 16, 32), noise(3, 32, 8), x, "swiglu_oai",
            1.702, 7.0,
        ),
        "moe_nvfp4": (
            x, torch.tensor([[0, 2], [1, -1]] * 3), noise(6, 2), *quantized_experts(3, 32, 32),
            *quantized_experts(3, 32, 16), x, "swiglu_oai", 1.702, 7.0,
        ),
        "qk_norm_rope_insert": (noise(6, 128), *heads, "linear"),
        "qkv_norm_rope_insert": (x, wide, noise(128), *heads, None, "linear"),
        "qkv_norm_rope_insert_nvfp4": (x, *quantized(128), None, *heads, None, "linear"),
        "qkv_norm_rope_insert_mxfp8": (x, *mxfp8.encode(wide), noise(128), *heads, noise(6, 128, seed=4), "linear"),
        "qk_norm_rope_insert_index": (noise(6, 192), *index_heads, *plain),
        "qkv_norm_rope_insert_index": (x, noise(192, 32), None, *index_heads, noise(6, 192, seed=4), *plain),
        "qkv_norm_rope_insert_index_nvfp4": (x, *quantized(192), None, *index_heads, None, *plain),
        "qkv_norm_rope_insert_index_mxfp8": (x, *mxfp8.encode(noise(192, 32)), noise(192), *index_heads, None, *plain),
        "sample": (noise(3, 20), batch, torch.tensor([0, 3, 0]), torch.tensor([1.0, 1.0, 0.6]),
                   torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", sorted(OPS))
def test_fake_and_schema_agree_with_the_reference(name):
    arguments = arguments_of(name)
    has_fp8 = any(isinstance(a, torch.Tensor) and a.dtype == torch.float8_e4m3fn for a in arguments)
    checks = CHECKS[1:] if has_fp8 else CHECKS  # torch's schema check multiplies every input, which fp8 cannot
    torch.library.opcheck(OPS[name].handle, arguments, test_utils=checks)


@pytest.mark.parametrize("name", sorted(OPS))
def test_mutation_is_annotated(name):
    op = OPS[name]
    written = {a.name for a in op.handle._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert written == set(op.mutates) == WRITTEN.get(name, {"kv_cache"} if "insert" in name else set())
    arguments = arguments_of(name)
    before = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    op.handle(*arguments)
    for parameter, old, new in zip(op.parameters, before, arguments, strict=True):
        if isinstance(old, torch.Tensor):
            assert torch.equal(old, new) == (parameter not in op.mutates), parameter


@pytest.mark.parametrize("name", [n for n, op in sorted(OPS.items()) if op.row_wise])
def test_row_wise_commutes_with_picking_rows(name):
    rows, arguments = torch.tensor([1, 0]), list(arguments_of(name))
    count = arguments[0].shape[0]
    varying = [i for i, p in enumerate(OPS[name].parameters) if p in ("x", "ids", "residual", "gate", "up")]
    whole = OPS[name].reference(*arguments)
    for i in varying:
        assert arguments[i].shape[0] == count
        arguments[i] = arguments[i][rows]
    picked = OPS[name].reference(*arguments)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (whole, picked)), strict=True):
        torch.testing.assert_close(a[rows], b)


def test_registry():
    assert get_op("rms_norm") is OPS["rms_norm"] is find_op(MM.rms_norm.default)
    assert find_op(torch.ops.aten.add.Tensor) is None
    with pytest.raises(UsageError, match="did you mean 'rms_norm'"):
        get_op("rms_nrom")
    with pytest.raises(AssertionError, match="twice"):
        define_op(fake=lambda x: x)(OPS["swiglu"].reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype, offset):
    x, weight = noise(5, 24, dtype=dtype) * 3, noise(24, seed=1, dtype=dtype)
    wide = x.double()
    normed = wide / (wide.pow(2).sum(-1, keepdim=True) / 24 + 1e-3).sqrt()
    want = normed * (offset + weight.double())
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for early in (True, False):
        have = MM.rms_norm(x, weight, 1e-3, offset, early)
        assert have.dtype == dtype
        torch.testing.assert_close(have.double(), want, rtol=tolerance, atol=tolerance)


def test_rms_norm_rounds_where_it_says():
    x, weight = noise(64, 32, dtype=torch.bfloat16), noise(32, seed=1, dtype=torch.bfloat16)
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    llama, gemma = MM.rms_norm(x, weight, 1e-6, 0.0, True), MM.rms_norm(x, weight, 1e-6, 0.0, False)
    assert torch.equal(llama, normed.bfloat16() * weight)
    assert torch.equal(gemma, (normed * weight.float()).bfloat16())
    assert not torch.equal(llama, gemma)


def test_add_rms_norm_is_the_norm_of_the_rounded_sum():
    x, residual, weight = (noise(4, 32, seed=i, dtype=torch.bfloat16) for i in range(3))
    normed, total = MM.add_rms_norm(x, residual, weight[0], 1e-5, 1.0, False)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, MM.rms_norm(x + residual, weight[0], 1e-5, 1.0, False))


def test_swiglu_gates_the_first_argument():
    gate, up = noise(5, 8), noise(5, 8, seed=1)
    want = gate.double() / (1 + (-gate.double()).exp()) * up.double()
    torch.testing.assert_close(MM.swiglu(gate, up).double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_linear_epilogue_order(activation):
    x, weight, bias = noise(5, 32), noise(12, 32, seed=1), noise(12, seed=2)
    residual = noise(5, 6 if activation == "swiglu" else 12, seed=3)
    wide = torch.einsum("mk,nk->mn", x.double(), weight.double()) + bias.double()
    if activation == "swiglu":
        gate, up = wide[:, :6], wide[:, 6:]
        wide = gate * torch.sigmoid(gate) * up
    have = MM.linear(x, weight, bias, residual, activation)
    torch.testing.assert_close(have.double(), wide + residual.double(), rtol=1e-5, atol=1e-5)


def test_linear_refuses_an_unknown_activation():
    with torch._subclasses.FakeTensorMode() as mode, pytest.raises(ValueError, match="activation must be one of"):
        MM.linear(mode.from_tensor(noise(2, 4)), mode.from_tensor(noise(4, 4)), None, None, "gelu")


def test_linear_nvfp4_is_a_linear_with_the_decoded_weight():
    x, (packed, scale, _) = noise(5, 32), quantized()
    global_scale = torch.linspace(0.1, 2.0, 12)  # rows of merged layers carry their own
    codes = nvfp4.decode_e2m1(nvfp4.unpack_codes(packed)).double()
    weight = codes * scale.double().repeat_interleave(16, dim=1) * global_scale.double()[:, None]
    want = x.double() @ weight.T
    torch.testing.assert_close(MM.linear_nvfp4(x, packed, scale, global_scale).double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(MM.nvfp4_dequantize(packed, scale, global_scale, torch.float32).double(), weight)


def test_nvfp4_quantize_round_trip():
    weight = noise(12, 32)
    decoded = MM.nvfp4_dequantize(*MM.nvfp4_quantize(weight), torch.float32)
    error = (decoded - weight).norm() / weight.norm()
    assert 0 < error < 0.15
    packed, scale, global_scale = MM.nvfp4_quantize(decoded, "max6")
    assert torch.equal(MM.nvfp4_dequantize(packed, scale, global_scale, torch.float32), decoded)


@pytest.mark.parametrize("rotary", [8, 16])
def test_rope_rotates_pairs_and_passes_the_rest(rotary):
    x, positions, table = noise(5, 3, 16), torch.tensor([0, 7, 3, 3, 31]), angles_table(32, rotary)
    want, half = x.double().clone(), rotary // 2
    for t, position in enumerate(positions.tolist()):
        for i in range(half):
            angle = position * 100.0 ** (-2 * i / rotary)
            a, b = x[t, :, i].double(), x[t, :, i + half].double()
            want[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            want[t, :, i + half] = b * math.cos(angle) + a * math.sin(angle)
    have = MM.rope(x, positions, table)
    torch.testing.assert_close(have.double(), want, rtol=1e-4, atol=1e-5)
    assert torch.equal(have[..., rotary:], x[..., rotary:])
    assert torch.equal(have[0], x[0])  # position 0 turns nothing


def dense_attention(q, k, v, scale, window, first):
    """One sequence in float64, token by token; query t stands at position first + t."""
    out, group = torch.empty(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64), q.shape[1] // k.shape[1]
    for t in range(q.shape[0]):
        last = first + t
        begin = max(0, last - window + 1) if window else 0
        for h in range(q.shape[1]):
            keys, values = k[begin : last + 1, h // group].double(), v[begin : last + 1, h // group].double()
            out[t, h] = torch.softmax(keys @ q[t, h].double() * scale, 0) @ values
    return out


@pytest.mark.parametrize("window", [0, 1, 3, 50])
def test_attention(window):
    q, k, v = noise(7, 4, 8), noise(7, 2, 8, seed=1), noise(7, 2, 8, seed=2)
    have = MM.attention(q, k, v, 0.3, window)
    torch.testing.assert_close(have.double(), dense_attention(q, k, v, 0.3, window, 0), rtol=1e-5, atol=1e-5)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=4),
    page_size=st.integers(1, 5), window=st.sampled_from([0, 1, 4]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_paged_attention_is_dense_attention_over_permuted_pages(lengths, page_size, window, seed):
    """Several sequences of (old, new) tokens; pages in random order, other pages hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    totals = [old + new for old, new in lengths]
    blocks = max(1, *(-(-t // page_size) for t in totals))
    table = torch.randperm(len(lengths) * blocks + 2, generator=generator)[: len(lengths) * blocks]
    table = table.reshape(len(lengths), blocks).int()
    cache = torch.full((len(lengths) * blocks + 2, 2, page_size, 16), torch.nan)
    q, want = noise(sum(new for _, new in lengths), 4, 8, seed=seed), []
    begin = 0
    for b, (old, new) in enumerate(lengths):
        k, v = noise(old + new, 2, 8, seed=seed + 2 * b + 1), noise(old + new, 2, 8, seed=seed + 2 * b + 2)
        place = torch.arange(old + new)
        MM.insert_kv(k, v, cache, table[b, place // page_size].long() * page_size + place % page_size)
        want.append(dense_attention(q[begin : begin + new], k, v, 0.5, window, old))
        begin += new
    starts = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).int()
    have = MM.paged_attention(q, cache, table, torch.tensor(totals).int(), starts, 0.5, window)
    torch.testing.assert_close(have.double(), torch.cat(want), rtol=1e-5, atol=1e-5)


def test_paged_attention_of_an_empty_sequence_is_zero():
    q, cache = noise(2, 4, 8), noise(3, 2, 4, 16)
    starts, lengths = torch.tensor([0, 1, 2]).int(), torch.tensor([0, 3]).int()
    have = MM.paged_attention(q, cache, torch.tensor([[0], [1]]).int(), lengths, starts, 1.0, 0)
    assert torch.equal(have[0], torch.zeros(4, 8))
    assert have[1].abs().sum() > 0


def test_insert_kv_skips_negative_slots_and_keeps_the_rest():
    k, v, cache = noise(3, 2, 4), noise(3, 2, 4, seed=1), torch.full((3, 2, 4, 8), 7.0)
    MM.insert_kv(k, v, cache, torch.tensor([6, -1, 11]))
    assert torch.equal(cache[1, :, 2], torch.cat([k[0], v[0]], -1))
    assert torch.equal(cache[2, :, 3], torch.cat([k[2], v[2]], -1))
    assert int((cache != 7.0).sum()) == 2 * 2 * 8


def test_insert_kv_saturates_fp8():
    k = torch.tensor([1000.0, -1000.0, 448.0, 1.06]).reshape(1, 1, 4)
    cache = torch.zeros(1, 1, 1, 8, dtype=torch.float8_e4m3fn)
    MM.insert_kv(k.bfloat16(), k.bfloat16(), cache, torch.tensor([0]))
    assert cache.float().flatten().tolist() == [448.0, -448.0, 448.0, 1.0] * 2


def test_gather_last():
    x = noise(6, 2, 3)
    assert torch.equal(MM.gather_last(x, torch.tensor([0, 1, 4, 6]).int()), x[[0, 3, 5]])


@pytest.mark.parametrize("norm", [True, False])
def test_fused_projection_steps_equal_their_parts(norm):
    x, weight, bias, positions, table = noise(6, 32), noise(128, 32), noise(128), torch.arange(6), angles_table()
    q_weight, k_weight = (noise(16), noise(16, seed=9)) if norm else (None, None)
    slots, caches = torch.tensor([0, 5, 1, -1, 7, 2]), [torch.zeros(2, 2, 4, 32) for _ in range(3)]
    rest = (slots, 4, 2, 16, 1e-4, 1.0, False)
    q, k, v = torch.split(MM.linear(x, weight, bias), [64, 32, 32], dim=-1)
    q, k, v = q.reshape(6, 4, 16), k.reshape(6, 2, 16), v.reshape(6, 2, 16)
    if norm:
        q, k = MM.rms_norm(q, q_weight, 1e-4, 1.0, False), MM.rms_norm(k, k_weight, 1e-4, 1.0, False)
    MM.insert_kv(MM.rope(k, positions, table), v, caches[0], slots)
    norms = (q_weight, k_weight, positions, table)
    qkv = MM.qk_norm_rope_insert(MM.linear(x, weight, bias), *norms, caches[1], *rest)
    fused = MM.qkv_norm_rope_insert(x, weight, bias, *norms, caches[2], *rest)
    assert torch.equal(qkv, MM.rope(q, positions, table))
    assert torch.equal(fused, qkv)
    assert torch.equal(caches[0], caches[1]) and torch.equal(caches[0], caches[2])


def test_fused_steps_with_an_indexer_equal_their_parts():
    x, weight, positions, table = noise(6, 32), noise(192, 32), torch.arange(6), angles_table()
    weights, delta, norm = [noise(16, seed=i) for i in range(4)], noise(6, 192, seed=9), (1e-4, 1.0, False)
    slots = torch.tensor([0, 5, 1, -1, 7, 2])
    caches, index_caches = ([torch.zeros(*shape) for _ in range(3)] for shape in ((2, 2, 4, 32), (2, 4, 16)))
    parts = torch.split(MM.linear(x, weight) + delta, [64, 32, 32, 48, 16], dim=-1)
    q, k, v, index_q, index_k = (part.reshape(6, -1, 16) for part in parts)
    q, k, index_q, index_k = (
        MM.rope(MM.rms_norm(part, w, *norm), positions, table)
        for part, w in zip((q, k, index_q, index_k), weights, strict=True)
    )
    MM.insert_kv(k, v, caches[0], slots)
    MM.insert_index(index_k[:, 0], index_caches[0], slots)
    for i, (op, first) in enumerate(
        ((MM.qk_norm_rope_insert_index, (MM.linear(x, weight) + delta,)),
         (MM.qkv_norm_rope_insert_index, (x, weight, None))), 1
    ):  # fmt: skip
        more = () if i == 1 else (delta,)
        given = (*weights, positions, table, caches[i], index_caches[i], slots, 4, 2, 3, 16, *norm, *more)
        have_q, have_index_q = op(*first, *given)
        assert torch.equal(have_q, q) and torch.equal(have_index_q, index_q)
        assert torch.equal(caches[i], caches[0]) and torch.equal(index_caches[i], index_caches[0])
    assert caches[0].abs().sum() > 0 and index_caches[0][1, 3].abs().sum() > 0 and not index_caches[0][0, 3].any()
