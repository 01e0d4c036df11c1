"""Stand-in for SGLang's compiled CUDA kernels, see ``absent``. Short convolutions compute (``convolution``)."""

import absent
import torch

from sgl_kernel.convolution import causal_conv1d_fwd, causal_conv1d_update

__all__ = ["causal_conv1d_fwd", "causal_conv1d_update"]
__version__ = "0.4.5"
absent.install(__name__, missing=["sgl_kernel.scalar_type"])  # SGLang has its own names for these types
# SGLang looks these operators up when its modules are loaded: that of Qwen3.5, which those of other models that read images import, and those of
# hybrid models.
_OPERATORS = torch.library.Library("sgl_kernel", "FRAGMENT")
for _name in (
    "causal_conv1d_update",
    "fused_gdn_gating_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
    "fused_sigmoid_mul_cpu",
):
    _OPERATORS.define(f"{_name}(Tensor x) -> Tensor")
