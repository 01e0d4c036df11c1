"""A sequence classifier with one label, which scores texts in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from miles_core.plugin import CheckpointError, MilesError
from miles_core.trainer import CheckpointFiles
from miles_embedded import checkpoint_config

FLAG = "--rm-model"
#: Name of the weight of the score head.
SCORE = "score.weight"


class Classifier:
    """Scores token ids with the model in a checkpoint.

    A score is what the head computes from the hidden state of the last token. Texts are padded on the right, so that no padding precedes a
    token. The weights are read when the first text is scored.

    Args:
        path: the checkpoint.
        device: device of the weights.
        dtype: their dtype.
        max_tokens: largest number of tokens of a forward pass, padding included.
        trust_remote_code: run model code from the checkpoint.

    Attributes:
        limit: longest text, in tokens; None if the configuration states none.

    Raises:
        CheckpointError: it is not a sequence classifier with one label.
    """

    def __init__(
        self, path: Path, device: str, dtype: torch.dtype, max_tokens: int, trust_remote_code: bool = False
    ) -> None:
        self.path, self.device, self.dtype, self.max_tokens = path, device, dtype, max_tokens
        self.trust_remote_code = trust_remote_code
        self.config = checkpoint_config(path, trust_remote_code, FLAG)
        self.limit: int | None = getattr(self.config, "max_position_embeddings", None)
        names = self.config.architectures or ["no architecture"]
        if not names[0].endswith("ForSequenceClassification"):
            raise CheckpointError(
                f"{FLAG} {path}: it is not a sequence classifier ({names[0]} in config.json); train one with --advantage-estimator "
                "reward_model, or choose one of the class ...ForSequenceClassification"
            )
        head = CheckpointFiles(path, FLAG).entries.get(SCORE)
        if head is None or head.shape[0] != 1:
            what = f"it has no weight {SCORE}" if head is None else f"it has {head.shape[0]} labels ({SCORE})"
            raise CheckpointError(f"{FLAG} {path}: {what}, and a reward model has one score; choose another checkpoint")

    @cached_property
    def model(self) -> Any:
        """The model, on its device."""
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(
                self.path,
                config=self.config,
                dtype=self.dtype,
                trust_remote_code=self.trust_remote_code,
                use_safetensors=True,
                output_loading_info=True,
            )
            model = model.to(self.device).eval()
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise CheckpointError(f"{FLAG} {self.path}: it cannot be loaded ({error!s:.200})") from error
        if missing := sorted(found["missing_keys"]):
            raise CheckpointError(
                f"{FLAG} {self.path}: {len(missing)} weights are missing, first {missing[0]}; copy the checkpoint again"
            )
        return model

    @torch.inference_mode()
    def score(self, texts: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each text. The result depends on which texts are scored together only by rounding, and is the same for
        the same call."""
        return [score for batch in self._split(texts) for score in self._forward(batch)]

    def _split(self, texts: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
        batch: list[Sequence[int]] = []
        for text in texts:
            if batch and (len(batch) + 1) * max(map(len, [*batch, text])) > self.max_tokens:
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch

    def _forward(self, texts: Sequence[Sequence[int]]) -> list[float]:
        lengths = torch.tensor([len(text) for text in texts])
        ids = torch.zeros(len(texts), int(lengths.max()), dtype=torch.long)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        layers = getattr(self.model, self.model.base_model_prefix)
        hidden = layers(
            input_ids=ids.to(self.device), attention_mask=mask.long().to(self.device), use_cache=False
        ).last_hidden_state
        last = hidden[torch.arange(len(texts)), (lengths - 1).to(hidden.device)]
        found: list[float] = self.model.score(last).float()[:, 0].tolist()
        return found


def check_lengths(texts: Sequence[Sequence[int]], limit: int | None) -> None:
    """MilesError if a text is longer than ``limit``."""
    longest = max(map(len, texts), default=0)
    if limit is not None and longest > limit:
        raise MilesError(
            f"a prompt with its response has {longest} tokens, and the reward model reads {limit} (max_position_embeddings); lower "
            "--rollout-max-context-len, or use another --rm-model"
        )
