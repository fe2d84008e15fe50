"""Bad input: one sentence on stderr, a stable exit code, nothing left behind, "did you mean" where a name is close."""

import json
import shutil

import pytest

BUILD = ("build", "smollm2-tiny", "--weights", "random", "-o", "out")


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["bild"], 2, "Did you mean 'build'"),
        ([*BUILD, "--quantt", "nvfp4"], 2, "unknown option '--quantt'; did you mean '--quant'"),
        (["build", "smollm2-tiny"], 2, "Missing option '--out'"),
        ([*BUILD, "--page-size", "many"], 2, "Invalid value for '--page-size'"),
        ([*BUILD, "--page-size", 12], 2, "page_size must be a power of two"),
        (["build", "smollm2-tin", "-o", "out"], 2, "unknown model 'smollm2-tin'; did you mean 'smollm2-tiny'"),
        (["build", "nothing-like-it", "-o", "out"], 2, "file.py:factory"),
        ([*BUILD, "--target", "cpu,sm9"], 2, "unknown target 'sm9'; did you mean 'sm90'"),
        ([*BUILD, "--quant", "nvfp"], 2, "unknown quantization 'nvfp'; did you mean 'nvfp4'"),
        ([*BUILD, "--dtype", "bfloat"], 2, "did you mean 'bfloat16'"),
        ([*BUILD, "--cache-dtype", "float8"], 2, "unknown cache dtype 'float8'"),
        ([*BUILD, "--quant-option", "lm_head"], 2, "not KEY=VALUE"),
        (["build", "llama-3-8b", "--weights", "real", "-o", "out"], 5, "no weights for 'llama-3-8b'"),
        (["build", "missing.py:factory", "-o", "out"], 3, "no such file"),
        (["run", "nowhere", "--prompt", "x"], 6, "not an artifact: no such directory"),
        (["run", "nowhere"], 2, "there is no prompt"),
        (["run", "nowhere", "--ids", "1,x"], 2, "not a list of integers"),
        (["run", "nowhere", "--prompt-file", "nothing.txt"], 2, "cannot read the prompt: No such file"),
        (["run", "nowhere", "--ids", "1", "--temperature", "-1"], 7, "temperature"),
        (["inspect", "."], 6, "no manifest.json in it"),
        (["verify", "nowhere"], 6, "not an artifact"),
        (["passes", "--quant", "nvfp5"], 2, "did you mean 'nvfp4'"),
        (["passes", "--kind", "decode"], 2, "did you mean 'decoder'"),
    ],
)
def test_one_sentence_and_the_exit_code(mmcompile, tmp_path, words, code, sentence):
    outcome = mmcompile(*words)
    assert outcome.code == code
    assert sentence in outcome.err
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--disable", "drop_noops"], "unknown pass 'drop_noops'; did you mean 'drop_no_ops'"),
        (["--require", "add_rmsnorm"], "unknown rule or pass 'add_rmsnorm'; did you mean 'add_rms_norm'"),
        (["--quant", "nvfp4", "--quant-option", "lmhead=true"], "did you mean 'lm_head'"),
    ],
)
def test_names_that_only_the_pipeline_knows(mmcompile, tmp_path, options, sentence):
    outcome = mmcompile(*BUILD, *options)
    assert outcome.code == 2
    assert sentence in outcome.err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_module_that_cannot_be_exported(mmcompile, tmp_path):
    source = tmp_path / "branching.py"
    source.write_text(
        "import torch\n\n\nclass Branching(torch.nn.Module):\n    def forward(self, x):\n"
        "        if x.sum() > 0:\n            return x\n        return -x\n\n\n"
        "def factory():\n    return Branching(), (torch.randn(4),)\n"
    )
    outcome = mmcompile("build", "branching.py:factory", "-o", "out")
    assert outcome.code == 3
    assert "branching.py:6" in outcome.err
    assert [p.name for p in tmp_path.iterdir() if p.name != "__pycache__"] == ["branching.py"]


