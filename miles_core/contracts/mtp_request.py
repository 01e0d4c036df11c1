"""The multi-token prediction layer of a checkpoint, trained on request of a plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.errors import ConfigError

if TYPE_CHECKING:
    from miles_core.contracts.run import Policy, Run


@dataclass(frozen=True)
class MtpRequest:
    """Request to train the checkpoint's multi-token prediction layer (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    The trainer trains the layer together with the policy and syncs both to the engine. Trainers whose model plugins cannot modify
    receive the request through the hook ``on_mtp_layers``.

    At position t the layer takes the embedding of token t and the policy's last hidden state at t - 1 (zeros before the first token),
    and predicts token t + 1 with the policy's output layer. The loss is ``factor`` times the mean cross-entropy over trained tokens.
    Hidden states, embedding and output layer are detached, and the layer's gradient is clipped separately, so the policy's gradient is
    bit-identical with and without the layer.

    Attributes:
        loss: name of the loss, metric ``train/<loss>``.
        group: name of the parameter group, metric ``train/grad_norm/<group>``.
        factor: coefficient of the loss.
        lr: constant learning rate; None uses the policy's learning rate and its schedule.
        clip_grad: maximum norm of the layer's gradient; 0 disables clipping.
    """

    loss: str
    group: str
    factor: float
    lr: float | None = None
    clip_grad: float = 1.0


def collect_mtp_request(run: Run, policy: Policy) -> MtpRequest | None:
    """Collect the request to train the layer through the hook ``on_mtp_layers``; None if no plugin requests it.

    Raises:
        ConfigError: several plugins request it.
    """
    requests: list[MtpRequest] = []
    run.hooks.on("on_mtp_layers", run=run, policy=policy, requests=requests)
    if len(requests) > 1:
        plugins = ", ".join(run.hooks.implemented["on_mtp_layers"])
        raise ConfigError(
            f"several plugins want to train the multi-token prediction layer of {policy.name}: leave one of {plugins} out"
        )
    return requests[0] if requests else None
