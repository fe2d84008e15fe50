"""ONNX out: files that the checker accepts and that ONNX Runtime computes as the graph does, cache included."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")

from mmcompile.capture.onnx.door import capture_onnx  # noqa: E402
from mmcompile.cli import main  # noqa: E402
from mmcompile.core.errors import ArtifactError, UsageError  # noqa: E402
from mmcompile.core.runner import BOUNDED  # noqa: E402
from mmcompile.driver import BuildOptions, build  # noqa: E402
from mmcompile.driver.doors import open_door  # noqa: E402
from mmcompile.driver.export import capture_until, export  # noqa: E402
from mmcompile.driver.progress import silent  # noqa: E402
from mmcompile.runtime import SamplingParams, load  # noqa: E402

TINY = {"weights": "random", "dtype": "float32", "max_context": 128}
STEPS = 12
# fp32 sums in another order; logits of the tiny model are below 1, those of SmolLM2 below 40.
TOLERANCE = 2e-5


class Session:
    """ONNX Runtime on an exported decoder; keeps the cache between steps."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.cache = {
            i.name: self._empty([1, i.shape[1], 0, i.shape[3]], i.type)
            for i in self.session.get_inputs()
            if i.name.startswith("past_")
        }
        self.past = 0

    def _empty(self, shape: list[int], kind: str) -> Any:
        rounded = kind == "tensor(bfloat16)"  # numpy has none, and takes its bytes
        elem_type = onnx.TensorProto.BFLOAT16 if rounded else onnx.TensorProto.FLOAT
        array = np.zeros(shape, np.uint16 if rounded else np.float32)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, elem_type)

    def step(self, tokens: list[int]) -> np.ndarray:
        """Logits [tokens, vocabulary] of new tokens after those seen so far, as fp32."""
        places = np.arange(self.past, self.past + len(tokens))
        given = {"input_ids": np.array(tokens), "positions": places}
        feeds = {n: ort.OrtValue.ortvalue_from_numpy(v) for n, v in given.items()} | self.cache
        names = [o.name for o in self.session.get_outputs()]
        results = dict(zip(names, self.session.run_with_ort_values(names, feeds), strict=True))
        self.cache = {n: results[n.replace("past_", "present_")] for n in self.cache}
        self.past += len(tokens)
        return torch.from_dlpack(results["logits"]._ortvalue).float().numpy().copy()


