"""The ``mm::`` vocabulary. Importing this package registers every operation with torch.library."""

from mmcompile.core.ops import (
    attention,
    linear,
    linear_mxfp8,
    moe,
    moe_nvfp4,
    norm,
    qkv_index,
    rope,
    sampling,
    sparse,
    w4a4,
)
from mmcompile.core.ops.define import OPS, Op, find_op

__all__ = [
    "OPS",
    "Op",
    "attention",
    "find_op",
    "linear",
    "linear_mxfp8",
    "moe",
    "moe_nvfp4",
    "norm",
    "qkv_index",
    "rope",
    "sampling",
    "sparse",
    "w4a4",
]
