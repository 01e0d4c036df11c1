"""Samples on disk: all of them, whole or absent, once each, and no more than a size."""

import asyncio
import gzip
import json
import os
import pickle
import signal

import numpy as np
import pytest

from miles_core.contracts.runtime import TrainedTokens
from miles_core.data.sample import Sample, Status
from miles_core.errors import MilesError
from miles_tools.samples import saver as module
from miles_tools.samples import writers
from miles_tools.samples.files import read_rollouts, rollout_files
from miles_tools.samples.rows import JoinedRows, Pieces, Row, divide, pack_plain, to_json
from miles_tools.samples.saver import SampleSaver

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
    saver = SampleSaver(directory, Letters(), limit)
    saver.roll_back(start)
    return saver


def write(saver, kind, step, rows):
    saver.save(kind, step, [Row({"step": step, **row}) for row in rows])


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
    write(files(tmp_path / "run"), "train", 1, [{"text": "of a start that failed"}])
    run = toy_run(steps=1, directory=tmp_path / "run", save_rollouts=False)
    assert run.samples == [] and "train/loss" in run.metrics[0]


def test_a_step_is_whole_or_absent_and_none_is_there_twice(tmp_path, monkeypatch, caplog):
    written = files(tmp_path)
    for step in (1, 2, 3):
        write(written, "train", step, [{"text": "a" * step}, {"text": "\ud800\u2028"}])
    with monkeypatch.context() as broken:
        broken.setattr(module.Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):  # killed before the rename
            write(written, "train", 4, [{}])
    assert list(rollout_files(tmp_path)) == [1, 2, 3]
    resumed = files(tmp_path, start=2)
    assert not list((tmp_path / "rollouts/train").glob("*.part"))
    assert [s["step"] for s in read_rollouts(tmp_path)] == [1, 1, 2, 2]
    write(resumed, "train", 3, [{"text": "again"}])
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
        write(written, "train", step, [{"text": text}])
        write(written, "eval", step, [{"text": text}])
    kept = [*rollout_files(tmp_path).values(), *rollout_files(tmp_path, "eval").values()]
    assert sum(p.stat().st_size for p in kept) <= 3000 and max(rollout_files(tmp_path)) == 8
    small = files(tmp_path, limit=1, start=8)
    write(small, "train", 9, [{"text": text}])
    assert list(rollout_files(tmp_path)) == [9] and not rollout_files(tmp_path, "eval")


def test_a_full_disk_is_one_sentence(tmp_path):
    (tmp_path / "rollouts").write_text("in the way")
    with pytest.raises(MilesError, match=r"cannot write the samples of step 1.*--no-save-rollouts"):
        write(files(tmp_path), "train", 1, [{}])


def test_a_leading_space_that_decoding_drops_is_shown():
    pieces = Pieces(Letters())
    pieces.add(np.array([ord("b"), ord("a"), ord("b")], np.int32))
    assert pieces == {ord("a"): " a", ord("b"): " b"}


def test_what_a_function_put_into_a_sample_is_written_as_far_as_json_has_a_form_for_it(tmp_path):
    around: dict = {}
    around["self"] = around
    odd = {"a": float("nan"), ("k", 1): {1, 2}, "b": [float("inf"), 1, "\ud800"], "around": around}
    write(files(tmp_path), "train", 1, [{"metadata": odd}, {"metadata": {"x": {3}}}])
    found, plain = read_rollouts(tmp_path)
    assert found["metadata"]["a"] is None and found["metadata"]["b"] == [None, 1, "\ud800"]
    assert found["metadata"]["('k', 1)"] == "{1, 2}" and plain["metadata"]["x"] == "{3}"
    assert "NaN" not in gzip.decompress(rollout_files(tmp_path)[1].read_bytes()).decode()


def samples(count, length):
    """Samples of ``length`` response tokens after a prompt of two."""
    random = np.random.default_rng(0)
    for index in range(count):
        tokens = random.integers(32, 1000, length + 2).tolist()
        sample = Sample("a prompt", tokens, "\ud83d an answer", length, reward=1.0, index=index, metadata={"x": {3}})
        sample.rollout_log_probs = [-0.1234567] * length
        sample.loss_mask = [0, *[1] * (length - 1)]
        yield sample, TrainedTokens(np.full(length, -0.5, np.float32), np.full(length, np.nan, np.float32)), ""


