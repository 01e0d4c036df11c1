"""Steps of a transformer layer in C, for a float32 model on a CPU, compiled on the machine they run on; for miles-core."""

from miles_core.plugin import Plugin, Rule

__version__ = "0.1.0"

plugin = Plugin(
    name="cpu_kernels",
    summary="steps of a float32 model on a CPU in C, compiled on this machine",
    version=__version__,
    core="~=0.1",
    hooks={"": "miles_cpu_kernels.hooks:CpuKernels"},
    requires=(
        Rule(
            needs="engine == embedded or trainer == embedded",
            because="the kernels are steps of the models that the embedded engine and trainer run",
        ),
        Rule(
            needs="model.device == cpu or model.device == auto and gpu.count == 0",
            because="the kernels are for a model on a CPU; with a GPU here, only --device cpu leaves it there",
        ),
        Rule(needs="model.dtype != bfloat16", because="the kernels compute in float32, which is a CPU's default"),
    ),
)
