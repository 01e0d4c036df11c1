"""Defaults of the trainer contract."""

from contextlib import nullcontext

import pytest

from miles_core.contracts.emulation import Emulation
from miles_core.contracts.trainer import Trainer
from miles_core.errors import MilesError


def test_a_trainer_without_emulation_names_the_switches():
    trainer = object()
    assert isinstance(Trainer.emulate(trainer, Emulation(), codec=None), nullcontext)
    with pytest.raises(MilesError, match=r"object cannot score .*\(emulation: encoded, kv_dtype\)"):
        Trainer.emulate(trainer, Emulation(encoded=True, kv_dtype="fp8_e4m3"), codec=None)
