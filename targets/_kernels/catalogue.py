"""Every portable kernel template, for all targets that compile Triton."""

from __future__ import annotations

from mmcompile.core.kernel import KernelTemplate
from mmcompile.core.spec import TargetSpec
from mmcompile.targets._kernels import (
    attention,
    embedding,
    linear,
    linear_mxfp8,
    linear_nvfp4,
    linear_w4a4,
    moe,
    norm,
    pointwise,
    qkv,
    qkv_index,
    rope,
    router,
    sampling,
    sparse_attention,
    sparse_index,
    sparse_top_k,
    swiglu,
    two_step,
)
from mmcompile.targets._tuned import (
    insert_lanes,
    linear_fragments,
    linear_mfma,
    moe_fragments,
    qkv_lanes,
    sparse_index_plain,
    sparse_plain,
)
from mmcompile.targets._tuned import sparse_attention as tuned_sparse_attention
from mmcompile.targets._tuned import sparse_index as tuned_sparse_index

_TEMPLATES: tuple[KernelTemplate, ...] = (
    *linear_fragments.TEMPLATES,
    *insert_lanes.QKV,
    *linear_fragments.QKV,
    *insert_lanes.TEMPLATES,
    *linear_mfma.TEMPLATES,
    *linear_mfma.QKV,
    *qkv_lanes.TEMPLATES,
    *moe_fragments.TEMPLATES,
    *tuned_sparse_attention.TEMPLATES,
    *sparse_plain.TEMPLATES,
    *tuned_sparse_index.TEMPLATES,
    *sparse_index_plain.TEMPLATES,
    *norm.TEMPLATES,
    *linear.TEMPLATES,
    *linear_nvfp4.TEMPLATES,
    *linear_mxfp8.TEMPLATES,
    *linear_w4a4.TEMPLATES,
    *insert_lanes.NARROW,
    *two_step.NARROW,  # where two launches beat the fused one
    *qkv.TEMPLATES,
    *qkv_index.TEMPLATES,
    *insert_lanes.WIDE,
    *two_step.TEMPLATES,
    *attention.TEMPLATES,
    *sparse_index.TEMPLATES,
    *sparse_top_k.TEMPLATES,
    *sparse_attention.TEMPLATES,
    *router.TEMPLATES,
    *moe.TEMPLATES,
    *rope.TEMPLATES,
    *embedding.TEMPLATES,
    *sampling.TEMPLATES,
    *swiglu.TEMPLATES,
    *pointwise.TEMPLATES,
)


def list_kernels(spec: TargetSpec) -> tuple[KernelTemplate, ...]:
    """The templates on offer for ``spec``, in order of preference; empty where no binary is made."""
    return _TEMPLATES if spec.backend else ()
