"""Read a GGUF file of the llama architecture as if it were a Hugging Face Llama checkpoint."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmcompile.capture.gguf_tokenizer import build_tokenizer, find_special_tokens
from mmcompile.capture.tensors import Checkpoint, LazyTensor, list_some, require_package
from mmcompile.core.errors import CheckpointError

TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(path: Path) -> Checkpoint:
    """Open ``path``. Tensors are dequantized to fp32 when loaded, under their Hugging Face names.

    Raises CheckpointError for a damaged file, an architecture other than llama, or a feature of it that is not
    supported; ToolchainError if the package ``gguf`` is not installed.
    """
    reader = _open_reader(path)
    metadata = _Metadata(reader, str(path))
    architecture = metadata.need("general.architecture", str)
    if architecture != "llama":
        raise CheckpointError(f"architecture {architecture!r} is not supported, only 'llama'", where=str(path))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = _build_config(metadata, stored)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {
        _translate(name, str(path)): LazyTensor(
            tuple(reversed(tensor.shape.tolist())),
            torch.float32,
            str(path),
            partial(_read, tensor, heads.get(_layer_part(name)), str(path)),
        )
        for name, tensor in stored.items()
    }
    return Checkpoint(
        where=str(path),
        config=config,
        tensors=tensors,
        build_tokenizer=partial(build_tokenizer, metadata.get, str(path)),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens=find_special_tokens(metadata.get),
    )


class _Metadata:
    """Key-value fields of a GGUF file."""

    def __init__(self, reader: Any, where: str) -> None:
        self.reader, self.where = reader, where

    def get(self, key: str, default: Any = None) -> Any:
        found = self.reader.get_field(key)
        return default if found is None else found.contents()

    def need(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"metadata {key!r} is missing", where=self.where)
        if not isinstance(value, kind):
            raise CheckpointError(f"metadata {key!r} must be one {kind.__name__}, got {value!r}", where=self.where)
        return value


def _open_reader(path: Path) -> Any:
    package = require_package("gguf", "gguf")
    try:
        return package.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError, OSError) as error:
        raise CheckpointError(f"not a complete GGUF file: {error}", where=str(path), fix="download it again") from error


def _layer_part(name: str) -> str:
    """``attn_q`` of ``blk.3.attn_q.weight``; empty for a tensor outside the layers."""
    pieces = name.split(".")
    return pieces[2] if pieces[0] == "blk" and len(pieces) == 4 else ""


def _translate(name: str, where: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    part = _layer_part(name)
    if part not in LAYER_NAMES:
        fix = "scaled rotary embeddings (Llama 3.1 and later) are not supported" if name.startswith("rope_") else ""
        raise CheckpointError(f"tensor {name!r} is not part of a llama model we know", where=where, fix=fix)
    _, layer, _, kind = name.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"


def _read(tensor: Any, heads: int | None, where: str) -> Tensor:
    """Dequantize to fp32 [rows, columns]; ``heads`` undoes the rotary permutation of a q or k projection."""
    quants = require_package("gguf.quants", "gguf")
    try:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"tensor {tensor.name!r} has the unsupported type {tensor.tensor_type.name}", where=where
        ) from error
    result = torch.tensor(values, dtype=torch.float32)
    if heads is None:
        return result
    if result.shape[0] % (2 * heads):
        raise CheckpointError(f"tensor {tensor.name!r} does not split into {heads} heads", where=where)
    return undo_rotary_permutation(result, heads)


def undo_rotary_permutation(weight: Tensor, heads: int) -> Tensor:
    """Bring the rows of a q or k projection [heads * d, ...] back into Hugging Face order.

    llama.cpp rotates neighbouring pairs (2i, 2i+1) where Hugging Face rotates (i, i + d/2), so its converter
    interleaves the two halves of each head; this separates them again.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _build_config(metadata: _Metadata, stored: dict[str, Any]) -> dict[str, Any]:
    """The fields of transformers' LlamaConfig."""
    where = metadata.where
    hidden = metadata.need("llama.embedding_length", int)
    heads = metadata.need("llama.attention.head_count", int)
    head_dim = metadata.need("llama.attention.key_length", int, hidden // max(heads, 1))
    _refuse_unsupported(metadata, head_dim)
    missing = {name for name in ("token_embd.weight", "output_norm.weight") if name not in stored}
    if missing:
        raise CheckpointError(f"missing tensors: {list_some(missing)}", where=where)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": metadata.need("llama.feed_forward_length", int),
        "num_hidden_layers": metadata.need("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.need("llama.attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.need("llama.context_length", int),
        "rms_norm_eps": _shortest_float32(metadata.need("llama.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": metadata.need("llama.rope.freq_base", float, 10000.0),
        "rope_scaling": None,
        "vocab_size": int(stored["token_embd.weight"].shape[1]),
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_up.bias" in stored,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def _shortest_float32(value: float) -> float:
    """1e-05 for the fp32 number nearest to it, which widened to a double reads 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def _refuse_unsupported(metadata: _Metadata, head_dim: int) -> None:
    scaling = metadata.get("llama.rope.scaling.type", "none")
    features = {
        f"rope scaling {scaling!r}": scaling != "none",
        "mixture of experts": metadata.get("llama.expert_count", 0) > 0,
        "partial rotary embedding": metadata.get("llama.rope.dimension_count", head_dim) != head_dim,
    }
    for feature, present in features.items():
        if present:
            raise CheckpointError(f"{feature} is not supported for GGUF files", where=metadata.where)
