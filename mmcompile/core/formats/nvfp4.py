"""NVFP4: 4-bit E2M1 elements, one E4M3 scale per block of 16 and one FP32 global scale per tensor.

A weight [n, k] (k, the reduction axis, a multiple of 16) is stored as

* ``packed`` uint8 [n, k/2]: element 2i in the low nibble of byte i, element 2i+1 in the high nibble,
* ``scale`` float8_e4m3fn [n, k/16]: one positive scale per 16 consecutive elements,
* ``global_scale`` fp32 scalar, in this project always the *multiplier*:
  ``weight = e2m1 * scale * global_scale``. See :func:`to_multiplier` for what checkpoints store.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from mmcompile.core.errors import CheckpointError

Convention = Literal["modelopt", "compressed-tensors"]
Method = Literal["max6", "search"]

BLOCK = 16
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_SMALLEST = 2.0**-9
FULL_RANGE = E2M1_MAX * E4M3_MAX
SMALLEST_WEIGHT_MAX = 1e-8
SCALE_TILE = (128, 4)

# Midpoints between neighbouring values. A tie goes to the even code, so at the midpoints below an even code
# (0.75, 1.75, 3.5) the tie rounds up: there the bound is the float just below the midpoint.
_MIDPOINTS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_ROUND_UP_ABOVE = torch.where(
    torch.tensor([False, True, False, True, False, True, False]),
    torch.nextafter(_MIDPOINTS, torch.zeros(7)),
    _MIDPOINTS,
)
_VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)])
# Both values of every byte, [256] of 8 bytes: one gather decodes two elements.
_BYTE_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)
_BYTE_PAIRS = _BYTE_PAIRS.view(torch.int64).flatten()


def encode_e2m1(x: Tensor) -> Tensor:
    """Round ``x`` (any float dtype and shape) to E2M1 codes, uint8 in 0..15: ``sign << 3 | magnitude code``.

    Round to nearest, ties to the even code, saturating at 6. The sign is that of ``x < 0``, as in ModelOpt and
    in compressed-tensors on the CPU: -0.0 gives code 0, but a negative number that rounds to zero gives code 8
    (-0). ``x`` must not be NaN.
    """
    x = x.float()
    magnitude = torch.bucketize(x.abs(), _ROUND_UP_ABOVE.to(x.device), out_int32=True).to(torch.uint8)
    return magnitude | ((x < 0).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Return the fp32 values of uint8 ``codes`` 0..15, same shape. Code 8 is -0.0."""
    return _VALUES.to(codes.device)[codes.int()]


