"""The GPU-less toolchain: compile, disassemble, ledger, limits, cache."""

import dataclasses
import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmcompile.core.discover import list_names, load_module
from mmcompile.core.errors import LoweringError, ToolchainError, UsageError
from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.targets import _assemble, _disassemble
from mmcompile.targets._cache import KernelCache, cache_key, default_cache_dir
from mmcompile.targets._check import MAX_SPILL_BYTES, reserve_shared
from mmcompile.targets._disassemble import check_ledger, count_instructions, disassemble
from mmcompile.targets._toolchain import CompileJob, compile_kernel, compile_many

TARGETS = {name: load_module("targets", name).TARGET for name in list_names("targets")}
FLAVOURS = [(t, a) for t in TARGETS.values() for a in t.spec.architectures]
each_flavour = pytest.mark.parametrize(("target", "architecture"), FLAVOURS, ids=[a.name for _, a in FLAVOURS])

HEADER = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
ADD = (
    HEADER
    + """def kernel(x, y, out, n):
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    tl.store(out + i, tl.load(x + i, i < n) + tl.load(y + i, i < n), i < n)
"""
)
DOT = (
    HEADER
    + """def kernel(a, b, out, steps):
    m, n, k = tl.arange(0, 128), tl.arange(0, {n}), tl.arange(0, 128)
    acc = tl.zeros((128, {n}), tl.float32)
    for step in range(steps):
        x = tl.load(a + m[:, None] * 4096 + (step * 128 + k)[None, :])
        w = tl.load(b + n[:, None] * 4096 + (step * 128 + k)[None, :])
        acc = tl.dot(x, w.T, acc)
    tl.store(out + m[:, None] * {n} + n[None, :], acc)
"""
)
ASM = (
    HEADER
    + """def kernel(x, out):
    i = tl.arange(0, 256)
    word = tl.load(x + i)
    word = tl.inline_asm_elementwise("{text}", "{constraints}", [word], tl.{dtype}, True, {pack})
    tl.store(out + i, word)
"""
)


def make_source(text: str, types: dict[str, str], **options: object) -> KernelSource:
    parameters = tuple(Parameter(name, kind, name) for name, kind in types.items())
    return KernelSource("probe", text, parameters, ("1", "1", "1"), **options)


