"""Decoder stacks with tables of positions, and those whose layers, calls or heads differ from Llama's: each kind is exact, or refused."""

import asyncio
import json

import pytest
import torch
from transformers import CONFIG_MAPPING

from miles_core.contracts.engine import Request, Sampling
from miles_core.contracts.trainer import Callbacks, Output
from miles_core.data.batch import collate
from miles_core.errors import CheckpointError
from miles_core.train.optimizer import OptimizerConfig
from miles_embedded.engine.engine import EmbeddedEngine
from miles_embedded.engine.settings import Settings
from miles_embedded.manifest import SINCE, lacks_release
from miles_embedded.model.examine import examine_checkpoint
from miles_embedded.model.learned_positions import table_length
from miles_embedded.model.load import context_limit, load_model
from miles_embedded.model.parts import decoder_layers, logits_module
from miles_embedded.testing.comparison import compare, expected_log_probs, small_groups
from miles_embedded.testing.tiny_configuration import tiny_configuration
from miles_embedded.trainer.trainer import EmbeddedTrainer, TrainerConfig
from miles_testing import tiny