def pack_codes(codes: Tensor) -> Tensor:
    """Pack uint8 codes [..., k] in pairs, even element in the low nibble. Returns uint8 [..., k/2]."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_codes`: uint8 [..., k/2] to uint8 [..., k]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)


def decode_blocks(packed: Tensor, scale: Tensor) -> Tensor:
    """Return ``e2m1 * scale`` as fp32 [n, k], exact, without the global scale.

    Args:
        packed: uint8 [n, k/2]. scale: float8_e4m3fn [n, k/16].
    """
    rows, half = packed.shape
    pairs = torch.index_select(_BYTE_PAIRS.to(packed.device), 0, packed.flatten().int())
    values = pairs.view(torch.float32).view(rows, half * 2 // BLOCK, BLOCK)
    return values.mul_(scale.float()[..., None]).view(rows, half * 2)


def to_multiplier(value: Tensor, convention: Convention) -> Tensor:
    """Convert a stored global scale to the fp32 multiplier of this project, same shape.

    ModelOpt's ``weight_scale_2`` is the multiplier amax / (6 * 448). The ``weight_global_scale`` of
    compressed-tensors is its reciprocal, (6 * 448) / amax, which dequantization divides by.
    """
    if convention not in get_args(Convention):
        raise ValueError(f"convention must be one of {get_args(Convention)}, got {convention!r}")
    value = value.float()
    return value if convention == "modelopt" else 1.0 / value


def encode(
    weight: Tensor,
    *,
    method: Method | str = "max6",
    global_scale: Tensor | None = None,
    convention: Convention = "modelopt",
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``weight`` [n, k].

    Args:
        weight: finite, any float dtype, computed in fp32; a meta tensor gives meta results.
        method: "max6" maps the largest element of each block to 6. "search" also tries mapping it to 4 and keeps
            the scale with the smaller squared error, 6 on a tie (FourOverSix, with the global scale unchanged, so
            that no block is ever worse than with max6; a block whose scale would exceed 448 cannot choose 4).
        global_scale: multiplier to use instead of ``max|weight| / (6 * 448)``; larger blocks saturate.
        convention: whose rounding to reproduce bit for bit (for fp32 weights):

            ================  ==================================  ================================
            step              modelopt                            compressed-tensors
            ================  ==================================  ================================
            global            s = amax / 2688                     g = 2688 / amax
            block scale       e4m3(block_amax / (6 * s))          e4m3(g * (block_amax / 6))
            underflow         clamped to 2^-9 before rounding     0.125 where it rounds to zero
            all-zero block    1.0                                 0.125
            element           e2m1(x / (scale * s))               e2m1(x / (scale / g))
            ================  ==================================  ================================

            An all-zero tensor gets the global scale 1.0 in both (ModelOpt itself would divide by zero).

    Returns: packed uint8 [n, k/2], scale float8_e4m3fn [n, k/16], multiplier fp32 scalar (s, or 1 / g).
    Raises ValueError for a wrong shape, method or convention, or for NaN or infinity in ``weight``.
    """
    _check_encode_arguments(weight, method, convention)
    blocks = weight.float().reshape(weight.shape[0], -1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    stored = _global_of(block_amax.amax(), convention)
    if global_scale is not None:
        given = global_scale.float().reshape(())
        stored = given if convention == "modelopt" else 1.0 / given
    scale, step = _scale_blocks(block_amax, stored, E2M1_MAX, convention)
    codes = encode_e2m1(blocks / step[..., None])
    if method == "search":
        scale4, step4 = _scale_blocks(block_amax, stored, 4.0, convention)
        codes4 = encode_e2m1(blocks / step4[..., None])
        better = _squared_error(blocks, codes4, step4) < _squared_error(blocks, codes, step)
        scale = torch.where(better, scale4, scale)
        codes = torch.where(better[..., None], codes4, codes)
    return pack_codes(codes.flatten(-2)), scale.to(torch.float8_e4m3fn), to_multiplier(stored, convention)


def encode_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize activations ``x`` [rows, k], each row as a tensor of its own with method "max6".

    Returns: packed uint8 [rows, k/2], scale float8_e4m3fn [rows, k/16], multipliers fp32 [rows]. Steps and rounding
    are those of ``encode`` with ModelOpt's convention. A NaN or infinity makes the row's multiplier NaN or infinite.
    """
    blocks = x.float().reshape(x.shape[0], -1, BLOCK)
    block_amax = blocks.abs().amax(-1)
    multiplier = _global_of(block_amax.amax(-1), "modelopt")
    scale, step = _scale_blocks(block_amax, multiplier[:, None], E2M1_MAX, "modelopt")
    codes = encode_e2m1((blocks / step[..., None]).nan_to_num(0.0))
    return pack_codes(codes.flatten(-2)), scale.nan_to_num(E4M3_MAX).to(torch.float8_e4m3fn), multiplier


def share_global_scale(scale: Tensor, global_scale: Tensor, shared: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bring rows with multipliers of their own to one, for a format or a kernel that has a single global scale.

    Args:
        scale: float8_e4m3fn [n, k/16], positive. global_scale: fp32 [n], positive.
        shared: the multiplier to bring them to, at least the largest of the rows (the default).

    Returns: scale float8_e4m3fn [n, k/16] and the shared multiplier, an fp32 scalar: the codes stay, and
    ``scale * global_scale`` changes by the rounding of one E4M3 number, at most a sixteenth of it, or where it is below
    2^-6 of the multiplier by at most 2^-10 of it, but never to zero. Rows that have the largest multiplier do not
    change. Taking one row's multiplier for all without this is off by their ratio (vllm issue 54974).
    """
    largest = global_scale.max()
    shared = largest if shared is None else shared
    if bool(shared < largest):
        raise ValueError(f"the shared multiplier {float(shared)} is below that of a row, {float(largest)}")
    moved = scale.float() * (global_scale / shared)[:, None]
    return moved.clamp(min=E4M3_SMALLEST).to(torch.float8_e4m3fn), shared


def _check_encode_arguments(weight: Tensor, method: str, convention: str) -> None:
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"NVFP4 needs a matrix, columns a multiple of {BLOCK}, got {tuple(weight.shape)}")
    if method not in get_args(Method):
        raise ValueError(f"method must be one of {get_args(Method)}, got {method!r}")
    if convention not in get_args(Convention):
        raise ValueError(f"convention must be one of {get_args(Convention)}, got {convention!r}")
    if not weight.is_meta and not bool(weight.isfinite().all()):
        raise ValueError("cannot quantize a weight that holds NaN or infinity")


def _global_of(amax: Tensor, convention: str) -> Tensor:
    """The global scale as ``convention`` stores it, for a tensor whose largest magnitude is ``amax``."""
    if convention == "modelopt":
        multiplier = amax / FULL_RANGE
        return torch.where(multiplier == 0, torch.ones_like(multiplier), multiplier)
    quantizer = FULL_RANGE / amax.clamp(min=torch.finfo(torch.float32).tiny)
    return torch.nan_to_num(quantizer, posinf=1.0)