def test_large_steps_are_written_by_other_processes_with_the_same_contents(tmp_path, monkeypatch):
    def save(directory, small):
        monkeypatch.setattr(module, "SMALL", small)
        monkeypatch.setattr(writers, "SHARE", 100)

        async def run(saver):
            for step in (1, 2):
                await saver.write_samples("train", step, samples(9, 40 * step))

        saver = SampleSaver(directory, Letters(), 1 << 30, writers=3)
        asyncio.run(run(saver))
        count = sum(map(len, saver._writers._readers.values()))
        saver.close()
        return count, list(read_rollouts(directory))

    (no_process, here), (processes, elsewhere) = save(tmp_path / "here", 10**9), save(tmp_path / "elsewhere", 10)
    assert (no_process, processes) == (0, 3)
    assert elsewhere == here and [row["index"] for row in here] == [*range(9), *range(9)]
    first = here[0]
    assert first["pieces"][0] == " " + chr(first["tokens"][2]) and first["loss_mask"][:2] == [0, 1]
    assert first["rollout_log_probs"][0] == -0.123457 and first["advantages"][0] is None
    assert sorted(p.name for p in (tmp_path / "elsewhere/rollouts/train").iterdir()) == [
        "00000001.jsonl.gz",
        "00000002.jsonl.gz",
    ]


def test_joined_rows_are_split_into_rows():
    saved = [(sample, trained if number else None, "set") for number, (sample, trained, _) in enumerate(samples(3, 5))]
    saved[1][0].loss_mask = None
    for rows in (JoinedRows.of(1, saved), JoinedRows.of(1, saved).pack(), JoinedRows.of(1, saved[:1])):
        assert rows.size == 8 * len(rows)
        for row, (sample, trained, _) in zip(rows.split(), saved, strict=False):
            assert row.plain["index"] == sample.index and row.response_length == 5
            columns = {
                "tokens": (sample.tokens, np.int32),
                "loss_mask": (sample.loss_mask, np.int8),
                "rollout_log_probs": (sample.rollout_log_probs, np.float64),
                "train_log_probs": (trained and trained.log_probs, np.float32),
                "advantages": (trained and trained.advantages, np.float32),
            }
            assert [*row.columns] == [*columns]
            for name, (expected, dtype) in columns.items():
                column = row.columns[name]
                assert (column is None) == (expected is None), name
                if expected is not None:
                    assert column.dtype == dtype
                    np.testing.assert_array_equal(column, expected)


@pytest.mark.parametrize("value", [np.float64(0.1), {3}, Status.FAILED, {"a": object()}, [10**30], {1: "\ud83d"}])
def test_entries_reach_another_process_with_the_same_json_text(value):
    class Own(str): ...

    for entries in ({"metadata": value}, {"metadata": {Own("key"): [Own("value"), value]}}):
        (received,) = pickle.loads(pack_plain([entries]))
        assert received.get("") or to_json(received) == to_json(entries)
        classes = {type(each) for each in walk(received)}
        assert classes <= {dict, list, str, int, float, set}


def walk(value):
    yield value
    for inner in (
        value if isinstance(value, list | set) else [*value, *value.values()] if isinstance(value, dict) else ()
    ):
        yield from walk(inner)


def test_a_writer_that_dies_stops_the_run_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)

    async def run(saver):
        await saver.write_samples("train", 1, samples(2, 10))
        await saver.write_samples("train", 2, samples(2, 10))
        os.kill(saver._writers._readers[False][0].pid, signal.SIGKILL)
        for step in (3, 4, 5):
            await saver.write_samples("train", step, samples(2, 10))

    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    with pytest.raises(MilesError, match=r"the process that saves samples was killed by signal 9; resume the run"):
        asyncio.run(run(saver))
    saver.close()
    assert {1} <= {row["step"] for row in read_rollouts(tmp_path)}


def test_a_writer_that_cannot_write_stops_the_run_with_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SMALL", 0)
    (tmp_path / "rollouts/train/00000001.jsonl.part").mkdir(parents=True)  # as if the file could not be created
    saver = SampleSaver(tmp_path, Letters(), 1 << 30)
    asyncio.run(saver.write_samples("train", 1, samples(2, 10)))
    with pytest.raises(MilesError, match=r"cannot write the samples of step 1 to .*Is a directory; free space there"):
        saver.close()


@pytest.mark.parametrize(("sizes", "parts"), [([5], 3), ([1, 1, 100, 1], 2), ([3] * 10, 4), ([0, 0], 8)])
def test_rows_are_divided_without_loss(sizes, parts):
    found = [sizes[part] for part in divide([1 + size for size in sizes], parts)]
    assert [size for part in found for size in part] == sizes and 1 <= len(found) <= parts and all(found)
