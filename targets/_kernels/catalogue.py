"""Every portable kernel template, for all targets that compile Triton."""

from __future__ import annotations

from mmcompile.core.kernel import KernelTemplate
from mmcompile.core.spec import TargetSpec
from mmcompile.targets._kernels import (
    attention,
    embedding,
    linear,
    linear_nvfp4,
    norm,
    pointwise,
    qkv,
    rope,
    sampling,
    swiglu,
    two_step,
)

_MODULES = (norm, linear, linear_nvfp4, qkv, attention, rope, embedding, sampling, swiglu, two_step, pointwise)


def list_kernels(spec: TargetSpec) -> tuple[KernelTemplate, ...]:
    """The templates on offer for ``spec``, in order of preference; empty where no binary is made."""
    if not spec.backend:
        return ()
    return tuple(template for module in _MODULES for template in module.TEMPLATES)
