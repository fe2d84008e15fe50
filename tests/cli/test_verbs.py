"""Every verb: what it prints, its JSON, its help, and that pipes stay plain."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

VERBS = ("build", "quantize", "run", "inspect", "verify", "targets", "passes", "models", "doctor")
ANSI = re.compile(r"\x1b\[")


@pytest.mark.parametrize("verb", VERBS)
def test_help_teaches(mmcompile, verb):
    outcome = mmcompile(verb, "--help")
    assert outcome.code == 0
    assert "--json" in outcome.out
    assert "--debug" in outcome.out
    assert re.search(r"mmcompile \w+|Exit code", outcome.out.split("Options", 1)[1])
    assert not ANSI.search(outcome.out)


def test_without_a_verb(mmcompile):
    outcome = mmcompile()
    assert outcome.code == 0
    assert all(verb in outcome.out for verb in VERBS)
    assert mmcompile("--version").out.startswith("mmcompile ")


def test_build(mmcompile, tmp_path):
    out = tmp_path / "out"
    words = ("build", "smollm2-tiny", "--weights", "random", "--quant", "nvfp4", "--max-tokens", 32, "--max-batch", 4)
    outcome = mmcompile(
        *words, "--require", "qk_norm_rope_insert,merge_linears", "--disable", "merge_common", "-o", out
    )
    assert outcome.code == 0
    for expected in ("qkv_norm_rope_insert", "14 layers in nvfp4", "launches/step", f"mmcompile inspect {out}"):
        assert expected in outcome.out
    assert "merge_common" not in outcome.out
    assert [line.split(":")[0] for line in outcome.err.splitlines()] == ["capture", "rewrite", "lower cpu", "pack"]
    first = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    again = mmcompile(*words, "--disable", "merge_common", "-o", out, "--force", "--json")
    assert again.err == ""
    assert again.json["path"] == str(out)
    assert {target["name"] for target in again.json["targets"]} == {"cpu"}
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == first


def test_run_streams_ids(mmcompile, artifact):
    words = ("run", artifact, "--ids", "1,2,3", "--device", "cpu", "--max-new-tokens", 5)
    outcome = mmcompile(*words, "--stats")
    assert outcome.code == 0
    tokens = [int(word) for word in outcome.out.split()]
    assert 1 <= len(tokens) <= 5
    assert "tokens/s" in outcome.err
    document = mmcompile(*words, "--json").json
    assert document["answers"][0]["tokens"] == tokens
    assert document["statistics"]["engine"]["target"] == "cpu"


def test_run_serves_several_prompts_as_a_batch(mmcompile, artifact):
    words = ("--device", "cpu", "--max-new-tokens", 4, "--json")
    single = [mmcompile("run", artifact, "--ids", ids, *words).json["answers"][0] for ids in ("1,2,3", "9,8,7,6,5")]
    both = mmcompile("run", artifact, "--ids", "1,2,3", "--ids", "9,8,7,6,5", *words).json["answers"]
    assert both == single
    text = mmcompile("run", artifact, "--ids", "1,2,3", "--ids", "9", "--device", "cpu", "--max-new-tokens", 2).out
    assert "[1] [1, 2, 3]" in text
    assert "[2] [9]" in text


def test_sampling_follows_the_seed(mmcompile, artifact):
    words = ("run", artifact, "--ids", "1,2", "--device", "cpu", "--temperature", 5, "--max-new-tokens", 8, "--json")
    first, same, other = (mmcompile(*words, "--seed", seed).json["answers"][0]["tokens"] for seed in (1, 1, 2))
    assert first == same != other


def test_inspect_overview(mmcompile, artifact):
    outcome = mmcompile("inspect", artifact)
    assert outcome.code == 0
    for expected in ("98.6 K", "128 bytes per token", "self_attn.q_proj", "decode", "by references", "add_rms_norm"):
        assert expected in outcome.out
    assert "found mm." in outcome.out  # why a rule did not match
    assert not ANSI.search(outcome.out)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("--kernels", "cpu has no kernels"),
        ("--passes", "one_token_per_sequence"),
        ("--layers", "model.layers.1.mlp.down_proj.weight"),
        ("--launches", "mm.qkv_norm_rope_insert"),
        ("--buffers", "kv_cache"),
    ],
)
def test_inspect_sections(mmcompile, artifact, section, expected):
    assert expected in mmcompile("inspect", artifact, section).out
    assert mmcompile("inspect", artifact, section, "--json").json["model"]["name"] == "smollm2-tiny"


def test_inspect_launches_of_equal_layers_once(mmcompile, artifact):
    launches = mmcompile("inspect", artifact, "--launches", "--json").json["launches"]["cpu"]
    decode = [launch for launch in launches if launch["phase"] == "decode"]
    layers = [[x["operation"] for x in decode if x["layer"] == layer] for layer in (0, 1)]
    assert layers[0][0] == "mm.rms_norm" and layers[1][0] == "mm.add_rms_norm"
    assert layers[0][1:] == layers[1][1:]
    assert len(layers[0]) == 7
    outside = [x["operation"] for x in decode if x["layer"] is None]
    assert outside == ["mm.embedding", "mm.rms_norm", "mm.linear", "mm.sample"]


def test_inspect_graph(mmcompile, artifact):
    (path,) = (artifact / "passes").glob("*-match_linear.txt")
    number = int(path.name.partition("-")[0])
    outcome = mmcompile("inspect", artifact, "--graph", number)
    assert outcome.out == path.read_text()
    assert "mm.linear" in mmcompile("inspect", artifact, "--graph", number, "--json").json["graph"]


def test_verify_without_kernels(mmcompile, artifact):
    outcome = mmcompile("verify", artifact, "--json")
    assert outcome.code == 0
    assert outcome.json == {"records": [], "schedules": [], "failed": 0}


def test_verify_reports_a_failure(mmcompile, artifact, monkeypatch):
    from mmcompile.driver import verify

    bad = verify.KernelVerdict("sm90", "rms_norm", "mm.rms_norm", "rms", 3, 0.5, 0.4, 0.1, "failed", ("ledger",), 1.0)
    monkeypatch.setattr(verify, "verify_artifact", lambda *_, **__: [bad])
    outcome = mmcompile("verify", artifact)
    assert outcome.code == 8
    assert "rms_norm (sm90)" in outcome.err
    assert "failed" in outcome.out
    assert mmcompile("verify", artifact, "--json").json["failed"] == 1


def test_lists(mmcompile):
    targets = {record["name"]: record for record in mmcompile("targets", "--json").json}
    assert {"cpu", "sm90", "sm100", "sm107", "gfx950"} <= targets.keys()
    assert "never on hardware" in mmcompile("targets").out
    document = mmcompile("passes", "--quant", "nvfp4", "--json").json
    assert [record["number"] for record in document["passes"]] == list(range(len(document["passes"])))
    assert "nvfp4" in [record["name"] for record in document["passes"]]
    assert "nvfp4" not in [record["name"] for record in mmcompile("passes", "--json").json["passes"]]
    assert "qk_norm_rope_insert" in document["rules"]
    assert "match_rope" not in mmcompile("passes", "--kind", "module").out
    models = {record["name"]: record for record in mmcompile("models", "--json").json}
    assert models["smollm2-135m"]["parameters"] == 134_515_008
    assert models["smollm2-tiny"]["advice"]


def test_doctor(mmcompile, monkeypatch):
    records = [
        {"check": "ptxas", "ok": True, "detail": "release 13", "advice": ""},
        {"check": "HIP runtime", "ok": False, "detail": "none", "advice": "only to run on an AMD GPU: install ROCm"},
    ]
    monkeypatch.setattr("mmcompile.targets._doctor.run_doctor", lambda: records)
    assert mmcompile("doctor").code == 0
    records.append({"check": "nvdisasm", "ok": False, "detail": "none", "advice": "pip install it"})
    outcome = mmcompile("doctor")
    assert outcome.code == 9
    assert "pip install it" in outcome.out
    assert mmcompile("doctor", "--json").json == records


def _start(*words, **options):
    command = [sys.executable, "-m", "mmcompile", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_a_pipe_gets_no_colours_and_may_close(artifact):
    process = _start("inspect", artifact, "--buffers")
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


@pytest.mark.slow
def test_colour_only_where_allowed(artifact):
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "NO_COLOR")}
    plain, _ = _start("passes", env=environment).communicate()
    assert not ANSI.search(plain)
    forced, _ = _start("passes", env=environment | {"FORCE_COLOR": "1", "NO_COLOR": "1"}).communicate()
    assert not re.search(r"\x1b\[[0-9;]*3\dm", forced)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(tmp_path, number, code):
    process = _start("build", "smollm2-tiny", "--weights", "random", "-o", "out", cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert list(tmp_path.iterdir()) == []


def test_run_with_random_weights(mmcompile, artifact, tmp_path):
    words = ("--ids", "1,2,3", "--max-new-tokens", "3", "--random-weights")
    out = tmp_path / "empty"
    assert (
        mmcompile("build", "smollm2-tiny", "--weights", "none", "--max-tokens", 32, "--max-batch", 4, "-o", out).code
        == 0
    )
    first = mmcompile("run", out, *words, 5, "--json")
    assert first.code == 0 and "the weights are random (seed 5)" in first.err
    assert len(first.json["answers"][0]["tokens"]) == 3
    assert first.json["statistics"]["engine"]["weights"] == "random (seed 5)"
    refused = mmcompile("run", artifact, *words, 5)
    assert refused.code == 2 and "has its own" in refused.err
    bare = mmcompile("run", out, *words[:-1])
    assert bare.code == 6 and "--random-weights SEED" in bare.err
