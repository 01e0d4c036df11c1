"""Stand-in for SGLang's compiled CUDA kernels, see ``absent``."""

import absent

__version__ = "0.4.5"
absent.install(__name__, missing=["sgl_kernel.scalar_type"])  # SGLang has its own names for these types
