"""Helpers of the tests: launching kernels on numpy arrays, and number formats written down independently."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmcompile.emulate.launch import Launch, Report
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import run_kernel


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits, by truncating after adding half a unit (to nearest even)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_float8(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """The value of each of the 256 codes, one by one."""
    values = []
    for code in range(256):
        sign = -1.0 if code & 128 else 1.0
        exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            value = mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
        if exponent_bits == 4 and code & 127 == 127:
            value = np.nan
        if exponent_bits == 5 and exponent == 31:
            value = np.nan if mantissa else np.inf
        values.append(sign * value)
    return np.array(values)


E4M3, E5M2 = make_float8(4, 3, 7), make_float8(5, 2, 15)


def unpack_fp4(packed: np.ndarray) -> np.ndarray:
    """Bytes [rows, n] to values [rows, 2n]."""
    result = np.empty((packed.shape[0], 2 * packed.shape[1]))
    result[:, 0::2], result[:, 1::2] = E2M1[packed & 15], E2M1[packed >> 4]
    return result


def launch(compiled, grid, arguments, *, inputs: int = 0, unknown: tuple[int, ...] = (), **options) -> Report:
    """Run on numpy arrays; arrays are updated in place. The first ``inputs`` arrays are read-only; ``unknown`` lists
    positions of arrays without contents."""
    memory = DeviceMemory()
    values, arrays = [], []
    for position, argument in enumerate(arguments):
        if isinstance(argument, np.ndarray):
            address = memory.register(
                argument, f"argument{position}", writable=position >= inputs, known=position not in unknown
            )
            arrays.append((address, argument))
            values.append(address)
        else:
            values.append(argument)
    programs = grid if isinstance(grid, tuple) else (grid, 1, 1)
    try:
        return run_kernel(
            Launch(
                compiled.assembly, compiled.name, programs, compiled.threads, compiled.shared, values, memory, **options
            )
        )
    finally:
        for address, array in arrays:
            array.reshape(-1).view(np.uint8)[:] = memory.contents(address)


HEADER = """	.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
	.text
	.type	snippet,@function
snippet:
"""
FOOTER = """	s_endpgm
.Lfunc_end0:
	.size	snippet, .Lfunc_end0-snippet
	.amdhsa_kernel snippet
		.amdhsa_kernarg_size 16
		.amdhsa_private_segment_fixed_size 64
		.amdhsa_user_sgpr_count 2
		.amdhsa_user_sgpr_kernarg_segment_ptr 1
		.amdhsa_system_sgpr_workgroup_id_x 1
	.end_amdhsa_kernel
	.amdgpu_metadata
amdhsa.kernels:
  - .args:
      - .offset: 0
        .size: 8
        .value_kind: global_buffer
      - .offset: 8
        .size: 8
        .value_kind: global_buffer
    .group_segment_fixed_size: 0
    .name: snippet
	.end_amdgpu_metadata
"""


@dataclass
class Snippet:
    """Looks like a compiled kernel to ``launch``."""

    assembly: str
    name: str = "snippet"
    threads: int = 64
    shared: int = 1024


def make_snippet(body: str, inputs: int = 0, outputs: list[str] | None = None, threads: int = 64) -> Snippet:
    """A kernel around ``body``. Inputs arrive in v1, v2, ...; ``outputs`` are stored. s[4:5] points to the inputs
    (dwords [inputs, threads]), s[6:7] to the outputs, s2 is the program, v250 holds 4 * thread."""
    lines = ["s_load_dwordx4 s[4:7], s[0:1], 0x0", "v_lshlrev_b32_e32 v250, 2, v0", "s_waitcnt lgkmcnt(0)"]
    lines += [f"global_load_dword v{k + 1}, v250, s[4:5] offset:{4 * threads * k}" for k in range(inputs)]
    lines += ["s_waitcnt vmcnt(0)"] * bool(inputs) + body.strip().split("\n")
    lines += [
        f"global_store_dword v250, {register}, s[6:7] offset:{4 * threads * k}"
        for k, register in enumerate(outputs or [])
    ]
    code = "".join(line.strip() + "\n" if line.strip().endswith(":") else f"\t{line.strip()}\n" for line in lines)
    return Snippet(HEADER + code + FOOTER, threads=threads)


def run_snippet(
    body: str, inputs: list[np.ndarray], outputs: list[str], threads: int = 64, **options
) -> list[np.ndarray]:
    """Run one program; inputs and outputs are uint32 [threads]."""
    snippet = make_snippet(body, len(inputs), outputs, threads)
    given = np.stack([np.asarray(x, np.uint32) for x in inputs]) if inputs else np.zeros((1, threads), np.uint32)
    result = np.zeros((max(len(outputs), 1), threads), np.uint32)
    launch(snippet, 1, [given, result], inputs=1, **options)
    return list(result)
