"""MiniMax-M3 and M3.1-Flash: equal to transformers on random weights, whole, paged and step by step; configs."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import mmcompile.core.ops  # noqa: F401
from mmcompile.core.errors import UsageError
from mmcompile.models import minimax_m3
from mmcompile.models.minimax_m3 import MODELS, slice_layers

transformers = pytest.importorskip("transformers")
MM = torch.ops.mm
M3, FLASH = "minimax-m3-tiny", "minimax-m3.1-flash-tiny"
BLOCK, HORIZON = 16, 48  # tokens a block, and tokens up to which every block is chosen, of the tiny configs
TOLERANCE = {"rtol": 2e-4, "atol": 2e-4}


@cache
def make_model(name: str, **changes) -> torch.nn.Module:
    """The model with random values in every parameter, norms and router bias included, logits of about unit size."""
    torch.manual_seed(3)
    model = minimax_m3.build(replace(MODELS[name], **changes)).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        fan_in = parameter.shape[-1] if parameter.dim() > 1 else 25
        parameter.copy_(torch.randn(parameter.shape) * (2.0 if "index" in key else 1.0) / fan_in**0.5)
    return model


def draw_ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 512, (tokens,), generator=torch.Generator().manual_seed(seed))


def rename_for_transformers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of transformers' modules, with gate and up of dense layers in one matrix."""
    named = {}
    for name, value in weights.items():
        if name.endswith(".gate_proj.weight"):
            up = weights[name.replace("gate_proj", "up_proj")]
            named[name.replace("gate_proj", "gate_up_proj")] = torch.cat([value, up])
        elif not name.endswith(".up_proj.weight"):
            name = name.replace(".index_", ".indexer.")
            named[name.replace("mlp.e_score", "mlp.gate.e_score")] = value
    return named


@cache
def make_transformers(name: str, attention: str) -> torch.nn.Module:
    """transformers' MiniMaxM3VLForCausalLM from fields named as in a released config.json, weights of make_model."""
    c = MODELS[name]
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=c.intermediate_size,
        dense_intermediate_size=c.dense_intermediate_size, shared_intermediate_size=c.shared_intermediate_size,
        num_hidden_layers=c.num_layers, num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim, max_position_embeddings=c.max_positions, rms_norm_eps=c.rms_norm_eps,
        num_local_experts=c.num_experts, num_experts_per_tok=c.experts_per_token, rotary_dim=c.rotary_dim,
        routed_scaling_factor=c.routed_scaling_factor, swiglu_alpha=c.swiglu_alpha, swiglu_limit=c.swiglu_limit,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta,
                         "partial_rotary_factor": c.rotary_dim / c.head_dim},
        sparse_attention_config={
            "sparse_num_index_heads": c.index_heads, "sparse_index_dim": c.index_head_dim,
            "sparse_block_size": c.block_size, "sparse_topk_blocks": c.top_k_blocks,
            "sparse_local_block": c.local_blocks, "sparse_attention_freq": list(c.sparse_attention_freq),
        },
        moe_layer_freq=list(c.moe_layer_freq), bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config._attn_implementation = attention
    model = transformers.MiniMaxM3VLForCausalLM(config).eval().requires_grad_(False)
    model.load_state_dict(rename_for_transformers(make_model(name).state_dict()), strict=True)
    return model


