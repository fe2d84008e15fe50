"""Compose tile functions, intrinsics and an entry point into one self-contained Triton source file."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

from mmcompile.core.kernel import KernelParts, KernelSource, Parameter
from mmcompile.core.spec import Architecture
from mmcompile.targets._intrinsics import launch_cuda

HEADER = '''"""{title}

Emitted by mmcompile. Self-contained: needs only Triton. Shapes and dtypes are baked in.
"""
import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
'''
_AROUND = ("wait_for_launch", "release_launch")


def _python_function(function: Any) -> Any:
    """The plain function under a JITFunction or an interpreted one; None for anything else."""
    inner = getattr(function, "fn", None)
    return inner if inspect.isfunction(inner) and type(function).__module__.startswith("triton.") else None


def collect_functions(function: Any, replacements: Mapping[str, Any], seen: dict[str, str]) -> None:
    """Add the sources of ``function`` and of every jit function it calls to ``seen``, callees first."""
    inner = _python_function(replacements.get(_python_function(function).__name__, function))
    if inner.__name__ in seen:
        return
    for name in inner.__code__.co_names:
        callee = inner.__globals__.get(name)
        if callee is not None and _python_function(callee) is not None and name not in seen and name != inner.__name__:
            collect_functions(callee, replacements, seen)
    seen[inner.__name__] = _read_source(inner)


@cache
def _read_source(function: FunctionType) -> str:
    return textwrap.dedent(inspect.getsource(function))


def emit_kernel(
    *,
    name: str,
    title: str,
    tiles: Sequence[Any],
    constants: Mapping[str, int | float | bool | str],
    parameters: Sequence[Parameter],
    body: str,
    grid: tuple[str, str, str],
    intrinsics: Mapping[str, Any] | None = None,
    num_warps: int = 4,
    num_stages: int = 2,
    ledger: Mapping[str, bool] | None = None,
    replicable: bool = False,
    prefetch: str = "",
    gated: bool = False,
    early: Architecture | None = None,
) -> KernelSource:
    """Write the source of one kernel.

    Args:
        tiles: the @triton.jit functions that ``body`` calls; what they call in turn is found by itself.
        constants: module-level constexprs, by UPPER_CASE name; ``tl`` dtypes are given as strings "tl.bfloat16".
        parameters: run-time arguments of the entry point, in order.
        body: statements of the entry point, e.g. "tile_rms_norm(tl.program_id(0), x, weight, result, N, EPS)".
        intrinsics: jit functions that replace those of the same name (a target's own versions).
        replicable: see KernelSource. prefetch, gated: see KernelParts.
        early: the architecture, for a kernel that may be launched while the one before it still runs: where there is
            such a thing it waits by itself, and by that the runtime knows (Binary.early).
    """
    sources: dict[str, str] = {}
    statements = ("gate = None\n" if gated else "") + textwrap.dedent(body).strip()
    if early is not None and "griddepcontrol" in early.features:
        tiles = [launch_cuda.wait_for_launch, *tiles, launch_cuda.release_launch]
        statements = f"wait_for_launch()\n{statements}\nrelease_launch()"
    for tile in tiles:
        collect_functions(tile, intrinsics or {}, sources)
    lines = [HEADER.format(title=title)]
    lines += [f"{key} = tl.constexpr({value})" for key, value in constants.items()]
    functions = "\n\n".join(text.strip() for text in sources.values())
    signature = ", ".join(p.name for p in parameters)
    entry = f"@triton.jit\ndef {name}({signature}):\n{textwrap.indent(statements, '    ')}"
    alias = f"kernel = {name}  # the entry point; profilers show the longer name"
    text = "\n\n\n".join(["\n".join(lines), functions, entry, alias]) + "\n"
    parts = KernelParts(
        tuple((key, value.strip()) for key, value in sources.items() if key not in _AROUND),
        tuple((key, str(value)) for key, value in constants.items()),
        textwrap.dedent(body).strip(),
        prefetch,
        gated,
    )
    return KernelSource(
        name, text, tuple(parameters), grid, num_warps, num_stages, dict(ledger or {}),
        parts=parts, replicable=replicable,
    )  # fmt: skip
