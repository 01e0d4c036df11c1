"""The trainer. All modules of this package import torch and Megatron-Core."""