class Paged:
    """The model of make_model run by mm:: operations over paged caches, one sequence for each list of tokens."""

    def __init__(self, model: torch.nn.Module, sequences: int, blocks: int) -> None:
        self.model, config = model, model.config
        pages = sequences * blocks + 1
        self.table = torch.randperm(pages, generator=torch.Generator().manual_seed(1))[: sequences * blocks]
        self.table = self.table.reshape(sequences, blocks)
        nan = float("nan")
        shape = (pages, config.num_kv_heads, config.block_size, 2 * config.head_dim)
        self.kv = [torch.full(shape, nan) for _ in range(config.num_layers)]
        self.index = [torch.full((pages, BLOCK, config.index_head_dim), nan) for _ in range(config.num_layers)]
        self.lengths = [0] * sequences
        angles = torch.outer(torch.arange(config.max_positions).float(), model.model.rotary)
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def step(self, new: list[torch.Tensor]) -> list[torch.Tensor]:
        """Logits of the new tokens of every sequence, any number each."""
        positions = [torch.arange(n, n + len(ids)) for n, ids in zip(self.lengths, new, strict=True)]
        self.lengths = [n + len(ids) for n, ids in zip(self.lengths, new, strict=True)]
        slots = [t[p // BLOCK] * BLOCK + p % BLOCK for t, p in zip(self.table, positions, strict=True)]
        self.positions, self.slots = torch.cat(positions), torch.cat(slots)
        starts = torch.tensor([0, *[len(ids) for ids in new]]).cumsum(0)
        self.batch = (self.table, torch.tensor(self.lengths), starts)
        x, blocks = self.model.model.embed_tokens(torch.cat(new)), None
        for index, layer in enumerate(self.model.model.layers):
            attended, blocks = self._attend(index, layer.self_attn, self._norm(x, layer.input_layernorm), blocks)
            x = x + attended
            x = x + self._feed(layer.mlp, self._norm(x, layer.post_attention_layernorm))
        logits = MM.linear(self._norm(x, self.model.model.norm), self.model.lm_head.weight)
        return list(logits.split([len(ids) for ids in new]))

    def _norm(self, x, norm):
        return MM.rms_norm(x, norm.weight, norm.eps, 1.0, False)

    def _head(self, x, projection, norm, width):
        rows = MM.linear(x, projection.weight).reshape(x.shape[0], -1, width)
        return MM.rope(self._norm(rows, norm), self.positions, self.cos_sin)

    def _attend(self, index, layer, x, blocks):
        config, kv = self.model.config, self.kv[index]
        q = self._head(x, layer.q_proj, layer.q_norm, config.head_dim)
        k = self._head(x, layer.k_proj, layer.k_norm, config.head_dim)
        v = MM.linear(x, layer.v_proj.weight).reshape(x.shape[0], -1, config.head_dim)
        MM.insert_kv(k, v, kv, self.slots)
        scale = config.head_dim**-0.5
        if not config.sparse_attention_freq[index]:
            out = MM.paged_attention(q, kv, *self.batch, scale)
        else:
            if config.chooses_blocks(index):
                blocks = self._choose(index, layer, x)
            out = MM.paged_block_sparse_attention(q, kv, blocks, *self.batch, scale)
        return MM.linear(out.reshape(x.shape[0], -1), layer.o_proj.weight), blocks

    def _choose(self, index, layer, x):
        config, width = self.model.config, self.model.config.index_head_dim
        q = self._head(x, layer.index_q_proj, layer.index_q_norm, width)
        k = self._head(x, layer.index_k_proj, layer.index_k_norm, width)
        MM.insert_index(k[:, 0], self.index[index], self.slots)
        scores = MM.paged_index_score(q, self.index[index], *self.batch)
        return MM.block_top_k(scores, self.positions, BLOCK, config.top_k_blocks, config.local_blocks, 0)

    def _feed(self, layer, x):
        config = self.model.config
        if not hasattr(layer, "experts"):
            gate, up = MM.linear(x, layer.gate_proj.weight), MM.linear(x, layer.up_proj.weight)
            return MM.linear(MM.swiglu_oai(gate, up, config.swiglu_alpha, config.swiglu_limit), layer.down_proj.weight)
        weights, experts = MM.route_top_k(
            MM.linear(x, layer.gate.weight), layer.e_score_correction_bias, config.experts_per_token,
            config.routed_scaling_factor,
        )  # fmt: skip
        return MM.moe(
            x, experts, weights, layer.experts.gate_up_proj, layer.experts.down_proj,
            self._feed(layer.shared_experts, x), "swiglu_oai", config.swiglu_alpha, config.swiglu_limit,
        )  # fmt: skip


@pytest.mark.parametrize("name", [M3, FLASH])
@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, HORIZON, HORIZON + 1, 100, 129])
def test_equal_to_transformers(name, tokens):
    """Across block borders, below and above the horizon of the chosen blocks."""
    ids, positions = draw_ids(tokens), torch.arange(tokens)
    want = make_transformers(name, "sdpa")(input_ids=ids[None], use_cache=False).logits[0]
    have = make_model(name)(ids, positions)
    torch.testing.assert_close(have, want, **TOLERANCE)
    torch.testing.assert_close(Paged(make_model(name), 1, 9).step([ids])[0], want, **TOLERANCE)
    if tokens == 100:
        eager = make_transformers(name, "eager")(input_ids=ids[None], use_cache=False).logits[0]
        torch.testing.assert_close(have, eager, **TOLERANCE)


