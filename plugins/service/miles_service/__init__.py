"""The training loop as a service: ``miles serve`` lets several clients train adapters of one base model over HTTP."""

from miles_core.plugin import Command, Plugin

__version__ = "0.1.0"

plugin = Plugin(
    name="service",
    summary="miles serve: clients train adapters of one base model over HTTP, in the wire format of tinker",
    version=__version__,
    core="~=0.1",
    commands={"serve": Command("let clients train adapters of a model over HTTP", "miles_service.command:run")},
)
