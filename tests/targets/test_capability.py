"""Triton's code of one capability for several architectures: equal where it is shared, and shared only there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from mmcompile.core.kernel import KernelSource, Parameter
from mmcompile.core.spec import Architecture, TargetSpec
from mmcompile.driver.targets import load_target
from mmcompile.targets import _toolchain
from mmcompile.targets._capability import code_capability
from mmcompile.targets._compile_pool import content_key
from mmcompile.targets._disassemble import count_instructions, disassemble_cubin
from mmcompile.targets._toolchain import CompileJob, compile_kernel, compile_many

_TEXT = """
import triton
import triton.language as tl

@triton.jit
def kernel(a, b, c):
    i = tl.arange(0, 64)
    place = i[:, None] * 64 + i[None, :]
    tl.store(c + place, PRODUCT)
"""
_DOT = "tl.dot(tl.load(a + place).to(tl.bfloat16), tl.load(b + place).to(tl.bfloat16))"
_SUM = "tl.sum(tl.sort(tl.load(a + place), 1), 1)[:, None] + tl.load(b + place)"


def make_source(product: str) -> KernelSource:
    parameters = tuple(Parameter(name, "*fp32", name) for name in "abc")
    return KernelSource("probe", _TEXT.replace("PRODUCT", product), parameters, ("1", "1", "1"))


def list_blackwell() -> list[tuple[Architecture, TargetSpec]]:
    specs = [load_target(name).spec for name in ("sm100", "sm107")]
    return [(architecture, spec) for spec in specs for architecture in spec.architectures]


def translate_alone(source: KernelSource, architecture: Architecture, spec: TargetSpec) -> str:
    """PTX of Triton asked for the architecture itself, without the name of the target."""
    text = _toolchain._translate(source, architecture.capability, architecture, spec).assembly
    return re.sub(r"^\.target .*$", "", text, flags=re.MULTILINE)


@pytest.mark.parametrize("product", [_DOT, pytest.param(_SUM, marks=pytest.mark.slow)])
def test_what_is_shared_is_equal(product: str) -> None:
    source = make_source(product)
    assert len({translate_alone(source, *each) for each in list_blackwell()}) == 1
    assert {code_capability(source, architecture) for architecture, _ in list_blackwell()} == {100}


def test_scaled_products_are_not_shared_with_rubin() -> None:
    source = dataclasses.replace(make_source(_DOT), text="tl.dot_scaled(...)")
    found = {architecture.name: code_capability(source, architecture) for architecture, _ in list_blackwell()}
    assert found == {"sm_100a": 100, "sm_103a": 100, "sm_107a": 107, "sm_100f": 100}


def test_a_family_is_translated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four architectures of two targets: one translation, four binaries, each with its ledger."""
    asked = []
    translate = _toolchain._translate
    monkeypatch.setattr(_toolchain, "_translate", lambda *a: asked.append(a[1]) or translate(*a))
    jobs = [CompileJob(make_source(_DOT), *each) for each in list_blackwell()]
    kernels = compile_many(jobs, 1, tmp_path)
    assert asked == [100]
    assert [kernel.architecture for kernel in kernels] == ["sm_100a", "sm_103a", "sm_107a", "sm_100f"]
    assert kernels[1] == compile_kernel(jobs[1].source, jobs[1].architecture, jobs[1].spec)
    for kernel in kernels:
        assert f".target {kernel.architecture}\n" in kernel.assembly
        listing = disassemble_cubin(kernel.binary)
        if listing is None:
            assert kernel.metadata["ledger_from"] == ["ptx"]
            continue
        held = {name: count for name, count in kernel.metadata["ledger"].items() if name[0].isupper()}
        assert held == count_instructions(listing, "cuda") and kernel.metadata["ledger_from"] == ["ptx", "sass"]


def make_counting(symbol: str, *, title: str = "", step: int = 2, kind: str = "i32") -> KernelSource:
    text = f'"""{title}"""\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(a, {symbol}):\n'
    text += f"    tl.store(a + {symbol}, {step} * {symbol})\n"
    return KernelSource("counting", text, (Parameter("a", "*fp32", "a"), Parameter(symbol, kind, symbol)), ("1",) * 3)


def test_names_of_symbols_and_titles_are_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two such sources are translated once, each into the bytes that it would have alone."""
    asked = []
    translate = _toolchain._translate
    monkeypatch.setattr(_toolchain, "_translate", lambda *a: asked.append(a[1]) or translate(*a))
    spec = load_target("sm90").spec
    sources = [make_counting("tokens", title="rows of tokens"), make_counting("batch"), make_counting("batch", step=3)]
    jobs = [CompileJob(source, spec.architectures[0], spec) for source in sources]
    kernels = compile_many(jobs, 1, tmp_path)
    assert len(asked) == 2
    assert [kernel.source for kernel in kernels] == sources
    assert kernels[1] == compile_kernel(sources[1], spec.architectures[0], spec)
    assert kernels[0].binary == kernels[1].binary != kernels[2].binary
    assert compile_many(jobs, 1, tmp_path) == kernels  # each under its own key in the cache


@pytest.mark.parametrize(
    "other",
    [
        make_counting("batch", step=3),
        make_counting("batch", kind="i64"),
        dataclasses.replace(make_counting("batch"), num_warps=8),
        dataclasses.replace(make_counting("batch"), max_registers=64),
        dataclasses.replace(make_counting("batch"), private_shared=(64, 128)),
        dataclasses.replace(make_counting("batch"), lanes=True),
    ],
)
def test_whatever_else_differs_is_compiled_apart(other: KernelSource) -> None:
    assert content_key(make_counting("tokens")) == content_key(make_counting("batch")) != content_key(other)


@pytest.mark.parametrize("word", ["noinline", "device_assert", "symbol1"])
def test_a_text_that_holds_names_of_its_own_is_not_shared(word: str) -> None:
    first, second = (
        dataclasses.replace(source, text=f"{source.text}    # {word}\n")
        for source in (make_counting("tokens"), make_counting("batch"))
    )
    assert content_key(first) != content_key(second)
