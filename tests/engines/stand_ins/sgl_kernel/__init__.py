"""Stand-in for SGLang's compiled CUDA kernels, see ``absent``."""

import absent
import torch

__version__ = "0.4.5"
absent.install(__name__, missing=["sgl_kernel.scalar_type"])  # SGLang has its own names for these types
# SGLang's module of Qwen3.5, which those of other models that read images import, looks these operators up when it is loaded.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")