def make_add() -> KernelSource:
    return make_source(ADD, {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"})


def make_dot(n: int = 64, **options: object) -> KernelSource:
    return make_source(DOT.format(n=n), {"a": "*bf16", "b": "*bf16", "out": "*fp32", "steps": "i32"}, **options)


def make_asm(text: str, constraints: str, dtype: str = "uint32", pack: int = 1) -> KernelSource:
    kind = "*u32" if dtype == "uint32" else "*u8"
    body = ASM.format(text=text, constraints=constraints, dtype=dtype, pack=pack)
    return make_source(body, {"x": kind, "out": kind})


@functools.cache
def compile_dot(name: str):
    """The matrix multiply for one architecture, compiled once for all tests."""
    target, architecture = find(name)
    return target.compile(make_dot(), architecture)


def find(name: str):
    return next(flavour for flavour in FLAVOURS if flavour[1].name == name)


@each_flavour
def test_vector_add_compiles(target, architecture):
    compiled = target.compile(make_add(), architecture)
    facts = compiled.metadata
    assert compiled.binary[:4] == b"\x7fELF"
    assert facts["name"] == "kernel"
    assert facts["num_warps"] == 4
    assert facts["warp_size"] == target.spec.warp_size
    assert 0 < facts["registers"] <= 64
    assert facts["spills"] == facts["stack"] == facts["shared"] == facts["global_scratch_size"] == 0
    assert facts["fp_fusion"] is True
    assert target.check(compiled) == []
    if target.spec.backend == "cuda":
        assert f".target {architecture.name}" in compiled.assembly
        assert facts["ptx_version"] == _assemble.ptx_version()


@each_flavour
def test_pointers_are_compiled_as_aligned(target, architecture):
    text = HEADER + "def kernel(x, out):\n    i = tl.arange(0, 2048)\n    tl.store(out + i, tl.load(x + i))\n"
    compiled = target.compile(make_source(text, {"x": "*fp32", "out": "*fp32"}), architecture)
    wide = "load_dwordx4" if target.spec.backend == "hip" else "ld.global.v4.b32"
    assert any(wide in name or "ld.global.v8" in name for name in compiled.metadata["ledger"])


@each_flavour
def test_matrix_multiply_uses_the_matrix_unit(target, architecture):
    promised = {"sm90": "wgmma", "gfx950": "v_mfma_f32_"}.get(target.spec.name, "tcgen05.mma")
    source = make_dot(ledger={promised: True, "QMUL4": False})
    compiled = dataclasses.replace(compile_dot(architecture.name), source=source)
    target.check(compiled)
    if target.spec.backend == "cuda" and target.spec.name != "sm90":
        assert compiled.metadata["tmem_size"] > 0
    broken = dataclasses.replace(source, ledger={promised: False})
    with pytest.raises(LoweringError, match="forbids"):
        check_ledger(broken, compiled.metadata["ledger"], compiled.metadata["ledger_from"])


SCALED = (
    HEADER
    + """def kernel(a, a_scale, b, b_scale, out):
    m, n, k, s = tl.arange(0, 128), tl.arange(0, 64), tl.arange(0, 128), tl.arange(0, 16)
    x, w = tl.load(a + m[:, None] * 128 + k[None, :]), tl.load(b + n[None, :] * 128 + k[:, None])
    xs, ws = tl.load(a_scale + m[:, None] * 16 + s[None, :]), tl.load(b_scale + n[:, None] * 16 + s[None, :])
    acc = tl.dot_scaled(x, xs, "e2m1", w, ws, "e2m1")
    tl.store(out + m[:, None] * 64 + n[None, :], acc)
"""
)


@pytest.mark.parametrize("name", ["sm_100a", "sm_100f", "sm_107a"])
def test_nvfp4_reaches_the_tensor_cores(name):
    target, architecture = find(name)
    types = {"a": "*u8", "a_scale": "*fp8e4nv", "b": "*u8", "b_scale": "*fp8e4nv", "out": "*fp32"}
    source = make_source(SCALED, types, ledger={"kind::mxf4nvf4": True, "UTCOMMA": True})
    assert target.check(target.compile(source, architecture)) == []


@each_flavour
def test_outputs_hold_no_path(target, architecture):
    compiled = compile_dot(architecture.name)
    everything = compiled.binary + compiled.assembly.encode() + repr(compiled.metadata).encode()
    for leak in (b"/tmp", b".py", b"mmcompile-", str(Path.home()).encode() + b"/", os.getcwd().encode()):
        assert leak not in everything


def test_binaries_are_the_same_in_another_process():
    script = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); import test_toolchain as t\n"
        "print([hashlib.sha256(t.compile_dot(n).binary).hexdigest() for n in ('sm_90a', 'sm_100f', 'gfx950')])"
    )
    here = [hashlib.sha256(compile_dot(name).binary).hexdigest() for name in ("sm_90a", "sm_100f", "gfx950")]
    command = [sys.executable, "-c", script, str(Path(__file__).parent)]
    environment = os.environ | {"PYTHONHASHSEED": "7", "TMPDIR": os.environ.get("TMPDIR", "/var/tmp")}
    there = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert there.stdout.strip() == repr(here)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("gfx950", make_asm("v_mov_b32 $0, $1", "=v,v", "uint8", 4)),
        ("gfx950", make_asm("v_no_such_thing $0, $1", "=v,v")),
        ("sm_90a", make_asm("no.such.thing $0, $1;", "=r,r")),
        ("sm_100f", make_asm("no.such.thing $0, $1;", "=r,r")),
    ],
    ids=["dropped by LLVM", "unknown AMD", "unknown PTX", "unknown family PTX"],
)
def test_failing_inline_assembly_is_an_error(name, source, capfd):
    target, architecture = find(name)
    with pytest.raises(ToolchainError) as caught:
        target.compile(source, architecture)
    message = str(caught.value)
    assert name in message
    assert "constraint" in message or "instruction" in message or "no.such" in message
    assert capfd.readouterr().out == ""


