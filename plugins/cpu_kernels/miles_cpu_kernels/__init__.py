"""C kernels for operations of float32 models on a CPU, compiled on the machine that runs them; for miles-core."""

from miles_core.plugin import Plugin, Rule

__version__ = "0.1.0"

plugin = Plugin(
    name="cpu_kernels",
    summary="C kernels for float32 models on a CPU, compiled on this machine",
    version=__version__,
    core="~=0.1",
    hooks={"": "miles_cpu_kernels.hooks:CpuKernels"},
    requires=(
        Rule(
            needs="engine == embedded or trainer == embedded",
            because="the kernels replace operations in the models of the embedded engine and trainer",
        ),
        Rule(
            needs="model.device == cpu or model.device == auto and gpu.count == 0",
            because="the kernels need the model on a CPU; on a machine with a GPU, give --device cpu",
        ),
        Rule(needs="model.dtype != bfloat16", because="the kernels compute in float32, the default dtype on a CPU"),
    ),
    toy={"device": "cpu"},
)
