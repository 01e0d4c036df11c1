"""Samples in a checkpoint."""

import numpy as np
import pytest

from miles_core.checkpoint.samples import get_samples, put_samples
from miles_core.checkpoint.store import Store
from miles_core.data.media import Media
from miles_core.data.sample import Sample, Status
from miles_core.errors import CheckpointError


def test_samples_come_back_equal(tmp_path):
    routed = np.arange(12, dtype=np.int32).reshape(3, 2, 2)
    support = [np.array([1, 5], np.int32), np.array([], np.int32), np.array([2], np.int32)]
    sample = Sample(
        prompt=[{"role": "user", "content": "1+1="}],
        tokens=[1, 2, 3, 4],
        response="2",
        response_length=2,
        label=np.int64(2),
        reward={"exact": np.float32(0.5)},
        loss_mask=[1, 0],
        status=Status.TRUNCATED,
        metadata={"turns": [1, {"a": None}], "score": np.float64(0.25)},
        rollout_log_probs=[-0.1, -1e-30],
        weight_versions=[(0, 3), (2, 4)],
        group_index=7,
        index=57,
        rollout_id=3,
        remove_sample=True,
        fields={"routed": routed, "support": support, "flag": True, "scalar": np.array(2.5)},
    )
    put_samples(Store(tmp_path), "buffer", [sample, Sample(index=58)])
    first, second = get_samples(Store(tmp_path), "buffer")
    assert second == Sample(index=58)
    for name in ("prompt", "tokens", "label", "reward", "status", "metadata", "rollout_log_probs", "weight_versions"):
        assert getattr(first, name) == getattr(sample, name), name
    assert (first.group_index, first.index, first.rollout_id, first.remove_sample) == (7, 57, 3, True)
    assert first.fields["routed"].dtype == np.int32
    np.testing.assert_array_equal(first.fields["routed"], routed)
    assert [row.tolist() for row in first.fields["support"]] == [[1, 5], [], [2]]
    assert first.fields["scalar"].shape == ()
    assert first.fields["flag"] is True


def test_no_samples(tmp_path):
    put_samples(Store(tmp_path), "buffer", [])
    assert get_samples(Store(tmp_path), "buffer") == []


@pytest.mark.parametrize(
    ("sample", "where"),
    [
        (Sample(index=4, metadata={"tool": object()}), r"sample 4: metadata\['tool'\] holds a object"),
        (Sample(index=5, label={3: 1}), "sample 5: label holds a dict"),
        (Sample(index=6, fields={"x": np.array(["a"])}), "sample field 0.x: an array of <U1"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, sample, where):
    with pytest.raises(CheckpointError, match=where):
        put_samples(Store(tmp_path), "buffer", [sample])


def test_media_are_saved_once_for_all_samples_that_share_them(tmp_path):
    content = bytes(range(256)) * 40
    here, there = Media.of("image", content), Media("image", "0" * 64, "/a.png")
    put_samples(Store(tmp_path), "buffer", [Sample(index=i, media=(here, there)[: 1 + i % 2]) for i in range(8)])
    assert sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file()) < 2 * len(content)
    found = get_samples(Store(tmp_path), "buffer")
    assert [sample.media for sample in found] == [(here,), (here, there)] * 4
    assert found[0].media[0].source == content and found[1].media[1].source == "/a.png"
    assert found[0].media[0] is found[7].media[0]