def test_working_inline_assembly_compiles():
    target, architecture = find("gfx950")
    compiled = target.compile(make_asm("v_not_b32 $0, $1", "=v,v"), architecture)
    assert compiled.metadata["ledger"]["v_not_b32"] >= 1 or "v_not_b32_e32" in compiled.metadata["ledger"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "def kernel(x, y):\n    tl.store(y, tl.load(x))\n", r"kernel\(x, out\)"),
        ("kernel = None\n", r"kernel\(x, out\)"),
        ("def kernel(:\n", "SyntaxError"),
        (HEADER + "def kernel(x, out):\n    tl.store(out, tl.no_such(x))\n", "no_such"),
    ],
)
def test_bad_text_is_an_error(text, message):
    target, architecture = find("sm_90a")
    with pytest.raises(ToolchainError, match=message):
        target.compile(make_source(text, {"x": "*u32", "out": "*u32"}), architecture)


def test_cpu_makes_no_binaries():
    with pytest.raises(ToolchainError, match="makes no binaries"):
        TARGETS["cpu"].compile(make_add(), FLAVOURS[0][1])
    assert TARGETS["cpu"].missing() == []
    assert TARGETS["cpu"].kernels == ()


def test_interpreter_mode_is_refused(monkeypatch):
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    with pytest.raises(ToolchainError, match="TRITON_INTERPRET"):
        find("sm_90a")[0].compile(make_add(), find("sm_90a")[1])


def test_too_much_shared_memory_is_an_error():
    target, architecture = find("sm_100a")
    compiled = target.compile(make_dot(256, num_stages=3), architecture)
    assert compiled.metadata["shared"] > target.spec.shared_memory_per_block
    with pytest.raises(LoweringError) as caught:
        target.check(compiled)
    message = str(caught.value)
    assert "'probe'" in message
    assert str(compiled.metadata["shared"]) in message
    assert "232448" in message
    assert "num_stages" in message


def test_only_rubin_takes_oversized_shared_memory():
    target, architecture = find("sm_107a")
    compiled = target.compile(make_dot(256, num_stages=3), architecture)
    assert 232448 < compiled.metadata["shared"] <= target.spec.shared_memory_per_block
    target.check(compiled)
    family = dataclasses.replace(compiled, architecture="sm_100f")
    with pytest.raises(LoweringError, match="232448"):
        target.check(family)


def change_facts(compiled, **facts):
    return dataclasses.replace(compiled, metadata=compiled.metadata | facts)


def test_limits():
    target, architecture = find("sm_107a")
    compiled = target.compile(make_add(), architecture)
    allocating = dataclasses.replace(compiled, assembly=compiled.assembly + "tcgen05.alloc.x")
    exclusive = dataclasses.replace(compiled, assembly=compiled.assembly + "tcgen05.alloc.exclusive.x")
    for bad, what in (
        (change_facts(compiled, registers=256), "registers"),
        (change_facts(compiled, num_warps=64), "threads"),
        (change_facts(compiled, spills=MAX_SPILL_BYTES + 4), "spilled"),
        (change_facts(allocating, tmem_size=576), "tensor-memory"),
        (change_facts(exclusive, tmem_size=577), "tensor-memory"),
    ):
        with pytest.raises(LoweringError, match=what):
            target.check(bad)
    assert target.check(change_facts(exclusive, tmem_size=576, registers=255)) == []
    assert "spills 16 bytes" in target.check(change_facts(compiled, spills=16))[0]
    with pytest.raises(UsageError, match="sm_107a"):
        target.check(dataclasses.replace(compiled, architecture="sm_107b"))


def test_disassembly_and_counts():
    for name in ("sm_90a", "sm_107a", "gfx950"):
        target, architecture = find(name)
        compiled = target.compile(make_add(), architecture)
        counts = count_instructions(target.disassemble(compiled), target.spec.backend)
        assert counts.items() <= compiled.metadata["ledger"].items()
        assert any("ADD" in key.upper() for key in counts)
    damaged = dataclasses.replace(compiled, architecture="sm_90a", binary=b"\x7fELF" + bytes(100))
    with pytest.raises(ToolchainError, match="nvdisasm"):
        disassemble(damaged)