def test_an_output_in_use(mmcompile, artifact, tmp_path):
    (tmp_path / "out").mkdir()
    outcome = mmcompile(*BUILD)
    assert outcome.code == 6
    assert "exists and is no artifact" in outcome.err
    outcome = mmcompile("build", "smollm2-tiny", "-o", artifact)
    assert outcome.code == 6
    assert "--force" in outcome.err


def test_prompts_the_artifact_cannot_serve(mmcompile, artifact):
    long = ",".join(["1"] * 300)
    outcome = mmcompile("run", artifact, "--ids", long, "--device", "cpu")
    assert outcome.code == 7
    assert "the prompt has 300 tokens, the context holds 256" in outcome.err
    outcome = mmcompile("run", artifact, "--ids", "1,512", "--device", "cpu")
    assert outcome.code == 7
    assert "token 512 is not in the vocabulary of 512" in outcome.err
    outcome = mmcompile("run", artifact, "--prompt", "text", "--device", "cpu")
    assert outcome.code == 6
    assert "no tokenizer" in outcome.err
    outcome = mmcompile("run", artifact, "--ids", "1", "--system", "be brief", "--device", "cpu")
    assert outcome.code == 7
    assert "chat template" in outcome.err


def test_a_target_the_artifact_lacks(mmcompile, artifact):
    for words in (["run", artifact, "--ids", "1"], ["inspect", artifact]):
        outcome = mmcompile(*words, "--target", "sm90")
        assert outcome.code == 6
        assert "no target 'sm90'" in outcome.err
    outcome = mmcompile("run", artifact, "--ids", "1", "--device", "gpu")
    assert outcome.code == 2
    assert "unknown device 'gpu'" in outcome.err


@pytest.mark.parametrize("verb", [["inspect"], ["run", "--ids", "1"], ["verify"]])
def test_a_flipped_byte(mmcompile, artifact, tmp_path, verb):
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    weights = next(broken.glob("weights/*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    outcome = mmcompile(verb[0], broken, *verb[1:])
    assert outcome.code == 6
    assert "file is damaged" in outcome.err


def test_another_schema(mmcompile, artifact, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    manifest = json.loads((broken / "manifest.json").read_text())
    (broken / "manifest.json").write_text(json.dumps(manifest | {"schema_version": 99}))
    outcome = mmcompile("inspect", broken)
    assert outcome.code == 6
    assert "schema version 99" in outcome.err


def test_a_graph_number_that_is_not_there(mmcompile, artifact):
    outcome = mmcompile("inspect", artifact, "--graph", 77)
    assert outcome.code == 2
    assert "there is no pass 77" in outcome.err


def test_errors_as_json(mmcompile):
    outcome = mmcompile("inspect", "nowhere", "--json")
    assert outcome.json["error"]["exit_code"] == outcome.code == 6
    assert outcome.json["error"]["where"] == "nowhere"
    assert mmcompile("targets", "--json", "--bogus").json["error"]["exit_code"] == 2


def test_debug_shows_the_traceback(mmcompile):
    assert "Traceback" not in mmcompile("inspect", "nowhere").err
    assert "Traceback" in mmcompile("inspect", "nowhere", "--debug").err


def test_an_internal_error_is_one_sentence_too(mmcompile, monkeypatch):
    def fail():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("mmcompile.targets._doctor.describe_targets", fail)
    outcome = mmcompile("targets")
    assert outcome.code == 1
    assert outcome.err.startswith("error: internal error, RuntimeError: two lines")


def test_an_interrupted_build_leaves_nothing(mmcompile, tmp_path, monkeypatch):
    def interrupt(*_args, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("mmcompile.driver.open_door", interrupt)
    outcome = mmcompile(*BUILD)
    assert outcome.code == 130
    assert list(tmp_path.iterdir()) == []
