"""Number formats: the contract, and what follows.

``format`` is the contract; the arithmetic of a format is in its plugin. From the contract come the codec that trainer, weight sync,
engine and converter share (``codec``), which weights it applies to (``selector``), how experts that share a tensor are taken
apart (``fused_experts``), which matrix product multiplies its codes (``product``), and from when on it is used
(``schedule``). Knows no engine, no trainer and no run.
"""
