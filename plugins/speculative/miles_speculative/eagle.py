"""A draft head in the layout of EAGLE (Li et al., arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts trees with the same weights).

``fc`` projects the concatenation of a token's embedding and the previous token's hidden state (after the policy's last norm) to the hidden
size. Llama decoder layers follow, without a norm before the first and after the last. The output approximates the policy's next hidden
state: the policy's output layer computes logits from it, and the next draft uses it as input. For a prompt's first token, see ``Draft.HIDDEN``.

The head is the policy's submodule ``draft``; its parameters have the names of its checkpoint under that prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from miles_core.plugin import CheckpointError
from miles_embedded import (
    backbone,
    checkpoint_config,
    decoder_layers,
    load_model,
    mask_for,
    prepare,
    text_configuration,
    unloaded_model,
)
from miles_speculative.draft import Draft

#: Copies of the policy's tensors in the checkpoints of some heads; ignored.
_SHARED = {"embed_tokens.weight", "lm_head.weight"}


class Eagle(Draft):
    """An EAGLE head; ``module`` has the layers and ``fc``, named as in an EAGLE checkpoint."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; returns the predicted next hidden state of the policy."""
        embedded = self.policy.get_input_embeddings()(tokens).detach()
        joined = self.module.fc(torch.cat([embedded, hidden], -1))
        out: Tensor = self.module(
            inputs_embeds=joined.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=mask_for(self.module),
            use_cache=False,
            call=call,
        ).last_hidden_state[0]
        return out


def attach_eagle(policy: Any, path: str | Path) -> Eagle:
    """Load the head in ``path`` and attach it to ``policy``, with the policy's dtype and device. Call ``misfits`` first.

    Raises:
        CheckpointError: tensors are missing, unknown or have another shape.
    """
    tensors = {n: t for n, t in _tensors(Path(path)) if n not in _SHARED and not n.endswith("inv_freq")}
    config = checkpoint_config(path)
    like = next(policy.parameters())
    draft = make_eagle(config, like.dtype, like.device, "fc.bias" in tensors)
    own = dict(draft.named_parameters())
    wrong = sorted(
        n for n in own.keys() | tensors.keys() if n not in own or n not in tensors or own[n].shape != tensors[n].shape
    )
    if wrong:
        raise CheckpointError(
            f"--draft-model-path {path}: {len(wrong)} tensors are missing, unknown or of another shape than config.json says, "
            f"the first is {wrong[0]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(tensors[name])
    behind = len(getattr(backbone(policy), "layers", None) or decoder_layers(policy))  # with additional layers
    for layer in draft.layers:
        layer.self_attn.layer_idx += behind
    policy.draft = draft
    return Eagle(policy, draft)


def make_eagle(config: Any, dtype: torch.dtype, device: torch.device, bias: bool) -> Any:
    """Create a head with uninitialised weights. config: Llama configuration of the layers; bias: whether ``fc`` has a bias."""
    model = unloaded_model(config, dtype, device)
    draft: Any = backbone(model)
    draft.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias, device=device, dtype=dtype)
    draft.embed_tokens, draft.norm = None, nn.Identity()
    draft.layers[0].input_layernorm = nn.Identity()
    prepare(model)
    return draft


def new_eagle(source: Path | str, target: Path | str, layers: int) -> Path:
    """Write an untrained head for the checkpoint ``source`` into ``target``; returns ``target``.

    Layers start as copies of the policy's last layer where the shapes match, and ``fc`` adds embedding and hidden state."""
    from transformers import LlamaConfig

    policy: Any = load_model(source)
    theirs, last = text_configuration(policy), decoder_layers(policy)[-1]
    config = LlamaConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.hidden_size,
        intermediate_size=getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=theirs.num_attention_heads,
        num_key_value_heads=theirs.num_key_value_heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads,
        rms_norm_eps=theirs.rms_norm_eps,
        max_position_embeddings=theirs.max_position_embeddings,
        architectures=["LlamaForCausalLMEagle"],
    )
    like = next(policy.parameters())
    draft = make_eagle(config, like.dtype, torch.device("cpu"), bias=False)
    known = dict(last.named_parameters())
    with torch.no_grad():
        for layer in draft.layers:
            for name, parameter in layer.named_parameters():
                if name in known and known[name].shape == parameter.shape:
                    parameter.copy_(known[name])
        half = torch.eye(config.hidden_size, dtype=like.dtype)
        draft.fc.weight.copy_(torch.cat([half, half], 1))
    Path(target).mkdir(parents=True, exist_ok=True)
    config.save_pretrained(target)
    save_file({n: p.detach().contiguous() for n, p in draft.named_parameters()}, Path(target) / "model.safetensors")
    return Path(target)


def _tensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the (name, tensor) pairs of a directory's safetensors files, or of its torch files if there are none.

    Raises:
        CheckpointError: a file cannot be read, or holds something other than tensors by name.
    """
    for file in sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin")):
        try:
            own = (
                load_file(file)
                if file.suffix == ".safetensors"
                else torch.load(file, "cpu", mmap=True, weights_only=True)
            )
        except MemoryError:
            raise
        except (
            Exception
        ) as error:  # damaged files raise errors of many types: of pickle, zipfile, torch and safetensors
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise CheckpointError(
                f"--draft-model-path: {file} is damaged or truncated ({first}); copy it again"
            ) from error
        if not isinstance(own, dict) or not all(isinstance(tensor, Tensor) for tensor in own.values()):
            raise CheckpointError(
                f"--draft-model-path: {file} does not hold tensors by name; give the head's own checkpoint"
            )
        yield from own.items()
