"""A head in the layout of EAGLE (Li et al., arXiv 2401.15077; EAGLE-2, arXiv 2406.16858, drafts trees with the same weights).

``fc`` projects a token's embedding, joined with the policy's hidden state of the token before it after the last norm, to one; decoder
layers of the Llama family follow, the first without a norm in front and nothing behind the last. What comes out is meant to be the policy's
next hidden state: its head reads it, and the next draft starts from it. The entry of a prompt's first token, for which EAGLE has none, has zeros
for the hidden state before it.

The head stands in the policy as ``draft``, with the tensor names of its own checkpoint behind that.
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
    prepare,
    text_configuration,
    unloaded_model,
)
from miles_speculative.draft import Draft

#: Copies of the policy's own, in the checkpoints of some heads.
_SHARED = {"embed_tokens.weight", "lm_head.weight"}


class Eagle(Draft):
    """A head in the policy; ``module`` is its layers, and ``fc`` beside them, named as in an EAGLE checkpoint."""

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, call: Any) -> Tensor:
        """See ``Draft``; what is returned is the policy's hidden state as the head expects it."""
        embedded = self.policy.get_input_embeddings()(tokens).detach()
        joined = self.module.fc(torch.cat([embedded, hidden], -1))
        out: Tensor = self.module(
            inputs_embeds=joined.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, call=call
        ).last_hidden_state[0]
        return out


def attach_eagle(policy: Any, path: str | Path) -> Eagle:
    """Give ``policy`` the head in ``path``, in its own dtype and on its device.

    Raises:
        CheckpointError: its tensors are not those of such a head. ``misfits`` is asked before.
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
    behind = len(backbone(policy).layers)  # type: ignore[arg-type]
    for layer in draft.layers:
        layer.self_attn.layer_idx += behind
    policy.draft = draft
    return Eagle(policy, draft)


def make_eagle(config: Any, dtype: torch.dtype, device: torch.device, bias: bool) -> Any:
    """A head with fresh weights from the configuration of its layers; ``bias``: of ``fc``."""
    model = unloaded_model(config, dtype, device)
    draft: Any = backbone(model)
    draft.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias, device=device, dtype=dtype)
    draft.embed_tokens, draft.norm = None, nn.Identity()
    draft.layers[0].input_layernorm = nn.Identity()
    prepare(model)
    return draft


def new_eagle(source: Path | str, target: Path | str, layers: int) -> Path:
    """Write a head for the checkpoint ``source`` into ``target``; returns it. It is to be trained: it starts from the policy's last layer
    where that has the same shapes, and ``fc`` adds embedding and hidden state."""
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
    """The tensors of a directory, by name; heads are often kept as torch's own file."""
    for file in sorted(path.glob("*.safetensors")):
        yield from load_file(file).items()
    if not any(path.glob("*.safetensors")):
        for file in sorted(path.glob("pytorch_model*.bin")):
            yield from torch.load(file, map_location="cpu", mmap=True, weights_only=True).items()
