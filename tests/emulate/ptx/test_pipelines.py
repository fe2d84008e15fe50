"""Triton-compiled kernels with wgmma, TMA, tcgen05, NVFP4 and warp specialisation: right in every mode, silent in the
race check; and the synchronisation instructions of their text deleted one class at a time."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mmcompile.emulate import formats
from mmcompile.emulate.faults import EmulationFault
from mmcompile.emulate.launch import Launch, TensorMap
from mmcompile.emulate.memory import DeviceMemory
from mmcompile.emulate.run import list_unknown, run_kernel

RNG = np.random.default_rng(23)


@triton.jit
def dot(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + n[None, :] * K + (start + k)[:, None])
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * BN + n[None, :], total)


@triton.jit
def tensor_dot(a, b, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPECIALIZE: tl.constexpr):
    first_m, first_n = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIALIZE, num_stages=3):
        total = tl.dot(a.load([first_m, k]), b.load([first_n, k]).T, total)
    c.store([first_m, first_n], total)


@triton.jit
def scaled_dot(a, sa, b, sb, c, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    m, n, k, s = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK // 2), tl.arange(0, BK // 16)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        x = tl.load(a + m[:, None] * (K // 2) + start // 2 + k[None, :])
        y = tl.load(b + n[None, :] * (K // 2) + (start // 2 + k)[:, None])
        xs = tl.load(sa + m[:, None] * (K // 16) + start // 16 + s[None, :])
        ys = tl.load(sb + n[:, None] * (K // 16) + start // 16 + s[None, :])
        total = tl.dot_scaled(x, xs, "e2m1", y, ys, "e2m1", total)
    tl.store(c + m[:, None] * BN + n[None, :], total)


@triton.jit
def tensor_scaled_dot(a, sa, b, sb, c, K, BK: tl.constexpr, RK: tl.constexpr, SPECIALIZE: tl.constexpr):
    total = tl.zeros((128, 128), tl.float32)
    for i in tl.range(0, tl.cdiv(K, BK), warp_specialize=SPECIALIZE, num_stages=3):
        x, y = a.load([0, i * (BK // 2)]), b.load([0, i * (BK // 2)])
        xs = sa.load([0, 0, i * RK, 0, 0]).reshape(1, RK, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(128, BK // 16)
        ys = sb.load([0, 0, i * RK, 0, 0]).reshape(1, RK, 32, 4, 4).trans(0, 3, 2, 1, 4).reshape(128, BK // 16)
        total = tl.dot_scaled(x, xs, "e2m1", y.T, ys, "e2m1", total)
    c.store([0, 0], total)


@triton.jit
def attention(Q, K, V, out, scale, BM: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, SPECIALIZE: tl.constexpr):
    first, r = tl.program_id(0) * BM, tl.arange(0, BL)
    h = first + tl.arange(0, BM)
    q = Q.load([first, 0])
    m, sums = tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32)
    total = tl.zeros((BM, D), tl.float32)
    for i in tl.range(0, first + BM, BL, warp_specialize=SPECIALIZE):
        s = tl.dot(q, K.load([i, 0]).T) * (scale * 1.4426950408889634)
        s = tl.where(h[:, None] >= (i + r)[None, :], s, -1.0e30)
        new = tl.maximum(m, tl.max(s, 1))
        e, c = tl.exp2(s - new[:, None]), tl.exp2(m - new)
        sums, total = sums * c + tl.sum(e, 1), total * c[:, None]
        total = tl.dot(e.to(tl.bfloat16), V.load([i, 0]), total)
        m = new
    out.store([first, 0], total / sums[:, None])


@dataclass
class Case:
    """A compiled kernel with its arguments; ``check``: relative error of the last array."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: list[Any]
    wanted: np.ndarray
    tolerance: float = 2e-6

    @property
    def text(self) -> str:
        return self.kernel.asm["ptx"]

    def run(self, text=None, **options):
        """The largest error relative to the largest value. Arrays and (array, metadata) become buffers and maps."""
        memory, arguments, output = DeviceMemory(), [], 0
        for value in self.arguments:
            if isinstance(value, tuple):
                array, meta = value
                output = memory.register(array, f"argument {len(arguments)}")
                strides = [s // array.itemsize for s in array.strides]
                arguments += [make_map(output, array, meta), *array.shape, *strides]
            elif isinstance(value, np.ndarray):
                output = memory.register(value, f"argument {len(arguments)}")
                arguments.append(output)
            else:
                arguments.append(value)
        metadata = self.kernel.metadata
        threads, shared = 32 * metadata.num_warps, metadata.shared
        launch = Launch(text or self.text, metadata.name, self.grid, threads, shared, arguments, memory, **options)
        report = run_kernel(launch)
        found = memory.contents(output).view(np.float32).reshape(self.wanted.shape)
        error = np.abs(found - self.wanted).max() / np.abs(self.wanted).max()
        return (error if error == error else np.inf), report


def make_map(address, array, meta):
    box = [*meta["block_size"][:-1], meta["block_size"][-1] // (2 if meta.get("fp4_padded") else 1)]
    span = {0: 0, 1: 32, 2: 64, 3: 128}[meta["swizzle"]]
    padded = bool(meta.get("fp4_padded"))
    return TensorMap(address, array.itemsize, array.shape, array.strides, tuple(box), span, padded)


def compile_kernel(function, signature, constants, target):
    names = function.arg_names
    full = {name: signature.get(name, "constexpr") for name in names}
    even = [name for name, kind in signature.items() if kind[0] == "*" or kind == "i32"]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(function, signature=full, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options={"enable_fp_fusion": True})


def bf16(*shape):
    bits = formats.encode_bf16(RNG.standard_normal(shape).astype(np.float32))
    return bits, formats.decode_bf16(bits).astype(np.float64)


def nvfp4(rows, depth):
    codes = RNG.integers(0, 256, (rows, depth // 2)).astype(np.uint8)
    scales = RNG.integers(0x20, 0x50, (rows, depth // 16)).astype(np.uint8)
    values = formats.decode("e2m1", formats.unpack_nibbles(codes)).astype(np.float64)
    return codes, scales, values * formats.decode("e4m3", scales).astype(np.float64).repeat(16, axis=1)


def make_dot(target):
    (a, x), (b, y), c = bf16(128, 192), bf16(64, 192), np.zeros((128, 64), np.float32)
    signature = {"a": "*bf16", "b": "*bf16", "c": "*fp32", "K": "i32"}
    kernel = compile_kernel(dot, signature, {"BM": 128, "BN": 64, "BK": 64}, target)
    return Case(kernel, (1, 1, 1), [a, b, c, 192], x @ y.T)


def make_tensor_dot(target, specialize):
    (a, x), (b, y), c = bf16(200, 320), bf16(128, 320), np.zeros((200, 128), np.float32)
    kinds = {"a": "tensordesc<bf16[128,64]>", "b": "tensordesc<bf16[128,64]>", "c": "tensordesc<fp32[128,128]>"}
    kinds["K"] = "i32"
    constants = {"BM": 128, "BN": 128, "BK": 64, "SPECIALIZE": specialize}
    kernel = compile_kernel(tensor_dot, kinds, constants, target)
    maps = [*zip((a, b, c), kernel.metadata.tensordesc_meta, strict=True)]
    return Case(kernel, (2, 1, 1), [*maps, 320], x @ y.T)


def make_scaled_dot(target):
    (a, sa, x), (b, sb, y), c = nvfp4(128, 256), nvfp4(128, 256), np.zeros((128, 128), np.float32)
    kinds = {"a": "*u8", "sa": "*fp8e4nv", "b": "*u8", "sb": "*fp8e4nv", "c": "*fp32", "K": "i32"}
    kernel = compile_kernel(scaled_dot, kinds, {"BM": 128, "BN": 128, "BK": 128}, target)
    return Case(kernel, (1, 1, 1), [a, sa, b, sb, c, 256], x @ y.T)


def make_tensor_scaled_dot(target, specialize):
    (a, sa, x), (b, sb, y), c = nvfp4(128, 512), nvfp4(128, 512), np.zeros((128, 128), np.float32)
    box = "tensordesc<fp8e4nv[1,1,4,2,256]>"
    kinds = {"a": "tensordesc<u8[128,128]>", "sa": box, "b": "tensordesc<u8[128,128]>", "sb": box,
             "c": "tensordesc<fp32[128,128]>", "K": "i32"}  # fmt: skip
    kernel = compile_kernel(tensor_scaled_dot, kinds, {"BK": 256, "RK": 4, "SPECIALIZE": specialize}, target)

    def reorder(s):  # 128 x 4 blocks of scales as the tensor core wants them
        parts = s.reshape(1, 4, 32, s.shape[1] // 4, 4).transpose(0, 3, 2, 1, 4)
        return np.ascontiguousarray(parts).reshape(1, 1, s.shape[1] // 4, 2, 256)

    maps = [*zip((a, reorder(sa), b, reorder(sb), c), kernel.metadata.tensordesc_meta, strict=True)]
    return Case(kernel, (1, 1, 1), [*maps, 512], x @ y.T)


def make_attention(target, specialize):
    (q, x), (k, y), (v, z), o = bf16(256, 64), bf16(256, 64), bf16(256, 64), np.zeros((256, 64), np.float32)
    kinds = {n: f"tensordesc<bf16[{128 if n == 'Q' else 64},64]>" for n in "QKV"}
    kinds |= {"out": "tensordesc<fp32[128,64]>", "scale": "fp32"}
    constants = {"BM": 128, "D": 64, "BL": 64, "SPECIALIZE": specialize}
    kernel = compile_kernel(attention, kinds, constants, target)
    scores = np.where(np.tri(256) > 0, x @ y.T * 0.125, -np.inf)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    maps = [*zip((q, k, v, o), kernel.metadata.tensordesc_meta, strict=True)]
    wanted = weights / weights.sum(1, keepdims=True) @ z
    return Case(kernel, (2, 1, 1), [*maps, np.float32(0.125).tobytes()], wanted, 6e-3)


MAKERS = {
    "dot-sm90": (make_dot, 90), "dot-sm103": (make_dot, 103), "tma-sm90": (make_tensor_dot, 90, False),
    "tma-sm100": (make_tensor_dot, 100, False), "tma-ws-sm100": (make_tensor_dot, 100, True),
    "nvfp4-sm100": (make_scaled_dot, 100), "nvfp4-sm107": (make_scaled_dot, 107),
    "tma-nvfp4-ws-sm107": (make_tensor_scaled_dot, 107, True), "tma-nvfp4-sm103": (make_tensor_scaled_dot, 103, False),
    "attention-sm90": (make_attention, 90, False), "attention-ws-sm100": (make_attention, 100, True),
}  # fmt: skip
FAST = ("dot-sm90", "dot-sm103", "tma-ws-sm100", "nvfp4-sm107", "attention-ws-sm100")
FAST_LOSSES = ("dot-sm90", "dot-sm103", "tma-ws-sm100", "tma-nvfp4-sm103")
"""In these every class of ``CLASSES`` occurs."""
_CASES: dict[str, Case] = {}


def find_case(name):
    if name not in _CASES:
        maker, *arguments = MAKERS[name]
        _CASES[name] = maker(*arguments)
    return _CASES[name]


NAMES = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MAKERS]
LATE_WARP = {"late": True, "schedule": "warp", "seed": 5}
MODES = {
    "eager": {}, "late": {"late": True}, "late-warp": LATE_WARP, "races": {"check_races": True},
    "late-warp-races": {**LATE_WARP, "check_races": True},
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_right_in_every_mode(name, options):
    case = find_case(name)
    error, report = case.run(**options)
    assert error <= case.tolerance
    assert report.instructions > 10_000 and report.coverage > 0.8


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_unknown(name):
    case = find_case(name)
    assert list_unknown(case.text, case.kernel.metadata.name) == []


CLASSES = {
    "bar.sync": r"^\s*(?:bar|barrier)\.sync[^;]*;",
    "cp.async.wait_group": r"^\s*cp\.async\.wait_group[^;]*;",
    "wgmma.wait_group": r"wgmma\.wait_group[^;]*;",
    "wgmma.commit_group": r"wgmma\.commit_group[^;]*;",
    "mbarrier wait": r"@!complete bra\.uni waitLoop;",
    "bulk wait_group": r"cp\.async\.bulk\.wait_group[^;]*;",
    "tcgen05.commit": r"@%\w+ tcgen05\.commit[^;]*;",
    "mbarrier.arrive": r"@%\w+ mbarrier\.arrive[^;]*;",
    "tcgen05.wait": r"tcgen05\.wait[^;]*;",
    "fence.proxy.async": r"fence\.proxy\.async[^;]*;",
    "scales": r"tcgen05\.cp[^;]*;",
}
"""Classes of instructions whose loss must be noticed."""
FINDERS = [{"late": True}, LATE_WARP, {"check_races": True}, {"late": True, "check_races": True}]


def find_outcome(case, text, finders=None):
    """How the loss shows: the kind of a fault, "wrong", or "missed"."""
    for options in finders or FINDERS:
        try:
            error, _ = case.run(text, **options)
        except EmulationFault as fault:
            return fault.kind
        if not error <= case.tolerance:
            return "wrong"
    return "missed"


@pytest.mark.parametrize("what", CLASSES)
def test_fast_cases_hold_every_class(what):
    assert any(re.search(CLASSES[what], find_case(name).text, flags=re.M) for name in FAST_LOSSES)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST_LOSSES else pytest.mark.slow) for n in MAKERS])
def test_a_lost_class_of_synchronisation_is_noticed(name):
    case = find_case(name)
    missed = []
    for what, pattern in CLASSES.items():
        text = re.sub(pattern, "", case.text, flags=re.M)
        if text != case.text and find_outcome(case, text) == "missed":
            missed.append(what)
    assert missed == []
