"""MLIR out: torch-mlir writes it, and IREE computes from it what the graph computes, cache included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

ml_dtypes = pytest.importorskip("ml_dtypes", reason="numpy's bfloat16 is absent: pip install 'mmcompile[onnx]'")
pytest.importorskip("torch_mlir", reason="torch-mlir is absent: pip install 'mmcompile[mlir]'")

from mmcompile.cli import main  # noqa: E402
from mmcompile.core.errors import LoweringError, UsageError  # noqa: E402
from mmcompile.core.runner import BOUNDED  # noqa: E402
from mmcompile.driver import BuildOptions  # noqa: E402
from mmcompile.driver.doors import open_door  # noqa: E402
from mmcompile.driver.export import capture_until, export  # noqa: E402
from mmcompile.driver.progress import silent  # noqa: E402
from mmcompile.models import llama  # noqa: E402

# `make nightly` installs torch-mlir and IREE, which are 180 MB.
pytestmark = pytest.mark.slow
NO_IREE = "IREE is absent: pip install 'mmcompile[iree]'"
TINY: dict[str, Any] = {"weights": "random", "max_context": 128}
EXACT: dict[str, Any] = TINY | {"dtype": "float32"}
# fp32 sums in another order; logits of the tiny model are below 1, those of SmolLM2 below 40.
TOLERANCE = 2e-5
PROMPT = [3, 1, 4, 1, 5]


class Program:
    """A module compiled by IREE for this CPU, with its cache between steps."""

    def __init__(self, path: Path, kv_heads: int, head_dim: int, dtype: Any = np.float32) -> None:
        compiler = pytest.importorskip("iree.compiler", reason=NO_IREE)
        runtime = pytest.importorskip("iree.runtime", reason=NO_IREE)
        binary = compiler.compile_file(
            str(path), target_backends=["llvm-cpu"], extra_args=["--iree-llvmcpu-target-cpu=host"]
        )
        self.run = runtime.load_vm_flatbuffer(binary, driver="local-sync")["main"]
        self.empty = np.zeros([1, kv_heads, 0, head_dim], dtype)
        self.cache: list[np.ndarray] = []

    def step(self, tokens: list[int], past: bool = True) -> np.ndarray:
        """Logits [tokens, vocabulary] of new tokens after those seen so far, as fp32."""
        seen = self.cache[0].shape[2] if self.cache else 0
        places = np.arange(seen, seen + len(tokens))
        logits, *cache = self.run(np.array(tokens), places, *(self.cache if past else []))
        # Copies: what to_host gives is IREE's memory, which goes with the value.
        self.cache = [np.array(value.to_host()) for value in cache]
        return np.array(logits.to_host()).astype(np.float32)


def compute(model: str, options: BuildOptions, sequence: list[int]) -> np.ndarray:
    """Logits of every token by the captured graph, without a cache."""
    graph, _ = capture_until(model, options, "quantize", silent)
    with torch.no_grad():
        result: torch.Tensor = graph.graph_module(torch.tensor(sequence), torch.arange(len(sequence)))
    return result.float().numpy()


def generate(prefill: Program, decode: Program, prompt: list[int], steps: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens and the logits that chose them: a prefill without a past, then steps of one token."""
    rows = [prefill.step(prompt, past=False)[-1]]
    decode.cache = prefill.cache
    tokens = [int(rows[0].argmax())]
    for _ in range(steps - 1):
        rows.append(decode.step(tokens[-1:])[-1])
        tokens.append(int(rows[-1].argmax()))
    return tokens, np.stack(rows)


@pytest.mark.parametrize(("after", "quantization"), [("standardise", "none"), ("layout", "none"), ("layout", "nvfp4")])
def test_iree_generates_what_the_graph_computes(tmp_path: Path, after: str, quantization: str):
    """A decoder of two blocks: prefill of any length, decode step after a past of any length."""
    options = BuildOptions(**EXACT, quantization=quantization)
    export("smollm2-tiny", tmp_path / "prefill.mlir", options, format="linalg", after=after, sizes={"past": 0})
    facts = export("smollm2-tiny", tmp_path / "decode.mlir", options, format="linalg", after=after, sizes={"tokens": 1})
    assert facts["inputs"][:3] == ["input_ids", "positions", "past_key_0"]
    assert facts["outputs"] == ["logits"] + [f"present_{kind}_{i}" for i in range(2) for kind in ("key", "value")]
    prefill, decode = (Program(tmp_path / f"{name}.mlir", 1, 16) for name in ("prefill", "decode"))
    tokens, rows = generate(prefill, decode, PROMPT, 8)
    want = compute("smollm2-tiny", options, PROMPT + tokens[:-1])[len(PROMPT) - 1 :]
    assert np.abs(rows - want).max() <= TOLERANCE
    assert tokens == want.argmax(-1).tolist()


