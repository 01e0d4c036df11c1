"""The trainer. Everything here imports torch and Megatron-Core."""
