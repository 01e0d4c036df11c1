"""Trains the checkpoint's MTP layer next to the policy; see ``MtpRequest``.

Megatron-Core makes such a layer part of the policy's model. Here it is a separate module on the last pipeline stage, with its own gradient
buffers and optimizer. The layer therefore does not change the order of the policy's reductions, and the policy's results are bitwise the
same with and without it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
from megatron.core.fp8_utils import get_fp8_context
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer, get_mtp_layer_spec
from torch import Tensor, nn
from torch.nn.functional import pad

from miles_core.data import Batch
from miles_core.trainer import MtpRequest, OptimizerConfig
from miles_megatron.architecture import Architecture
from miles_megatron.sizes import Sizes
from miles_megatron.trainer.context import gather_over_context, sum_over_context
from miles_megatron.trainer.gating import allow_wide_weights
from miles_megatron.trainer.latent import set_norm_epsilon
from miles_megatron.trainer.logprobs import head_on, token_log_probs, whole_rows
from miles_megatron.trainer.model import block_spec, has_transformer_engine
from miles_megatron.trainer.optimizer import Optimizer
from miles_megatron.trainer.packing import Packing
from miles_megatron.trainer.weights import FIRST_MTP


class Layer(MegatronModule):
    """The MTP layer on ranks of the last pipeline stage; an empty module on other ranks.

    Args:
        a: the architecture.
        s: parallel sizes.
        config: configuration of the policy's model.
    """

    def __init__(self, a: Architecture, s: Sizes, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.here = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if not self.here:
            return
        own = copy.copy(config)
        own.mtp_num_layers = 1
        own.moe_expert_capacity_factor = None
        block = block_spec(a, config, s.virtual - 1 if s.virtual > 1 else None).layer_specs[-1]
        self.layer = MultiTokenPredictionLayer(
            own,
            get_mtp_layer_spec(block, has_transformer_engine()).submodules,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        if a.latent is not None:
            set_norm_epsilon(self.layer, a.latent.epsilon)
        if a.experts is not None and a.experts.wide_router:
            allow_wide_weights(self.layer)
        if torch.cuda.is_available():
            self.cuda()

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the state for Megatron-Core's checkpoints; empty on other stages."""
        state = self.layer.sharded_state_dict("layer.") if self.here else {}
        replace_prefix_for_sharding(state, "layer.", FIRST_MTP)
        return state


