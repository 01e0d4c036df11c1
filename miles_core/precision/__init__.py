"""Number formats: their contract, and the components built on it.

``format`` is the contract; each format's arithmetic is in its plugin. The other modules use only the contract: the codec shared by
trainer, weight sync, engine and converter (``codec``), the selection of weights (``selector``), the split of joined experts
(``fused_experts``), matrix products of codes (``product``), and the warm-up (``schedule``). This package does not depend on engines,
trainers or runs.
"""