def test_one_module_serves_prefill_and_decode(tmp_path: Path):
    """Both sizes dynamic: chunks of several tokens and of one."""
    export("smollm2-tiny", tmp_path / "both.mlirbc", BuildOptions(**EXACT), format="linalg")
    program = Program(tmp_path / "both.mlirbc", 1, 16)
    program.cache = [program.empty] * 4
    rows = np.concatenate([program.step(chunk) for chunk in (PROMPT, [9, 2], [6])])
    assert np.abs(rows - compute("smollm2-tiny", BuildOptions(**EXACT), [*PROMPT, 9, 2, 6])).max() <= TOLERANCE


@pytest.mark.parametrize("quantization", ["none", "nvfp4"])
def test_bfloat16_in_iree(tmp_path: Path, quantization: str):
    """The decoder of two blocks in bfloat16, cache included: within the rounding that a pass may bring."""
    options = BuildOptions(**TINY, quantization=quantization)
    export("smollm2-tiny", tmp_path / "both.mlirbc", options, format="linalg")
    program = Program(tmp_path / "both.mlirbc", 1, 16, ml_dtypes.bfloat16)
    program.cache = [program.empty] * 4
    rows = np.concatenate([program.step(chunk) for chunk in (PROMPT, [9, 2], [6])])
    want = compute("smollm2-tiny", options, [*PROMPT, 9, 2, 6])
    assert np.abs(rows - want).max() <= BOUNDED[torch.bfloat16] * np.abs(want).max()


@pytest.mark.parametrize(
    ("backend", "argument", "dtype"),
    [
        ("rocm", "--iree-rocm-target=gfx950", "float32"),
        ("cuda", "--iree-cuda-target=sm_80", "float32"),
        ("cuda", "--iree-cuda-target=sm_80", "bfloat16"),
    ],
)
def test_the_decode_step_compiles_for_gpus(tmp_path: Path, backend: str, argument: str, dtype: str):
    """Compiled, never run: this machine has no such GPU.

    IREE 3.13 knows CUDA to sm_89 (sm_90: "missing GPU target"), and crashes on bfloat16 for gfx950.
    """
    compiler = pytest.importorskip("iree.compiler", reason=NO_IREE)
    path = tmp_path / "decode.mlir"
    export("smollm2-tiny", path, BuildOptions(**TINY, dtype=dtype), format="linalg", sizes={"tokens": 1})
    binary = compiler.compile_file(str(path), target_backends=[backend], extra_args=[argument])
    assert len(binary) > 100_000 and backend.encode() in binary


@pytest.mark.parametrize(
    ("form", "sizes", "word"),
    [
        ("torch", {}, "torch.aten.mm"),
        ("stablehlo", {}, "stablehlo.dot"),
        ("tosa", {"tokens": 1, "past": 8}, "tosa.matmul"),
    ],
)
def test_every_form_holds_its_own_operations(tmp_path: Path, form: str, sizes: dict[str, int], word: str):
    path = tmp_path / "x.mlir"
    facts = export("smollm2-tiny", path, BuildOptions(**EXACT), format=form, sizes=sizes)
    text = path.read_text()
    assert text.startswith("// inputs: input_ids, positions, past_key_0") and word in text
    assert "mm." not in text.replace(word, "").replace("aten.mm.", "") and facts["bytes"] == len(text.encode())
    again = tmp_path / "again.mlir"
    export("smollm2-tiny", again, BuildOptions(**EXACT), format=form, sizes=sizes)
    assert again.read_bytes() == path.read_bytes()