class Mtp:
    """Training of the MTP layer.

    Args:
        request: how to train it.
        a: the architecture.
        s: parallel sizes.
        config: configuration of the policy's model.
        chunks: this rank's chunks of the policy, not wrapped.

    Attributes:
        layer: the layer; the constructor does not load its weights.
        optimizer: its optimizer; set by ``wrap``.
    """

    def __init__(
        self, request: MtpRequest, a: Architecture, s: Sizes, config: TransformerConfig, chunks: Sequence[nn.Module]
    ) -> None:
        self.request, self.a, self.s, self.config, self.chunks = request, a, s, config, chunks
        self.layer = Layer(a, s, config)
        self._embedding: Tensor | None = None

    def wrap(self, wrapped: Any, settings: OptimizerConfig, dtype: torch.dtype, options: Mapping[str, Any]) -> None:
        """Store ``layer`` wrapped in Megatron-Core's ``DistributedDataParallel`` and create its optimizer. A collective of all ranks."""
        self.wrapped = wrapped
        self.optimizer = Optimizer([wrapped], replace(settings, clip_grad=self.request.clip_grad), dtype, options)

    def begin(self) -> None:
        """Begin a step: zero the gradients and broadcast the embedding from the first to the last stage."""
        self.wrapped.zero_grad_buffer()
        self.optimizer.inner.zero_grad()
        if self.s.pp == 1 or self.a.tied or not parallel_state.is_rank_in_embedding_group():
            return
        if not self.layer.here:
            first: Any = self.chunks[0]
            table = first.embedding.word_embeddings.weight.detach()
        else:
            last: Any = self.chunks[-1]
            table = self._embedding = torch.empty_like(last.output_layer.weight.detach())
        group = parallel_state.get_embedding_group()
        dist.broadcast(table, dist.get_global_rank(group, 0), group=group)

    def finish(self) -> None:
        """Finish the backward passes: reduce gradients over replicas, and those of replicated parameters over tensor-parallel ranks."""
        self.wrapped.finish_grad_sync()
        group = parallel_state.get_tensor_model_parallel_group()
        _allreduce_non_tensor_model_parallel_grads([self.wrapped], self.config, group)

    def step(self, norm: float, rate: float) -> None:
        """Run one optimizer step with gradients of norm ``norm``. rate: the policy's learning rate, used unless the layer has its own.

        A collective of all ranks."""
        self.optimizer.step(norm, rate if self.request.lr is None else self.request.lr)

    def loss(self, hidden: Tensor, micro_batch: Batch, packing: Packing, packed: Any) -> tuple[Tensor, Tensor]:
        """Return the loss as (sum, number of trained tokens) for ``Output.aux``, the same on every context-parallel rank.

        Args:
            hidden: [rows of this context-parallel rank, hidden] the policy's last hidden states.
            micro_batch: the micro-batch.
            packing: layout of its tokens.
            packed: the layout as Megatron-Core's ``PackedSeqParams``.
        """
        layer: Any = self.layer.layer
        states = self._mine(self._before(hidden.detach(), packing, len(micro_batch.tokens)))
        embedded = self._mine(self._embedded(pad(micro_batch.tokens, (0, 1))[packing.rows]))
        joined = layer._concat_embeddings(states.unsqueeze(1), embedded.unsqueeze(1))
        last: Any = self.chunks[-1]
        rotary = last._preprocess(None, None, decoder_input=joined, packed_seq_params=packed)[1]
        with get_fp8_context(self.config) if self.config.fp8 else nullcontext():  # the projection stays in BF16
            out, _ = layer.mtp_model_layer(
                hidden_states=joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed
            )
        rows = whole_rows(layer.final_layernorm(out), self.s.sequence).index_select(0, packing.sources)
        weight = last.shared_embedding_or_output_weight() if self.a.tied else last.output_layer.weight
        head = head_on(weight.detach(), self.a.vocab, 1.0)
        found = token_log_probs(head, rows, micro_batch.tokens[packing.targets], None, False)
        return self.request.factor * sum_over_context(-found[:, 0].sum()), (micro_batch.mask != 0).sum()

    def _before(self, hidden: Tensor, packing: Packing, tokens: int) -> Tensor:
        """Return [rows, hidden]: for each row the hidden state of the previous token; zeros for first tokens and padding."""
        rows = gather_over_context(packing.rows)
        none, padding = tokens, tokens + 1
        flat = hidden.new_zeros(tokens + 2, hidden.shape[1])
        flat.index_copy_(0, torch.where(rows < 0, padding, rows), gather_over_context(hidden))
        return flat[torch.where((packing.positions > 0) & (packing.rows > 0), packing.rows - 1, none)]

    @torch.no_grad()
    def _embedded(self, tokens: Tensor) -> Tensor:
        """Return [n, hidden]: the embeddings of [n] tokens, from a table whose rows are split across tensor-parallel ranks."""
        one: Any = self.chunks[-1]
        table = self._embedding
        if table is None:
            table = one.shared_embedding_or_output_weight() if self.a.tied else one.embedding.word_embeddings.weight
        at = tokens - parallel_state.get_tensor_model_parallel_rank() * len(table)
        here = (at >= 0) & (at < len(table))
        found = table[torch.where(here, at, 0)] * here.unsqueeze(1)
        if self.s.tp > 1:
            dist.all_reduce(found, group=parallel_state.get_tensor_model_parallel_group())
        return found

    def _mine(self, rows: Tensor) -> Tensor:
        """Return this rank's rows with sequence parallelism, else all rows."""
        if not self.s.sequence:
            return rows
        return rows.chunk(self.s.tp)[parallel_state.get_tensor_model_parallel_rank()]
