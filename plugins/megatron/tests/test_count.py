"""Counts of models that nobody here can load, against what their authors published."""

import json
from pathlib import Path

import pytest

from miles_megatron import count, families

#: Configurations of published checkpoints, as far as they decide sizes.
PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text())


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (PUBLISHED["DEEPSEEK_V3"], 671.0),  # arXiv 2412.19437: 671B, without the MTP layer
        (PUBLISHED["QWEN3_235B"], 235.1),
        (PUBLISHED["QWEN3_8B"], 8.19),
        (PUBLISHED["MIXTRAL_8X7B"], 46.7),
        (PUBLISHED["LLAMA3_8B"], 8.03),
        (PUBLISHED["QWEN3_NEXT_80B"], 79.67),  # without the MTP layer
        (PUBLISHED["NEMOTRON_3_NANO"], 31.58),
        (PUBLISHED["NEMOTRON_H_8B"], 8.10),
    ],
)
def test_totals_are_the_published_ones(config, billions):
    assert count.model(families.read(config)).total / 1e9 == pytest.approx(billions, rel=1e-3)


def test_an_mtp_layer_is_counted_apart():
    a = families.read(PUBLISHED["DEEPSEEK_V3"])  # the checkpoint's notes: 11.5B that are not shared with the model
    assert (count.model(a, mtp=1).total - count.model(a).total) / 1e9 == pytest.approx(11.5, abs=0.15)


def test_what_divides_what():
    a = families.read(PUBLISHED["QWEN3_235B"])
    whole = count.model(a)
    assert whole.experts == 94 * 128 * 3 * 4096 * 1536
    norms = 94 * (2 * 4096 + 2 * 128) + 4096
    assert whole.whole == norms + 94 * 4096 * 128  # routers