def test_without_a_disassembler_sass_promises_are_reported(monkeypatch):
    bundled = _disassemble.find_disassemblers()[-1:]
    monkeypatch.setattr(_disassemble, "find_disassemblers", lambda: bundled)
    target, architecture = find("sm_107a")
    compiled = target.compile(dataclasses.replace(make_add(), ledger={"FADD": True, "add.f32": True}), architecture)
    if compiled.metadata["ledger_from"] == ["ptx"]:
        assert "not checked" in target.check(compiled)[0]
        with pytest.raises(ToolchainError, match="nvidia-cuda-nvdisasm"):
            disassemble(compiled)
        assert any("nvdisasm" in line for line in target.missing())


def test_compile_many_keeps_order_and_caches(tmp_path):
    target, architecture = find("sm_90a")
    small = make_asm("not.b32 $0, $1;", "=r,r")
    jobs = [CompileJob(source, architecture, target.spec) for source in (small, make_add(), small)]
    reports = []
    first = compile_many(jobs, 2, tmp_path, reports.append)
    assert sorted(r.index for r in reports) == [0, 1, 2]
    assert not any(r.cache_hit for r in reports)
    assert all(r.seconds > 0 for r in reports)
    assert [k.source for k in first] == [job.source for job in jobs]
    assert first[0] == first[2] == compile_kernel(jobs[0].source, architecture, target.spec)
    reports.clear()
    assert compile_many(jobs, 1, tmp_path, reports.append) == first
    assert all(r.cache_hit and r.seconds == 0 for r in reports)


def test_damaged_cache_entries_are_rebuilt(tmp_path):
    target, architecture = find("sm_90a")
    jobs = [CompileJob(make_add(), architecture, target.spec)]
    fresh = compile_many(jobs, 1, tmp_path)
    (entry,) = tmp_path.iterdir()
    whole = entry.read_bytes()
    for damage in (b"", whole[:-1], whole[:200] + b"!" + whole[201:], b"no newline"):
        entry.write_bytes(damage)
        assert KernelCache(tmp_path).load(entry.stem, jobs[0].source) is None
        assert compile_many(jobs, 1, tmp_path) == fresh
        assert entry.read_bytes() == whole


def test_cache_key_tells_inputs_apart(monkeypatch):
    target, architecture = find("sm_90a")
    other = find("sm_100a")[1]
    add = make_add()
    keys = {
        cache_key(add, architecture),
        cache_key(add, other),
        cache_key(dataclasses.replace(add, num_warps=8), architecture),
        cache_key(dataclasses.replace(add, text=ADD + "\n"), architecture),
    }
    assert len(keys) == 4
    assert cache_key(dataclasses.replace(add, name="other"), architecture) in keys
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    assert cache_key(add, architecture) not in keys


def test_unwritable_cache_is_an_error(tmp_path):
    target, architecture = find("sm_90a")
    (tmp_path / "file").touch()
    with pytest.raises(ToolchainError, match="MMCOMPILE_CACHE"):
        compile_many([CompileJob(make_add(), architecture, target.spec)], 1, tmp_path / "file")


def test_default_cache_dir(monkeypatch):
    monkeypatch.setenv("MMCOMPILE_CACHE", "/a")
    assert default_cache_dir() == Path("/a")
    monkeypatch.delenv("MMCOMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert default_cache_dir() == Path("/b/mmcompile/kernels")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache/mmcompile/kernels"


def test_errors_cross_process_borders(tmp_path):
    target, architecture = find("sm_90a")
    bad = make_asm("no.such.thing $0, $1;", "=r,r")
    jobs = [CompileJob(source, architecture, target.spec) for source in (make_add(), bad)]
    with pytest.raises(ToolchainError) as caught:
        compile_many(jobs, 2, tmp_path)
    assert caught.value.where == "probe"
    assert caught.value.fix


def test_private_shared_memory_must_not_overlap_the_compilers():
    source = KernelSource("k", "", (), ("1", "1", "1"), private_shared=(1024, 4096))
    assert reserve_shared(1024, source) == 4096
    assert reserve_shared(77, dataclasses.replace(source, private_shared=None)) == 77
    with pytest.raises(ToolchainError, match="starts its own at 1024"):
        reserve_shared(1025, source)