def generate(session: Session, prompt: list[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits that chose them: one prefill, then decode steps of one token."""
    rows, tokens, new = [], [], prompt
    for _ in range(steps):
        rows.append(session.step(new)[-1])
        new = [int(rows[-1].argmax())]
        tokens += new
    return tokens, np.stack(rows)


def compute(graph: Callable[..., Any], sequence: list[int]) -> np.ndarray:
    """Logits of every token by the captured graph, without a cache."""
    with torch.no_grad():
        result = graph(torch.tensor(sequence), torch.arange(len(sequence)))
    return result.numpy()


@pytest.fixture(scope="module")
def reference() -> Callable[..., Any]:
    return open_door("smollm2-tiny", BuildOptions(**TINY)).graph_module


@pytest.mark.parametrize("after", ["standardise", "match_swiglu", "layout"])
def test_prefill_and_decode_give_the_logits_of_the_graph(tmp_path: Path, reference, after: str):
    path = tmp_path / "tiny.onnx"
    facts = export("smollm2-tiny", path, BuildOptions(**TINY), after=after)
    onnx.checker.check_model(str(path), full_check=True)
    assert facts["inputs"][:2] == ["input_ids", "positions"] and "past_value_1" in facts["inputs"]
    assert facts["outputs"] == ["logits"] + [f"present_{kind}_{i}" for i in range(2) for kind in ("key", "value")]
    prompt = [3, 1, 4, 1, 5]
    tokens, rows = generate(Session(path), prompt, STEPS)
    want = compute(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
    assert np.abs(rows - want).max() <= TOLERANCE
    assert tokens == want.argmax(-1).tolist()


def test_a_raw_graph_has_no_cache(tmp_path: Path, reference):
    path = tmp_path / "raw.onnx"
    facts = export("smollm2-tiny", path, BuildOptions(**TINY), after="capture")
    assert facts["outputs"] == ["result"] and facts["functions"] == []
    have = ort.InferenceSession(str(path)).run(None, {"input_ids": np.arange(9), "positions": np.arange(9)})[0]
    assert np.abs(have - compute(reference, list(range(9)))).max() <= TOLERANCE


def test_standard_operators_where_the_standard_has_them(tmp_path: Path):
    path = tmp_path / "tiny.onnx"
    export("smollm2-tiny", path, BuildOptions(**TINY, quantization="nvfp4"))
    model = onnx.load(path)
    kinds = {n.op_type for n in model.graph.node if n.domain == ""}
    assert {"Attention", "RMSNormalization", "RotaryEmbedding", "DequantizeLinear"} <= kinds
    assert {f.name for f in model.functions} == {"swiglu", "add_rms_norm"}
    types = {t.data_type for t in model.graph.initializer}
    assert onnx.TensorProto.FLOAT4E2M1 in types and onnx.TensorProto.FLOAT8E4M3FN in types
    blocks = [n for n in model.graph.node if any(a.name == "block_size" and a.i == 16 for a in n.attribute)]
    assert len(blocks) == 8  # per layer: q, k, v in one; o; gate and up in one; down


@pytest.mark.slow
def test_nvfp4_weights_in_both_forms(tmp_path: Path):
    """ONNX Runtime's CPU has no FLOAT4E2M1 and runs the function form; the reference evaluator runs the other."""
    options = BuildOptions(**TINY, quantization="nvfp4")
    export("smollm2-tiny", tmp_path / "function.onnx", options, nvfp4="function")
    export("smollm2-tiny", tmp_path / "standard.onnx", options, nvfp4="standard", after="quantize")
    session = Session(tmp_path / "function.onnx")
    prompt = [3, 1, 4, 1, 5]
    tokens, rows = generate(session, prompt, STEPS)
    artifact = build("smollm2-tiny", tmp_path / "artifact", BuildOptions(**TINY, quantization="nvfp4"))
    engine = load(artifact, device="cpu")
    params = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    assert engine.generate([prompt], params)[0].tokens == tokens
    past = {i: np.zeros([1, *s[1:2], 0, s[3]], np.float32) for i, s in _past_shapes(tmp_path / "standard.onnx").items()}
    from onnx.reference import ReferenceEvaluator

    evaluator = ReferenceEvaluator(str(tmp_path / "standard.onnx"))
    feeds = {"input_ids": np.array(prompt), "positions": np.arange(5), **past}
    assert np.abs(evaluator.run(["logits"], feeds)[0][-1] - rows[0]).max() <= TOLERANCE


def _past_shapes(path: Path) -> dict[str, list[int]]:
    inputs = onnx.load(path).graph.input
    return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in inputs if v.name.startswith("past_")}


@pytest.mark.slow
def test_what_goes_out_comes_in_again(tmp_path: Path, reference):
    """The exported file through the ONNX door: NVFP4 weights are recognised, the numbers stay."""
    path = tmp_path / "tiny.onnx"
    export("smollm2-tiny", path, BuildOptions(**TINY, quantization="nvfp4"))
    captured = capture_onnx(path, fixed={"past": 0} | {"tokens": 6})
    assert len(captured.nvfp4) == 8
    packed, scale, multiplier = next(iter(captured.nvfp4.values()))
    assert packed.dtype == torch.uint8 and scale.dtype == torch.float8_e4m3fn and multiplier.shape == packed.shape[:1]
    names = [i.name for i in captured.inputs]
    inputs = {
        i.name: torch.zeros([int(s) for s in i.shape], dtype=getattr(torch, i.dtype)) for i in captured.inputs
    } | {"input_ids": torch.arange(6), "positions": torch.arange(6)}
    have = captured.graph_module(*[inputs[n] for n in names])[0].numpy()
    export("smollm2-tiny", tmp_path / "f.onnx", BuildOptions(**TINY, quantization="nvfp4"), nvfp4="function")
    assert np.abs(have - Session(tmp_path / "f.onnx").step(list(range(6)))).max() <= TOLERANCE


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "onxx"}, UsageError, "unknown format 'onxx'; did you mean 'onnx'"),
        ({"after": "match_atention"}, UsageError, "did you mean 'match_attention'"),
        ({"after": "insert_paged_cache"}, UsageError, "belongs to the paged cache"),
        ({"widen": True, "format": "torch"}, UsageError, "bfloat16 is spelled out in ONNX alone"),
        ({"nvfp4": "fast"}, UsageError, "unknown form of NVFP4 weights 'fast'"),
    ],
)
def test_wrong_options_write_nothing(tmp_path: Path, options: dict[str, str], error: type, message: str):
    with pytest.raises(error, match=message):
        export("smollm2-tiny", tmp_path / "x.onnx", BuildOptions(**TINY), **options)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_never_overwritten_unless_asked(tmp_path: Path):
    path = tmp_path / "x.onnx"
    path.write_text("mine")
    with pytest.raises(ArtifactError, match="exists already"):
        export("smollm2-tiny", path, BuildOptions(**TINY))
    assert path.read_text() == "mine"


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "tiny.onnx"
    words = ["export", "smollm2-tiny", "--weights", "random", "--format", "onnx", "--after", "match_rms_norm"]
    assert main([*words, "-o", str(path)]) == 0
    assert "after match_rms_norm" in " ".join(capsys.readouterr().out.split())
    onnx.checker.check_model(str(path), full_check=True)
    assert main([*words, "--format", "onnx", "-o", str(path)]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_bfloat16_spelled_out_in_fp32(tmp_path: Path, quantization: str):
    """ONNX Runtime's CPU moves bfloat16 and computes nothing in it; spelled out, every operation runs there."""
    options = BuildOptions(**TINY | {"dtype": "bfloat16"}, quantization=quantization)
    export("smollm2-tiny", tmp_path / "plain.onnx", options, nvfp4="function")
    with pytest.raises(Exception, match="NOT_IMPLEMENTED"):
        Session(tmp_path / "plain.onnx")
    path = tmp_path / "wide.onnx"
    facts = export("smollm2-tiny", path, options, nvfp4="function", widen=True)
    assert facts["functions"] == [] and facts["inputs"][:3] == ["input_ids", "positions", "past_key_0"]
    session, ids = Session(path), [3, 1, 4, 1, 5, 9, 2, 6]
    have = np.concatenate([session.step(chunk) for chunk in (ids[:5], ids[5:6], ids[6:])])
    graph, _ = capture_until("smollm2-tiny", options, "quantize", silent)
    with torch.no_grad():
        want = graph.graph_module(torch.tensor(ids), torch.arange(len(ids))).float().numpy()
    assert np.abs(have - want).max() <= BOUNDED[torch.bfloat16] * np.abs(want).max()


@pytest.mark.slow
def test_an_artifact_goes_out_with_its_packed_weights(tmp_path: Path):
    """Its cache of float8_e4m3fn is a rounding in the file, so that the tokens are the artifact's."""
    options = BuildOptions(**TINY, quantization="nvfp4", cache_dtype="float8_e4m3fn")
    artifact = build("smollm2-tiny", tmp_path / "artifact", options)
    assert main(["export", str(artifact), "--nvfp4", "function", "-o", str(tmp_path / "x.onnx")]) == 0
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    tokens, _ = generate(Session(tmp_path / "x.onnx"), prompt, STEPS)
    params = SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
    assert load(artifact, device="cpu").generate([prompt], params)[0].tokens == tokens


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_smollm2_in_bfloat16_answers_the_same(tmp_path: Path, quantization: str):
    """To the end of the answer. What follows it is noise, where two tokens are alike within a bfloat16."""
    options = BuildOptions(quantization=quantization, max_context=256)
    artifact = build("smollm2-135m", tmp_path / "artifact", options)
    engine = load(artifact, device="cpu")
    chat = engine.text.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompt = engine.text.encode(chat, special=False)
    wanted = engine.generate([prompt], SamplingParams(max_new_tokens=40))[0].tokens
    export(str(artifact), tmp_path / "x.onnx", BuildOptions(), nvfp4="function", widen=True)
    assert len(wanted) > 6
    assert generate(Session(tmp_path / "x.onnx"), prompt, len(wanted))[0] == wanted


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_smollm2_over_a_whole_greedy_generation(tmp_path: Path, quantization: str):
    options = BuildOptions(dtype="float32", quantization=quantization, max_context=256)
    path = tmp_path / "smollm2.onnx"
    export("smollm2-135m", path, options, nvfp4="function")
    engine = load(build("smollm2-135m", tmp_path / "artifact", options), device="cpu")
    prompt = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 30]
    wanted = engine.generate([prompt], SamplingParams(max_new_tokens=32, ignore_eos=True))[0].tokens
    tokens, rows = generate(Session(path), prompt, 32)
    assert tokens == wanted
    export("smollm2-135m", tmp_path / "raw.onnx", options, after="capture")
    if quantization == "none":
        whole = np.array(prompt + tokens[:-1])
        session = ort.InferenceSession(str(tmp_path / "raw.onnx"))
        raw = session.run(None, {"input_ids": whole, "positions": np.arange(len(whole))})[0]
        assert np.abs(rows - raw[len(prompt) - 1 :]).max() <= 40 * TOLERANCE
