import json
from pathlib import Path

import numpy as np
import pytest

from miles_core.plugin import CheckpointError
from miles_workers import Routing, language_config

MOE = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1}


def test_a_record_becomes_a_column_of_the_moe_layers():
    routing = Routing.of(MOE, "int16")
    assert routing is not None
    record = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    expected = record[:, 1:]
    for given in (record, record.reshape(-1), expected):  # vLLM's, SGLang's, and without the dense layer
        column = routing.column(given)
        assert column.dtype == np.int16 and (column == expected).all()


def test_a_model_without_experts_has_no_record():
    assert Routing.of({"num_hidden_layers": 3}, "int16") is None


def test_the_configuration_is_that_of_the_language_model(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "both", "text_config": {"vocab_size": 7}}))
    assert language_config(tmp_path)["vocab_size"] == 7


@pytest.mark.parametrize("name", ["somebody/model", "/nowhere"])
def test_a_directory_that_does_not_exist_is_named(name: str):
    with pytest.raises(CheckpointError, match=f"--hf-checkpoint {name}: no such directory"):
        language_config(name)
