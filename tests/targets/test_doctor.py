"""The lists behind ``mmcompile targets`` and ``mmcompile doctor``."""

import pytest

from mmcompile.core.discover import list_names
from mmcompile.core.errors import ToolchainError
from mmcompile.targets import _doctor, _target


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MMCOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        return {record["check"]: record for record in _doctor.run_doctor()}


def test_doctor_compiles_for_every_architecture(records):
    compiled = {name for name, r in records.items() if name.startswith("compile ") and r["ok"]}
    assert compiled == {f"compile {n}" for n in ("sm_90a", "sm_100a", "sm_103a", "sm_107a", "sm_100f", "gfx950")}
    assert all("registers" in records[name]["detail"] for name in compiled)


def test_doctor_checks_everything_it_promises(records):
    expected = {"python", "torch", "triton", "transformers", "tokenizers", "gguf", "ptxas", "nvdisasm"}
    expected |= {"NVIDIA driver", "HIP runtime", "cuda-bindings", "cache folder", "disk space"}
    assert expected <= records.keys()
    assert "PTX 9." in records["ptxas"]["detail"]
    for record in records.values():
        assert record.keys() == {"check", "ok", "detail", "advice"}
        assert record["detail"]
        assert bool(record["advice"]) is not record["ok"]


def test_a_compiler_that_fails_is_reported(monkeypatch):
    def fail(*_: object) -> None:
        raise ToolchainError("no such target", fix="install it")

    monkeypatch.setattr(_target.Target, "compile", fail)
    records = list(_doctor._check_compilers())
    assert len(records) == 6
    assert all(not r["ok"] and r["detail"] == "no such target" and r["advice"] == "install it" for r in records)


def test_missing_parts_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(_doctor, "find_disassemblers", lambda: ())
    monkeypatch.setattr(_doctor, "has_library", lambda name: False)
    monkeypatch.setattr(_doctor.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10**9}))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MMCOMPILE_CACHE", str(tmp_path / "file" / "below"))
    checks = [*_doctor._check_tools(), *_doctor._check_drivers(), *_doctor._check_disk()]
    failed = {record["check"]: record["advice"] for record in checks if not record["ok"]}
    assert {"nvdisasm", "NVIDIA driver", "HIP runtime", "cache folder", "disk space"} <= failed.keys()
    assert "MMCOMPILE_CACHE" in failed["cache folder"]


def test_describe_targets(monkeypatch):
    monkeypatch.setattr(_target, "has_library", lambda name: False)
    described = {record["name"]: record for record in _doctor.describe_targets()}
    assert list(described) == list_names("targets")
    assert described["sm90"]["executed_on"] == "NVIDIA H200"
    for name in ("sm100", "sm107", "gfx950"):
        assert described[name]["executed_on"] == "never on hardware"
        assert any(line.startswith("run: ") for line in described[name]["missing"])
    assert described["sm107"]["architectures"] == {"sm_107a": ["10.7"], "sm_100f": ["10.7", "10.3", "10.0"]}
    assert "sm_107a: 9.4" in described["sm107"]["needs"]["ptx"]
    assert described["cpu"]["missing"] == []


def test_a_missing_assembler_is_reported(monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise ToolchainError("ptxas rejects it")

    monkeypatch.setattr(_target, "probe_instruction", fail)
    target = next(t for t in _doctor.list_targets() if t.spec.name == "sm100")
    lines = [line for line in target.missing() if line.startswith("build: ")]
    assert len(lines) == 2
    assert "ptxas rejects it" in lines[0]
