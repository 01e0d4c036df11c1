"""The layout of block-wise FP8, see ``format``."""

import torch

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10
TILE = 128
CODES, SCALES = "weight", "weight_scale_inv"
