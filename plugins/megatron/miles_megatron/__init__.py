"""Megatron-Core as the trainer of miles-core: ``--trainer megatron``."""

from miles_core.plugin import Package, Plugin, Rule, Set
from miles_megatron.config import MegatronConfig
from miles_megatron.families import HYBRID, MAMBA
from miles_megatron.foreign_flags import FOREIGN_FLAGS
from miles_megatron.recipes import TILES

__version__ = "0.1.0"

#: Versions that this trainer was tested with.
CORE, ENGINE = ">=0.19.2,<0.20", ">=2.20,<2.21"
#: Versions of flash-linear-attention that Megatron-Core 0.19 names; not tested here.
DELTA = "~=0.4.0"
#: Versions of mamba-ssm and causal-conv1d with which Megatron-Core 0.19 trains on packed samples; not tested here.
SCAN, CONVOLUTION = ">=2.0.0", ">=1.4.0"

plugin = Plugin(
    name="megatron",
    summary="Megatron-Core as the trainer: tensor, pipeline, expert and context parallel",
    version=__version__,
    core="~=0.1",
    config=MegatronConfig,
    foreign_flags=FOREIGN_FLAGS,
    provides={"trainer": {"megatron": "miles_megatron.trainer.build:make_trainer"}},
    capabilities={
        "trainer": (
            *("entropy", "sampling_support", "routing_replay", "mtp_layers", "rebuild", "sleep", "values", "adapters"),
            *(f"format:{name}" for name in TILES),
        )
    },
    sets={
        "env.NVTE_FP8_BLOCK_SCALING_FP32_SCALES": Set(
            "1",
            when="trainer == megatron and train.precision == fp8 and not fp8.power_of_two_scales",
            because="TransformerEngine rounds block scales up to powers of two by default",
        ),
        "env.CUDA_DEVICE_MAX_CONNECTIONS": Set(
            "1",
            when="trainer == megatron and gpu.sm > 0 and gpu.sm < 100 and "
            "(megatron.tensor_model_parallel_size > 1 or megatron.context_parallel_size > 1)",
            because="Megatron-Core overlaps the communication of tensor and context parallel with computation by the order of launches, "
            "which one hardware queue keeps on GPUs before Blackwell",
        ),
        "env.NVTE_BACKWARD_OVERRIDE": Set(
            "dequantized",
            when="trainer == megatron and train.precision in {fp8, mxfp8} and megatron.backward_override == dequantized",
            because="the backward pass multiplies the dequantised operands of the forward pass in BF16",
        ),
    },
    notes={
        "trainer == megatron and megatron.sequence_parallel and not megatron.tensor_model_parallel_size > 1": (
            "--sequence-parallel has no effect without --tensor-model-parallel-size above 1, as in Megatron-LM"
        ),
        "trainer == megatron and model.moe and (train.precision == mxfp8 or (train.precision == fp8 and fp8.power_of_two_scales))": (
            "Megatron-Core multiplies the activations of an expert by the router's weight before it rounds them, and an engine afterwards. "
            "With power-of-two scales the codes differ, and log-probabilities of engine and trainer differ about as much as with BF16 "
            "training; --trainer embedded rounds like the engine"
        ),
        "trainer == megatron and train.precision in {fp8, mxfp8} and megatron.backward_override == none": (
            "the backward pass quantises gradients too (--backward-override none): they are not the exact gradients of the quantised "
            "forward pass, and differ by the format's rounding error in each product"
        ),
    },
    facts={"megatron.ranks": "processes that train one policy, if no runtime determines it"},
    requires=(
        Rule(
            "model.dtype != float16",
            when="trainer == megatron",
            because="this trainer computes in BF16 or FP32 and scales no loss; use --dtype bfloat16, or --trainer embedded, which trains in FP16",
        ),
        Rule(
            "not embedded.offload_optimizer",
            when="trainer == megatron",
            because="--offload-optimizer is for the embedded trainer; Megatron-Core has --optimizer-cpu-offload",
        ),
        Rule(
            needs="train.precision in {fp8, mxfp8}",
            when="megatron.backward_override == none",
            because="the option controls how TransformerEngine computes gradients in FP8 and MXFP8",
        ),
        Rule(
            needs="model.device != cpu or gpu.count == 0",
            when="trainer == megatron",
            because="Megatron-Core uses a GPU if there is one; set CUDA_VISIBLE_DEVICES= to hide it",
        ),
    ),
    packages=(
        Package(
            "megatron-core",
            CORE,
            when="trainer == megatron",
            install=f'pip install "megatron-core{CORE}", with Python 3.12 or later',
        ),
        Package(
            "transformer-engine",
            ENGINE,
            when="trainer == megatron and gpu.sm > 0",
            install=f'pip install "transformer-engine[pytorch]{ENGINE}"',
        ),
        Package(
            "flash-linear-attention",
            DELTA,
            when=f"trainer == megatron and gpu.sm > 0 and model.type in {{{', '.join(HYBRID)}}}",
            install=f'pip install "flash-linear-attention{DELTA}"',
            without="torch computes gated delta nets, which is much slower and needs more memory",
        ),
        Package(
            "mamba-ssm",
            SCAN,
            when=f"trainer == megatron and gpu.sm > 0 and model.type in {{{', '.join(MAMBA)}}}",
            install=f'pip install --no-build-isolation "mamba-ssm{SCAN}", which compiles kernels against the installed torch; or use '
            "--trainer embedded",
        ),
        Package(
            "causal-conv1d",
            CONVOLUTION,
            when=f"trainer == megatron and gpu.sm > 0 and model.type in {{{', '.join(MAMBA)}}}",
            install=f'pip install --no-build-isolation "causal-conv1d{CONVOLUTION}", which compiles kernels against the installed torch; or use '
            "--trainer embedded",
        ),
    ),
    review="miles_megatron.review:review",
    memory="miles_megatron.usage:usage",
    examine="miles_megatron.examine:examine",
)
