"""A layer behind the decoder that a plugin wants trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.contracts.policy import Policy
    from miles_core.contracts.run import Run


@dataclass(frozen=True)
class FurtherLayer:
    """The checkpoint's layer that predicts a further token (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2), to be
    trained beside the policy and sent to the engine with it. A trainer whose model plugins cannot reach into takes it from the hook
    ``on_further_layers``.

    The entry at position t has token t and the policy's last hidden state of t - 1 (zeros before the first token), and predicts token
    t + 1 by the policy's output layer. Its loss is the mean cross-entropy over trained tokens times ``factor``. Hidden states, embedding
    and output layer are detached, and the layer is clipped by a norm of its own, so that the policy's gradient is the same to the bit
    with the layer and without.

    Attributes:
        loss: name of its loss, metric ``train/<loss>``.
        group: name of its parameters, metric ``train/grad_norm/<group>``.
        factor: of the loss.
        lr: constant learning rate; None follows the policy's, schedule included.
        clip_grad: bound of the norm of its gradient; 0 is off.
    """

    loss: str
    group: str
    factor: float
    lr: float | None = None
    clip_grad: float = 1.0


def further_layer(run: Run, policy: Policy) -> FurtherLayer | None:
    """What plugins want of the checkpoint's further layer, by the hook ``on_further_layers``; None where nobody does.

    Raises:
        ConfigError: several plugins want to train it.
    """
    wishes: list[FurtherLayer] = []
    run.hooks.on("on_further_layers", run=run, policy=policy, wishes=wishes)
    if len(wishes) > 1:
        plugins = ", ".join(run.hooks.implemented["on_further_layers"])
        raise ConfigError(
            f"several plugins want to train the layer behind the decoder of {policy.name}: leave one of {plugins} out"
        )
    return wishes[0] if wishes else None