@pytest.mark.parametrize("name", [M3, FLASH])
def test_prefill_and_decode_steps_equal_the_whole_sequence(name):
    """Two sequences in one batch; steps of one token, and of up to 8 as a draft's verification takes them."""
    model = make_model(name)
    ids = [draw_ids(130), draw_ids(110, seed=1)]
    want = [model(i, torch.arange(len(i))) for i in ids]
    paged, at = Paged(model, 2, 9), [37, 5]
    have = [[part] for part in paged.step([i[:n] for i, n in zip(ids, at, strict=True)])]
    for step in range(200):
        width = [1, 1, 3, 8, 2][step % 5]
        new = [i[n : n + width] for i, n in zip(ids, at, strict=True)]
        if min(map(len, new)) == 0:
            break
        for parts, part in zip(have, paged.step(new), strict=True):
            parts.append(part)
        at = [n + len(i) for n, i in zip(at, new, strict=True)]
    assert min(at) > 2 * HORIZON and step > 25
    for parts, whole in zip(have, want, strict=True):
        stepped = torch.cat(parts)
        torch.testing.assert_close(stepped, whole[: len(stepped)], **TOLERANCE)


def test_decode_equals_transformers_with_its_cache():
    ids = draw_ids(90)
    theirs, ours = make_transformers(FLASH, "sdpa"), Paged(make_model(FLASH), 1, 6)
    cache_of_theirs = transformers.DynamicCache(config=theirs.config)
    for begin, end in ((0, 30), *((n, n + 1) for n in range(30, 90))):
        want = theirs(input_ids=ids[None, begin:end], past_key_values=cache_of_theirs, use_cache=True).logits[0]
        torch.testing.assert_close(ours.step([ids[begin:end]])[0], want, **TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 8, 17, HORIZON])
def test_sparse_is_dense_to_the_bit_while_every_block_is_chosen(tokens):
    sparse = make_model(FLASH)
    dense = make_model(FLASH, sparse_attention_freq=(0, 0, 0))
    dense.load_state_dict(sparse.state_dict(), strict=False)
    ids = draw_ids(tokens)
    assert torch.equal(Paged(sparse, 1, 9).step([ids])[0], Paged(dense, 1, 9).step([ids])[0])
    torch.testing.assert_close(sparse(ids, torch.arange(tokens)), dense(ids, torch.arange(tokens)), **TOLERANCE)


def test_sparse_is_not_dense_beyond_the_horizon():
    sparse = make_model(FLASH)
    dense = make_model(FLASH, sparse_attention_freq=(0, 0, 0))
    dense.load_state_dict(sparse.state_dict(), strict=False)
    ids = draw_ids(HORIZON + 30)
    difference = sparse(ids, torch.arange(len(ids))) - dense(ids, torch.arange(len(ids)))
    assert float(difference[:HORIZON].abs().max()) < 1e-3 < 1e-2 < float(difference[HORIZON:].abs().max())


@pytest.mark.parametrize("sharing", [{"index_topk_freq": 3}, {"index_topk_pattern": "FSS"}])
def test_layers_share_chosen_blocks(sharing):
    """The first layer chooses, the others take its blocks; their own index projections are not read."""
    model = make_model(FLASH, **sharing)
    ids, positions = draw_ids(100), torch.arange(100)
    have = model(ids, positions)
    torch.testing.assert_close(Paged(model, 1, 9).step([ids])[0], have, **TOLERANCE)
    assert float((make_model(FLASH)(ids, positions) - have).abs().max()) > 1e-2
    kept = model.model.layers[1].self_attn.index_q_proj.weight.clone()
    model.model.layers[1].self_attn.index_q_proj.weight.zero_()
    assert torch.equal(model(ids, positions), have)
    model.model.layers[1].self_attn.index_q_proj.weight.copy_(kept)


def list_choosing(**changes) -> list[int]:
    config = replace(MODELS["minimax-m3"], **changes)
    return [i for i, sparse in enumerate(config.sparse_attention_freq) if sparse and config.chooses_blocks(i)]


