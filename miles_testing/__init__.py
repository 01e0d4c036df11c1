"""The test kit for plugin authors.

``toy_run``, ``plan`` and ``ranks`` are pytest fixtures once miles-core is installed; the first two are also functions of this package.
The contracts are test suites for implementations: subclass one and implement the method that makes the object under test. Importing
this package does not import torch.
"""

from typing import TYPE_CHECKING

from miles_core.lookup import make_lazy_exports
from miles_testing.toy import plan, toy_files, toy_run

if TYPE_CHECKING:
    from miles_testing.engine_contract import EngineContract, Limits
    from miles_testing.evaluation_contract import EvaluationContract
    from miles_testing.format_contract import FormatContract, hard_cases
    from miles_testing.format_plugin_contract import FormatPluginContract
    from miles_testing.head_contract import HeadContract
    from miles_testing.learn_contract import LearnContract
    from miles_testing.prompt_source_contract import PromptSourceContract
    from miles_testing.quantized_engine_contract import QuantizedEngineContract
    from miles_testing.ranked_trainer_contract import RankedTrainerContract
    from miles_testing.renderer_contract import RendererContract
    from miles_testing.run_contract import OptimizerContract, RewardContract, RolloutFunctionContract, RunContract
    from miles_testing.runtime_contract import RuntimeContract
    from miles_testing.tiny import tiny_checkpoint, tiny_tokenizer
    from miles_testing.trainer_contract import Setup, TrainerContract
    from miles_testing.weights_contract import WeightsContract

__all__ = [
    "EngineContract",
    "EvaluationContract",
    "FormatContract",
    "FormatPluginContract",
    "HeadContract",
    "LearnContract",
    "Limits",
    "OptimizerContract",
    "PromptSourceContract",
    "QuantizedEngineContract",
    "RankedTrainerContract",
    "RendererContract",
    "RewardContract",
    "RolloutFunctionContract",
    "RunContract",
    "RuntimeContract",
    "Setup",
    "TrainerContract",
    "WeightsContract",
    "hard_cases",
    "plan",
    "tiny_checkpoint",
    "tiny_tokenizer",
    "toy_files",
    "toy_run",
]

__getattr__, __dir__ = make_lazy_exports(
    __name__,
    {
        "miles_testing.engine_contract": "EngineContract Limits",
        "miles_testing.evaluation_contract": "EvaluationContract",
        "miles_testing.format_contract": "FormatContract hard_cases",
        "miles_testing.format_plugin_contract": "FormatPluginContract",
        "miles_testing.head_contract": "HeadContract",
        "miles_testing.learn_contract": "LearnContract",
        "miles_testing.prompt_source_contract": "PromptSourceContract",
        "miles_testing.quantized_engine_contract": "QuantizedEngineContract",
        "miles_testing.ranked_trainer_contract": "RankedTrainerContract",
        "miles_testing.renderer_contract": "RendererContract",
        "miles_testing.run_contract": "OptimizerContract RewardContract RolloutFunctionContract RunContract",
        "miles_testing.runtime_contract": "RuntimeContract",
        "miles_testing.tiny": "tiny_checkpoint tiny_tokenizer",
        "miles_testing.trainer_contract": "Setup TrainerContract",
        "miles_testing.weights_contract": "WeightsContract",
    },
)
