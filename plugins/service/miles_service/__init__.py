"""The training loop as a service: ``miles serve`` lets several clients train adapters of one base model over HTTP."""

from miles_core.plugin import Command, Plugin, Rule

__version__ = "0.1.0"

plugin = Plugin(
    name="service",
    summary="miles serve: clients train adapters of one base model over HTTP, in the wire format of tinker",
    version=__version__,
    core="~=0.1",
    commands={"serve": Command("let clients train adapters of a model over HTTP", "miles_service.command:run")},
    uses={
        "trainer.divisible_step": "clients compute gradients and step the optimizer in separate requests",
        "engine.score": "clients ask for the log-probabilities of prompts",
    },
    requires=(
        Rule("plugin.lora and lora.sync == adapter", because="all models of the service share the weights of one base"),
        Rule(
            "engine == embedded and trainer == embedded and runtime == inline and not colocate",
            because="models are created while the service runs, and share the base's weights in one process",
        ),
        Rule(
            "rollout.temperature == 1",
            because="losses refer to the model's own distribution; clients choose the temperature of a sample",
        ),
        Rule("train.optimizer == adamw", because="clients set the coefficients of AdamW"),
    ),
)
