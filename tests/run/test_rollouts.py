"""Samples on disk: all of them, whole or absent, once each, and no more than a size."""

import gzip
import json

import pytest

from miles_core.errors import MilesError
from miles_core.run import rollouts
from miles_core.run.rollouts import Pieces, RolloutFiles, read_rollouts, rollout_files

PARTS = """
async def reward(args, sample):
    even = sum(token % 2 == 0 for token in sample.tokens[sample.prompt_length :]) / sample.response_length
    return {"even": even, "length": float(sample.response_length)}
"""


class Letters:
    def convert_ids_to_tokens(self, token):
        return "\u2581" + chr(token)

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def files(directory, limit=1 << 30, start=-1):
    return RolloutFiles(directory, Letters(), limit, start)


def test_every_sample_of_training_and_evaluation_is_kept_with_what_training_saw(toy_run, tmp_path):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "eval.jsonl").write_text('{"input": "z"}\n{"input": "y"}\n')
    run = toy_run(
        ["r3", "tis"],
        steps=2,
        custom_rm_path=tmp_path / "parts.py",
        reward_key="even",
        eval_prompt_data=f"held={tmp_path / 'eval.jsonl'}",
        eval_interval=2,
    )
    held_out = list(read_rollouts(run.directory, "eval"))
    assert [(s["step"], s["set"], s["prompt"]) for s in held_out] == [(n, "held", p) for n in (0, 2) for p in "zy"]
    assert held_out[0]["train_log_probs"] is None
    assert len(run.samples) == 16 and len({s["index"] for s in run.samples}) == 16
    for step, record in enumerate((r for r in run.metrics if r["step"]), start=1):
        found = list(read_rollouts(run.directory, step=step))
        gaps = [abs(a - b) for s in found for a, b in zip(s["train_log_probs"], s["rollout_log_probs"], strict=True)]
        assert sum(gaps) / len(gaps) == pytest.approx(record["mismatch/abs_log_prob"], abs=2e-6)
        assert {s["advantages"][0] for s in found} != {0.0}
        for name in ("even", "length"):
            mean = sum(s["reward"][name] for s in found) / len(found)
            assert record[f"reward/part/{name}"] == pytest.approx(mean)
        assert all(len(s["pieces"]) == s["response_length"] for s in found)
        assert any("".join(s["pieces"]).startswith(s["response"]) for s in found)  # not of bytes that are no character


def test_the_old_policys_log_probs_are_kept_where_a_rollout_is_several_optimiser_steps(toy_run):
    run = toy_run(steps=1, num_steps_per_rollout=4, lr=1e-2)
    gaps = [a - b for s in run.samples for a, b in zip(s["train_log_probs"], s["rollout_log_probs"], strict=True)]
    assert max(map(abs, gaps)) < 1e-4


def test_a_run_that_keeps_no_samples_writes_none_and_leaves_none_of_steps_it_makes_again(toy_run, tmp_path):
    keep = RolloutFiles(tmp_path / "run", Letters(), 1 << 30, -1)
    keep.write("train", 1, [{"text": "of a start that failed"}])
    run = toy_run(steps=1, directory=tmp_path / "run", save_rollouts=False)
    assert run.samples == [] and "train/loss" in run.metrics[0]


def test_a_step_is_whole_or_absent_and_none_is_there_twice(tmp_path, monkeypatch, caplog):
    written = files(tmp_path)
    for step in (1, 2, 3):
        written.write("train", step, [{"text": "a" * step}, {"text": "\ud800\u2028"}])
    with monkeypatch.context() as broken:
        broken.setattr(rollouts.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # killed before the rename
            written.write("train", 4, [{}])
    assert list(rollout_files(tmp_path)) == [1, 2, 3]
    resumed = files(tmp_path, start=2)
    assert not list((tmp_path / "rollouts/train").glob("*.part"))
    assert [s["step"] for s in read_rollouts(tmp_path)] == [1, 1, 2, 2]
    resumed.write("train", 3, [{"text": "again"}])
    assert [s["text"] for s in read_rollouts(tmp_path, step=3)] == ["again"]
    with pytest.raises(MilesError, match="step 9 are not on disk; those of steps 1 to 3 are"):
        list(read_rollouts(tmp_path, step=9))
    rollout_files(tmp_path)[2].write_bytes(gzip.compress(b'{"step": 2}\n')[:-6])
    assert [s["step"] for s in read_rollouts(tmp_path)] == [1, 1, 3] and "00000002.jsonl.gz" in caplog.text
    assert "saved samples are damaged" not in caplog.text
    files(tmp_path, start=3)
    assert "1 of the 3 newest files with saved samples are damaged" in caplog.text


def test_the_oldest_steps_are_deleted_beyond_the_size_and_the_newest_is_kept(tmp_path):
    text = json.dumps([n * 7919 % 1000 for n in range(400)])
    written = files(tmp_path, limit=3000)
    for step in range(1, 9):
        written.write("train", step, [{"text": text}])
        written.write("eval", step, [{"text": text}])
    kept = [*rollout_files(tmp_path).values(), *rollout_files(tmp_path, "eval").values()]
    assert sum(p.stat().st_size for p in kept) <= 3000 and max(rollout_files(tmp_path)) == 8
    small = files(tmp_path, limit=1, start=8)
    small.write("train", 9, [{"text": text}])
    assert list(rollout_files(tmp_path)) == [9] and not rollout_files(tmp_path, "eval")


def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(MilesError, match=r"cannot write the samples of step 1.*--no-save-rollouts"):
        files(tmp_path).write("train", 1, [{}])


def test_a_leading_space_that_decoding_drops_is_shown():
    assert Pieces(Letters())[ord("a")] == " a"


def test_what_a_function_put_into_a_sample_is_written_as_far_as_json_has_a_form_for_it(tmp_path):
    around: dict = {}
    around["self"] = around
    odd = {"a": float("nan"), ("k", 1): {1, 2}, "b": [float("inf"), 1, "\ud800"], "around": around}
    files(tmp_path).write("train", 1, [{"metadata": odd}, {"metadata": {"x": {3}}}])
    found, plain = read_rollouts(tmp_path)
    assert found["metadata"]["a"] is None and found["metadata"]["b"] == [None, 1, "\ud800"]
    assert found["metadata"]["('k', 1)"] == "{1, 2}" and plain["metadata"]["x"] == "{3}"
    assert "NaN" not in gzip.decompress(rollout_files(tmp_path)[1].read_bytes()).decode()