def _scale_blocks(block_amax: Tensor, stored: Tensor, top: float, convention: str) -> tuple[Tensor, Tensor]:
    """Return fp32 (scale rounded to e4m3, step that elements are divided by), mapping ``block_amax`` to ``top``."""
    if convention == "modelopt":
        raw = block_amax / (top * stored)
        raw = torch.where(raw == 0, torch.ones_like(raw), raw).clamp(E4M3_SMALLEST, E4M3_MAX)
        scale = raw.to(torch.float8_e4m3fn).float()
        return scale, scale * stored
    scale = (stored * (block_amax / top)).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).float()
    scale = torch.where(scale == 0, torch.full_like(scale, 0.125), scale)
    return scale, scale / stored


def _squared_error(blocks: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    return (decode_e2m1(codes) * step[..., None] - blocks).square().sum(-1)


def check_scales(packed: Tensor, scale: Tensor, global_multiplier: Tensor, where: str) -> None:
    """Raise CheckpointError unless the three tensors are a plausible NVFP4 weight.

    Args:
        packed: uint8 [n, k/2]. scale: float8_e4m3fn [n, k/16]. global_multiplier: fp32, one value or [n].
        where: tensor and file, for the message.

    Every scale must be finite and positive. A swapped convention is found from the largest magnitude the scales
    allow, ``6 * max(scale) * global_multiplier``. Encoders aim at max(scale) = 448, so a tensor whose true
    maximum is ``amax`` would appear with ``2688**2 / amax`` if its global scale were inverted. The two readings
    meet at 2688: below is right, above is inverted (weights are far below 2688). Below 1e-8 it is damaged.
    """
    rows, half = packed.shape if packed.ndim == 2 else (0, 0)
    if packed.dtype != torch.uint8 or not half or half % (BLOCK // 2):
        raise CheckpointError(
            f"packed NVFP4 weight must be uint8 [n, k/2] with k a multiple of {BLOCK}, "
            f"got {packed.dtype} {list(packed.shape)}",
            where=where,
        )
    if scale.dtype != torch.float8_e4m3fn or tuple(scale.shape) != (rows, half * 2 // BLOCK):
        raise CheckpointError(
            f"NVFP4 block scales must be float8_e4m3fn [{rows}, {half * 2 // BLOCK}], "
            f"got {scale.dtype} {list(scale.shape)}",
            where=where,
        )
    if global_multiplier.numel() not in (1, rows):
        raise CheckpointError(
            f"NVFP4 global scale must hold 1 or {rows} values, got {global_multiplier.numel()}", where=where
        )
    values = scale.float()
    for name, tensor in (("block scale", values), ("global scale", global_multiplier)):
        if not bool((tensor.isfinite() & (tensor > 0)).all()):
            raise CheckpointError(
                f"NVFP4 {name} is NaN, infinite, zero or negative", where=where, fix="export the checkpoint again"
            )
    largest = float((values.amax(1) * global_multiplier.reshape(-1)).max()) * E2M1_MAX
    if not SMALLEST_WEIGHT_MAX <= largest <= FULL_RANGE:
        raise CheckpointError(
            f"NVFP4 scales allow weights up to {largest:.3g}, which no model has",
            where=where,
            fix="check the global scale convention: ModelOpt's weight_scale_2 multiplies, "
            "compressed-tensors' weight_global_scale divides",
        )


def swizzle_scales_128x4(scale: Tensor) -> Tensor:
    """Reorder linear block scales for the block-scaled MMA of sm_100 (tiles of 128 rows by 4 blocks).

    Args:
        scale: [n, k/16] of a one-byte dtype.

    Returns a flat tensor of the same dtype, rows padded to 128 and columns to 4 with zero bytes: with
    ``T = ceil(k / 64)``, element (m, j) is at
    ``((m // 128) * T + j // 4) * 512 + (m % 32) * 16 + (m % 128 // 32) * 4 + j % 4``.
    """
    rows, columns = scale.shape
    tall, wide = (math.ceil(size / tile) for size, tile in zip(scale.shape, SCALE_TILE, strict=True))
    padding = (0, wide * SCALE_TILE[1] - columns, 0, tall * SCALE_TILE[0] - rows)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), padding)
    tiles = padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


def unswizzle_scales_128x4(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`swizzle_scales_128x4`: the linear scales [rows, columns], padding dropped."""
    tall, wide = math.ceil(rows / SCALE_TILE[0]), math.ceil(columns / SCALE_TILE[1])
    tiles = swizzled.view(torch.uint8).view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    linear = tiles.reshape(tall * SCALE_TILE[0], wide * SCALE_TILE[1])
    return linear[:rows, :columns].contiguous().view(swizzled.dtype)


def view_scales_for_tma(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """View swizzled scales as [1, ceil(rows/128), ceil(columns/4), 2, 256].

    Each 512-byte tile becomes a [2, 256] box, because a TMA box has at most 256 elements along an axis; a load of
    [1, BLOCK_N/128, BLOCK_K/64, 2, 256] brings the scales of one weight tile.
    """
    return swizzled.view(1, math.ceil(rows / SCALE_TILE[0]), math.ceil(columns / SCALE_TILE[1]), 2, 256)
