"""The ``mm::`` vocabulary. Importing this package registers every operation with torch.library."""

from mmcompile.core.ops import attention, linear, moe, norm, rope, sampling, sparse
from mmcompile.core.ops.define import OPS, Op, find_op

__all__ = ["OPS", "Op", "attention", "find_op", "linear", "moe", "norm", "rope", "sampling", "sparse"]
