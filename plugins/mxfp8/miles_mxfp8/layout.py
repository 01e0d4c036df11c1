"""The layout of MXFP8, see ``format``."""

import torch

E4M3 = torch.float8_e4m3fn
BLOCK = 32
CODES, SCALES = "weight", "weight_scale_inv"