def test_a_raw_graph_has_no_cache(tmp_path: Path):
    facts = export("smollm2-tiny", tmp_path / "x.mlir", BuildOptions(**EXACT), format="linalg", after="capture")
    assert facts["inputs"] == ["input_ids", "positions"] and facts["outputs"] == ["result"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"format": "linalgo"}, UsageError, "unknown format 'linalgo'; did you mean 'linalg'"),
        ({"format": "linalg", "sizes": {"token": 1}}, UsageError, "unknown size 'token'; did you mean 'tokens'"),
        ({"format": "linalg", "sizes": {"tokens": 0}}, UsageError, "the size tokens is from 1 to"),
        ({"format": "onnx", "sizes": {"tokens": 1}}, UsageError, "stay symbols in the format onnx"),
        ({"format": "tosa"}, LoweringError, r"cannot lower it to tosa: .*torch\.aten.* \(at node \w+, [\w.]+\)"),
    ],
)
def test_wrong_options_write_nothing(tmp_path: Path, options: dict[str, Any], error: type, message: str):
    with pytest.raises(error, match=message):
        export("smollm2-tiny", tmp_path / "x.mlir", BuildOptions(**EXACT), **options)
    assert list(tmp_path.iterdir()) == []


def test_an_operation_that_cannot_be_lowered_is_named_with_its_node(tmp_path: Path):
    """torch-mlir has no form of this one: the error names the call and the node of the graph."""
    (tmp_path / "model.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.special.bessel_j0(x.abs()) + 1\n"
        "def make():\n"
        "    return Model(), {'x': torch.zeros(4, 4)}\n"
    )
    model = f"{tmp_path}/model.py:make"
    node = next(n.name for n in open_door(model, BuildOptions()).graph_module.graph.nodes if "bessel" in n.name)
    with pytest.raises(LoweringError, match=rf"\(at node {node}, aten.special_bessel_j0.default\)"):
        export(model, tmp_path / "x.mlir", BuildOptions(), format="linalg")
    assert not (tmp_path / "x.mlir").exists()


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "x.mlir"
    words = ["export", "smollm2-tiny", "--weights", "random", "--format", "torch", "--size", "tokens=1"]
    assert main([*words, "--after", "match_rms_norm", "-o", str(path)]) == 0
    assert "after match_rms_norm" in " ".join(capsys.readouterr().out.split())
    assert "torch.vtensor<[1]" in path.read_text()
    assert main([*words[:-1], "tokens=one", "-o", str(tmp_path / "y.mlir")]) == 2
    assert main([*words, "-o", str(path)]) == 6


def test_a_pass_before_and_after(tmp_path: Path):
    """The mm format keeps mm operations, which a pass brings in, and leaves the weights out."""
    before, after = tmp_path / "before.mlir", tmp_path / "after.mlir"
    export("smollm2-tiny", before, BuildOptions(**EXACT), format="mm", after="match_embedding")
    export("smollm2-tiny", after, BuildOptions(**EXACT), format="mm", after="match_rms_norm")
    count = [path.read_text().count("torch.mm.rms_norm") for path in (before, after)]
    assert count == [0, 5] and "torch.aten.rsqrt" in before.read_text() and "__elided__" in after.read_text()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2_decode_step(tmp_path: Path, dtype: str):
    """SmolLM2-135M: prefill and four greedy tokens by IREE, as the captured graph gives them."""
    if llama.find_weights("smollm2-135m") is None:
        pytest.skip("the weights of SmolLM2-135M are absent")
    options = BuildOptions(dtype=dtype, max_context=256)
    for name, sizes in (("prefill", {"past": 0}), ("decode", {"tokens": 1})):
        export("smollm2-135m", tmp_path / f"{name}.mlirbc", options, format="linalg", sizes=sizes)
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    prefill, decode = (Program(tmp_path / f"{name}.mlirbc", 3, 64, kind) for name in ("prefill", "decode"))
    prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
    tokens, rows = generate(prefill, decode, prompt, 4)
    want = compute("smollm2-135m", options, prompt + tokens[:-1])[len(prompt) - 1 :]
    rounding = 40 * TOLERANCE if dtype == "float32" else BOUNDED[torch.bfloat16] * np.abs(want).max()
    assert np.abs(rows - want).max() <= rounding
    assert tokens == want.argmax(-1).tolist()
