"""MXFP8: 8-bit E4M3 elements with one power-of-two (E8M0) scale per block of 32 (OCP Microscaling v1.0).

A weight [n, k] (k, the reduction axis, a multiple of 32) is stored as

* ``values`` float8_e4m3fn [n, k],
* ``scale`` uint8 [n, k/32]: a biased exponent, ``2 ** (scale - 127)``; the code 255 is NaN.

``weight = values * 2 ** (scale - 127)``. Checkpoints name the scale ``weight_scale_inv`` (MiniMax) or ``weight_scale``
(ModelOpt, compressed-tensors); in spite of the first name it multiplies in all of them.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from mmcompile.core.errors import CheckpointError

Rule = Literal["ocp", "modelopt", "compressed-tensors"]

BLOCK = 32
E4M3_MAX = 448.0
SCALE_BIAS = 127
SCALE_NAN = 255
LARGEST_WEIGHT = 2688.0
_E4M3_EXPONENT = 8  # of the largest E4M3 value: 448 = 1.75 * 2**8


def encode(weight: Tensor, *, rule: Rule | str = "modelopt") -> tuple[Tensor, Tensor]:
    """Quantize ``weight`` [..., k].

    Args:
        weight: finite, any float dtype, computed in fp32; a meta tensor gives meta results.
        rule: how the exponent of a block follows from its largest magnitude ``amax``:

            ==================  ===========================================  =========================
            rule                exponent                                     largest element
            ==================  ===========================================  =========================
            ocp                 floor(log2(amax)) - 8 (OCP MX v1.0, 6.3)     may saturate
            modelopt            ceil(log2(amax / 448)), exactly              never saturates
            compressed-tensors  as ocp, 1.75 * 2^e and more as 2^(e+1)       never saturates
            ==================  ===========================================  =========================

            ModelOpt, cuBLAS and TransformerEngine use the second. ModelOpt takes log2 in fp32, which can give one less
            where amax is within a few units in the last place above 448 * 2^e; no bf16 or fp16 value is.

    Elements are rounded to nearest even and saturate at 448. An all-zero block has the scale code 0 in every rule.

    Returns: values float8_e4m3fn [..., k], scale uint8 [..., k/32].
    Raises ValueError for a wrong shape or rule, or for NaN or infinity in ``weight``.
    """
    if not weight.ndim or weight.shape[-1] % BLOCK:
        raise ValueError(f"MXFP8 needs a last dimension that is a multiple of {BLOCK}, got {tuple(weight.shape)}")
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be one of {get_args(Rule)}, got {rule!r}")
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("cannot quantize a weight that holds NaN or infinity")
    blocks = split_blocks(weight.float())
    scale = choose_scale(blocks.abs().amax(-1), rule)
    # Two exact steps: 2 ** (127 - scale) alone would not be a normal fp32 number for every scale.
    half = (SCALE_BIAS - scale.int()) // 2
    scaled = torch.ldexp(torch.ldexp(blocks, half[..., None]), (SCALE_BIAS - scale.int() - half)[..., None])
    values = scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.flatten(-2), scale


def split_blocks(x: Tensor) -> Tensor:
    """View [..., k] as [..., k/32, 32]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def choose_scale(amax: Tensor, rule: Rule | str) -> Tensor:
    """Scale codes uint8 for the largest magnitudes ``amax`` (fp32, finite, not negative) of blocks, same shape."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa * 2**exponent, 0.5 <= mantissa < 1
    power = exponent - 1 - _E4M3_EXPONENT
    if rule != "ocp":
        # 448 is 0.875 * 2**9, the largest value of its binade: exactly above it the next power is needed.
        beyond = mantissa > 0.875 if rule == "modelopt" else mantissa >= 0.875
        power = power + beyond.to(power.dtype)
    power = torch.where(amax == 0, torch.full_like(power, -SCALE_BIAS), power)
    return (power.clamp(-SCALE_BIAS, SCALE_NAN - 1 - SCALE_BIAS) + SCALE_BIAS).to(torch.uint8)


def decode(values: Tensor, scale: Tensor) -> Tensor:
    """Return ``values * 2 ** (scale - 127)`` as fp32 [..., k], exact while it lies in fp32's range.

    Args:
        values: float8_e4m3fn [..., k]. scale: uint8 [..., k/32]; its code 255 gives NaN.
    """
    blocks = split_blocks(values.float())
    return (blocks * decode_scale(scale)[..., None]).flatten(-2)


def decode_scale(scale: Tensor) -> Tensor:
    """The fp32 value ``2 ** (scale - 127)`` of uint8 codes, exact (code 0 is subnormal), NaN for code 255."""
    codes = scale.int()
    # The code is fp32's own exponent field, but for 0 (2^-127, a subnormal) and 255 (NaN).
    bits = torch.where(codes == 0, 1 << 22, torch.where(codes == SCALE_NAN, 0x7FC00000, codes << 23))
    return bits.to(torch.int32).view(torch.float32)


def check_parts(values: Tensor, scale: Tensor, where: str) -> None:
    """Raise CheckpointError unless the two tensors are a plausible MXFP8 weight.

    Args:
        values: float8_e4m3fn [n, k]. scale: uint8 [n, k/32]. where: tensor and file, for the message.

    No element may be NaN and no scale code 255. A scale that was stored inverted (2^-e for 2^e) shows in the largest
    magnitude: a block of true maximum m then appears with 448^2 / m or more, beyond any weight.
    """
    if values.dtype != torch.float8_e4m3fn or values.ndim != 2 or values.shape[1] % BLOCK or not values.shape[1]:
        raise CheckpointError(
            f"MXFP8 weight must be float8_e4m3fn [n, k] with k a multiple of {BLOCK}, "
            f"got {values.dtype} {list(values.shape)}",
            where=where,
        )
    shape = (values.shape[0], values.shape[1] // BLOCK)
    if scale.dtype != torch.uint8 or tuple(scale.shape) != shape:
        raise CheckpointError(
            f"MXFP8 scales must be uint8 {list(shape)}, got {scale.dtype} {list(scale.shape)}", where=where
        )
    if bool((scale == SCALE_NAN).any()):
        raise CheckpointError(f"MXFP8 scale is NaN (code {SCALE_NAN})", where=where, fix="export the checkpoint again")
    if bool(((values.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise CheckpointError("MXFP8 element is NaN", where=where, fix="export the checkpoint again")
    amax = split_blocks(values.float().abs()).amax(-1)
    largest = float((amax * decode_scale(scale)).max()) if amax.numel() else 0.0
    if largest > LARGEST_WEIGHT:
        raise CheckpointError(
            f"MXFP8 scales give weights up to {largest:.3g}, which no model has",
            where=where,
            fix="check the scale convention: the scale multiplies and its code is an exponent with bias 127",
        )
