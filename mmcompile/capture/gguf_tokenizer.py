"""Build a byte-level BPE tokenizer from the vocabulary and merges inside a GGUF file."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmcompile.capture.tensors import require_package
from mmcompile.core.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Values of tokenizer.ggml.token_type: tokens that are matched in the text before it is split.
CONTROL, USER_DEFINED = 3, 4

# tokenizer.ggml.pre -> whether every digit is a piece of its own before GPT-2's split into words.
SPLITS_DIGITS = {"gpt-2": False, "smollm": True, "starcoder": True, "refact": True}

ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def find_special_tokens(get: Callable[..., Any]) -> dict[str, str]:
    """Text of the special tokens by role. ``get(key, default)`` looks up GGUF metadata."""
    tokens = get("tokenizer.ggml.tokens", [])
    ids = {role: get(f"tokenizer.ggml.{key}_token_id") for role, key in ROLES.items()}
    return {role: tokens[number] for role, number in ids.items() if number is not None and number < len(tokens)}


def build_tokenizer(get: Callable[..., Any], where: str) -> Tokenizer:
    """Build the tokenizer. ``get(key, default)`` looks up GGUF metadata.

    Raises CheckpointError for a model other than GPT-2 style BPE or an unknown pre-tokenizer, ToolchainError if the
    package ``tokenizers`` is not installed.
    """
    library = require_package("tokenizers", "hf")
    model, split = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise CheckpointError(f"tokenizer model {model!r} is not supported, only 'gpt2'", where=where)
    if split not in SPLITS_DIGITS:
        raise CheckpointError(
            f"pre-tokenizer {split!r} is not supported, only {', '.join(sorted(SPLITS_DIGITS))}", where=where
        )
    tokens, merges, types = (get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "merges", "token_type"))
    if not tokens or not merges or len(types) != len(tokens):
        raise CheckpointError("the tokenizer needs tokens, merges and one token_type for each token", where=where)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        tokenizer = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"tokenizer merges do not fit the vocabulary: {error}", where=where) from error
    words = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = library.pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([digits, words]) if SPLITS_DIGITS[split] else words
    tokenizer.decoder = library.decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            library.AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    _add_first_token(library, tokenizer, get)
    return tokenizer


def _add_first_token(library: Any, tokenizer: Tokenizer, get: Callable[..., Any]) -> None:
    """Prefix every encoded text with the first token if the file asks for it."""
    number = get("tokenizer.ggml.bos_token_id")
    if number is None or not get("tokenizer.ggml.add_bos_token", False):
        return
    token = get("tokenizer.ggml.tokens")[number]
    processor = library.processors.TemplateProcessing(single=f"{token} $A", special_tokens=[(token, number)])
    tokenizer.post_processor = processor