def test_sharing_counts_sparse_layers():
    """Ordinals count sparse layers, not layers: M3's first sparse layer is layer 3."""
    assert list_choosing() == list(range(3, 60))
    assert list_choosing(index_topk_freq=4)[:3] == [3, 7, 11]
    assert list_choosing(index_topk_freq=4, index_skip_topk_offset=2)[:5] == [3, 4, 5, 9, 13]
    assert list_choosing(index_topk_pattern="SFS" * 19)[:3] == [3, 4, 7]


def count_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in minimax_m3.build(MODELS[name]).parameters())


def test_real_dimensions():
    m3, flash = MODELS["minimax-m3"], MODELS["minimax-m3.1-flash"]
    assert m3.sparse_attention_freq == m3.moe_layer_freq == (0, 0, 0) + (1,) * 57
    assert flash == replace(m3, sparse_attention_freq=(1,) * 60)
    experts, indexers = 57 * 128 * 3 * 3072 * 6144, 60 * (5 * 128 * 6144 + 2 * 128)
    attention = 60 * (2 * 8192 + 2 * 512) * 6144
    rest = 3 * 3 * 12288 * 6144 + 57 * (3 * 3072 * 6144 + 128 * 6145) + 2 * 200064 * 6144
    norms = 60 * (2 * 6144 + 2 * 128) + 6144
    whole = experts + indexers + attention + rest + norms
    assert 425e9 < whole < 430e9
    assert count_parameters("minimax-m3.1-flash") == whole
    assert count_parameters("minimax-m3") == whole - indexers // 20


def test_defaults_are_those_of_transformers():
    c, theirs = MODELS["minimax-m3"], transformers.MiniMaxM3VLTextConfig()
    pairs = {
        "vocab_size": c.vocab_size, "hidden_size": c.hidden_size, "intermediate_size": c.intermediate_size,
        "dense_intermediate_size": c.dense_intermediate_size, "num_hidden_layers": c.num_layers,
        "shared_intermediate_size": c.shared_intermediate_size, "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads, "head_dim": c.head_dim, "rotary_dim": c.rotary_dim,
        "rms_norm_eps": c.rms_norm_eps, "num_local_experts": c.num_experts, "index_n_heads": c.index_heads,
        "num_experts_per_tok": c.experts_per_token, "routed_scaling_factor": c.routed_scaling_factor,
        "swiglu_alpha": c.swiglu_alpha, "swiglu_limit": c.swiglu_limit, "index_head_dim": c.index_head_dim,
        "index_block_size": c.block_size, "index_topk_blocks": c.top_k_blocks, "index_local_blocks": c.local_blocks,
        "eos_token_id": c.eos_token_ids[0],
    }  # fmt: skip
    assert {name: getattr(theirs, name) for name in pairs} == pairs


def test_slices_keep_the_kinds_of_layers():
    four = slice_layers(replace(MODELS["minimax-m3"], index_topk_pattern="FSS" * 19), 5)
    assert four.sparse_attention_freq == four.moe_layer_freq == (0, 0, 0, 1, 1)
    assert (four.num_layers, four.hidden_size, four.index_topk_pattern) == (5, 6144, "FS")
    assert slice_layers(MODELS["minimax-m3.1-flash"], 4).sparse_attention_freq == (1, 1, 1, 1)
    for layers in (0, 61):
        with pytest.raises(UsageError, match="a slice of"):
            slice_layers(MODELS["minimax-m3"], layers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_dim": 32}, "rotary_dim is 32"),
        ({"rotary_dim": 7}, "must be even"),
        ({"moe_layer_freq": (0, 1)}, "moe_layer_freq has 2 entries for 3 layers"),
        ({"num_kv_heads": 3}, "each must be a multiple of the next"),
        ({"index_heads": 4}, "each must be a multiple of the next"),
        ({"top_k_blocks": 65}, "at most 64"),
        ({"local_blocks": 4}, "it must hold the 4 local"),
        ({"top_k_blocks": 0, "local_blocks": 0}, "top_k_blocks is 0"),
        ({"experts_per_token": 9}, "9 of 8 experts"),
        ({"index_topk_freq": 0}, "index_topk_freq is 0"),
        ({"index_topk_pattern": "FS"}, "one letter for each of the 3 sparse layers"),
    ],
)
def test_inconsistent_configs_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        replace(MODELS[FLASH], **changes)
