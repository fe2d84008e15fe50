"""Run the assemblers that Triton ships: PTX to cubin, gfx950 text to an object, and probes of single instructions."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mmcompile.core.errors import ToolchainError
from mmcompile.core.spec import Architecture

_PTX_PROBE = """.version {version}
.target {target}
.address_size 64
.visible .entry kernel(.param .u64 pointer) .maxntid 128
{{
.reg .pred p<4>;
.reg .b8 b<4>;
.reg .b16 h<4>;
.reg .b32 r<8>;
.reg .f32 f<8>;
.reg .b64 d<8>;
ld.param.u64 d0, [pointer];
ld.global.v4.b32 {{r0, r1, r2, r3}}, [d0];
ld.global.v4.f32 {{f0, f1, f2, f3}}, [d0 + 16];
ld.global.v4.b32 {{r4, r5, r6, r7}}, [d0 + 32];
ld.global.v2.b64 {{d1, d2}}, [d0 + 48];
mov.b64 d3, d2;
mov.b32 {{h1, h2}}, r1;
mov.b32 {{b0, b1, b2, b3}}, r2;
setp.ne.b32 p1, r7, 0;
{example}
st.global.b32 [d0 + 64], r0;
ret;
}}
"""


@contextlib.contextmanager
def capture_stderr() -> Iterator[list[str]]:
    """Collect what the process writes to file descriptor 2 (LLVM bypasses ``sys.stderr``); the list gets one text."""
    captured: list[str] = []
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield captured
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            captured.append(file.read().decode(errors="replace"))


def error_lines(text: str) -> list[str]:
    """The lines of a compiler's output that report an error."""
    return [line.strip() for line in text.splitlines() if re.search(r"\b(error|fatal)\b\s*:", line)]


def ptxas_path() -> Path:
    """The assembler Triton uses for sm_90 and newer (TRITON_PTXAS_BLACKWELL_PATH, else the one it ships)."""
    from triton import knobs

    return Path(knobs.nvidia.ptxas_blackwell.path)


def ptxas_version() -> str:
    """The CUDA release of that assembler, e.g. "13.4"."""
    from triton import knobs

    return str(knobs.nvidia.ptxas_blackwell.version)


def ptx_version() -> str:
    """The newest PTX ISA version that assembler takes, e.g. "9.4"."""
    from triton.backends.nvidia.compiler import ptx_get_version

    version = ptx_get_version(ptxas_version())
    return f"{version // 10}.{version % 10}"


def assemble_ptx(text: str, target: str, *, name: str = "kernel") -> tuple[bytes, str]:
    """Assemble PTX for ``target`` (e.g. "sm_100f") with Triton's own options.

    Returns the cubin and the log of ``ptxas -v``. Raises ToolchainError with ptxas' words; ``name`` names the kernel.
    """
    with tempfile.TemporaryDirectory(prefix="mmcompile-") as folder:
        source, output = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        options = ["-lineinfo", "-suppress-debug-info", "-v", "--regAllocOptLevel=2", f"--gpu-name={target}"]
        command = [str(ptxas_path()), *options, str(source), "-o", str(output)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        log = (result.stdout + result.stderr).replace(folder + os.sep, "")
        if result.returncode or not output.exists():
            reasons = "; ".join(error_lines(log)) or log.strip() or f"exit status {result.returncode}"
            raise ToolchainError(
                f"ptxas {ptxas_version()} rejects {name!r} for {target}: {reasons}",
                fix="use the portable form of the instruction or a newer ptxas (TRITON_PTXAS_BLACKWELL_PATH)",
            )
        return output.read_bytes(), log


def assemble_amdgcn(text: str, target: str, *, name: str = "kernel") -> bytes:
    """Assemble AMD text for ``target`` ("gfx950") to an object file; raises ToolchainError with LLVM's words."""
    from triton.backends.amd.compiler import assemble_amdgcn as assemble

    failure = ""
    with capture_stderr() as captured:
        try:
            binary = assemble(text, target, "")
        except Exception as error:  # Triton raises plain RuntimeErrors from its C library
            failure = str(error)
    reasons = error_lines(captured[0]) or ([failure] if failure else [])
    if reasons:
        raise ToolchainError(
            f"LLVM rejects {name!r} for {target}: {'; '.join(reasons)}",
            fix="use the portable form of the instruction",
        )
    return bytes(binary)


def probe_instruction(example: str, architecture: Architecture, *, version: str = "") -> bytes:
    """Assemble one instruction for an architecture; raises ToolchainError if its assembler rejects it.

    PTX examples may use b<4>, h<4>, r<8>, f<8>, d<8>, p1, of which r0 is stored; AMD examples any register.
    ``version`` is the PTX ISA version to declare, by default the newest the assembler takes.
    """
    if isinstance(architecture.capability, str):
        return assemble_amdgcn(f"kernel:\n  {example}\n  s_endpgm\n", architecture.name, name=example)
    text = _PTX_PROBE.format(version=version or ptx_version(), target=architecture.name, example=example)
    return assemble_ptx(text, architecture.name, name=example)[0]
