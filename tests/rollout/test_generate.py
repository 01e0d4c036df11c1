"""Custom generate functions: turns, siblings, what is recorded, and what is refused."""

from __future__ import annotations

import pytest
import torch

from miles_core.errors import ConfigError, DataError
from miles_core.rollout.requests import request_key

WATCH = """
from miles_core.plugin.marker import hookimpl

@hookimpl
def on_start(run):
    run.state["samples"], run.state["requests"], run.state["batches"] = [], [], []

@hookimpl
def on_request(run, request):
    run.state["requests"].append(request)

@hookimpl
def on_sample(run, sample):
    run.state["samples"].append(sample)

@hookimpl
def on_batch(run, batch):
    run.state["batches"].append(batch)
"""

TOOL = [70, 71, 72]  # what a tool says between two turns

TURNS = f"""
async def generate(args, sample, sampling_params):
    first = await args.generate(sample.tokens, {{**sampling_params, "max_new_tokens": 3}})
    tokens = sample.tokens + first.tokens + {TOOL}
    second = await args.generate(tokens)
    sample.tokens = tokens + second.tokens
    sample.response_length = len(first.tokens) + 3 + len(second.tokens)
    sample.response = first.text + second.text
    sample.metadata["first"], sample.metadata["second"] = first, second
    return sample
"""

SIBLINGS = """
import copy

async def generate(args, sample, sampling_params):
    made = []
    for turn in range(1 + sample.index % 2):
        part = copy.deepcopy(sample)
        answer = await args.generate(sample.tokens + [60 + turn])
        part.tokens = sample.tokens + [60 + turn] + answer.tokens
        part.response_length, part.response = len(answer.tokens), answer.text
        part.reward = float(sample.index % 4)
        made.append(part)
    return made
"""


@pytest.fixture
def run(toy_run, tmp_path):
    """``run(code, plugins, **options)``: a toy run with this generate function, watched."""
    (tmp_path / "watch.py").write_text(WATCH)

    def call(code, plugins=(), **options):
        (tmp_path / "generate.py").write_text(code)
        given = {"custom_generate_function_path": tmp_path / "generate.py", "rollout_max_response_len": 5, **options}
        return toy_run([*plugins, str(tmp_path / "watch.py")], **given)

    return call


@pytest.mark.parametrize("plugins", [[], ["r3", "tis"]], ids=["bare", "r3+tis"])
def test_tool_text_between_turns_is_not_trained_on(run, plugins):
    done = run(TURNS, plugins, steps=1)
    samples = done.run.state["samples"]
    assert len(samples) == 8
    for sample in samples:
        first, second = sample.metadata["first"], sample.metadata["second"]
        n = len(first.tokens)
        assert sample.tokens[sample.prompt_length + n :][:3] == TOOL
        assert sample.loss_mask == [1] * n + [0] * 3 + [1] * len(second.tokens)
        assert sample.rollout_log_probs == [*first.log_probs, 0.0, 0.0, 0.0, *second.log_probs]
        assert sample.weight_versions == [(sample.prompt_length, 0), (sample.prompt_length + n + 3, 0)]
    assert done.metrics[0]["mismatch/abs_log_prob"] < 1e-4 and done.metrics[0]["train/grad_norm"] > 0


def test_recorded_fields_cover_every_turn(run):
    done = run(TURNS, ["r3"], steps=1, rollout_top_k=4)
    for sample in done.run.state["samples"]:
        routes, support = sample.rollout_routed_experts, sample.sampling_support
        assert routes.shape == (len(sample.tokens) - 1, 2, 2) and (routes >= 0).all()
        known = torch.tensor(sample.loss_mask).bool()
        assert [len(row) > 0 for row in support] == known.tolist()
        for token, row in zip(sample.tokens[sample.prompt_length :], support, strict=True):
            assert len(row) == 0 or (token in row and len(row) <= 4)
    assert done.metrics[0]["mismatch/abs_log_prob"] < 1e-4
    assert done.metrics[0]["r3/routers_differing"] == 0


def test_every_call_is_shown_to_plugins_under_a_key_of_its_own(run):
    requests = run(TURNS, ["r3"], steps=1).run.state["requests"]
    assert len(requests) == 16 and all("rollout_routed_experts" in request.extras for request in requests)
    second = [request_key(sample, 1) for sample in range(8)]
    assert sorted(request.key for request in requests) == [*range(8), *second]
    assert {request.sampling.max_new_tokens for request in requests} == {3, 5}


def test_siblings_of_one_rollout_count_once(run):
    done = run(SIBLINGS, steps=1)
    samples, (batch,) = done.run.state["samples"], done.run.state["batches"]
    assert len(samples) == 12 and sorted({s.rollout_id for s in samples}) == list(range(8))
    assert len(batch) == 12 and len(batch.rollout.unique()) == 8
    # the loss weights of a rollout add up to 1/8, its siblings together
    from miles_core.algorithm.choices import loss_weights

    weights = loss_weights(batch.mask, batch.lengths, batch.rollout, "rollout_mean")
    for rollout in batch.rollout.unique():
        assert weights[batch.rollout[batch.owner] == rollout].sum().item() == pytest.approx(1 / 8)
    assert done.metrics[0]["rollout/samples"] == 12


def test_siblings_stay_in_one_optimiser_step(run):
    done = run(SIBLINGS, steps=1, num_steps_per_rollout=3)
    from miles_core.train.data_shard import optimiser_steps

    samples = done.run.state["samples"]
    step_of, count = optimiser_steps(samples, done.run.config.train)
    steps = {}
    for sample, step in zip(samples, step_of, strict=True):
        steps.setdefault(sample.rollout_id, set()).add(step)
    assert count == 3 and all(len(found) == 1 for found in steps.values())


def test_a_failed_tool_drops_its_sample(run):
    done = run(
        "from miles_core.data.sample import Status\n\nasync def generate(args, sample, sampling_params):\n"
        "    if sample.index % 4 == 3:\n        sample.status = Status.FAILED\n        return sample\n"
        "    answer = await args.generate(sample.tokens)\n"
        "    sample.tokens = sample.tokens + answer.tokens\n    sample.response_length = len(answer.tokens)\n"
        "    return sample\n",
        steps=1,
    )
    assert done.metrics[0]["rollout/samples"] == 6


@pytest.mark.parametrize(
    ("body", "error", "expected"),
    [
        ("return None", DataError, "returned NoneType for sample"),
        ("return []", DataError, "returned list for sample"),
        (
            "sample.tokens = sample.tokens + [5]; sample.response_length = 1; return sample",
            DataError,
            "never re-tokenise",
        ),
        (
            "a = await args.generate(sample.tokens); sample.tokens = sample.tokens + a.tokens[:-1] + [9, 9]; "
            "sample.response_length = len(a.tokens) + 1; return sample",
            DataError,
            "holds 4 of the 5 tokens that the engine generated",
        ),
        (
            "a = await args.generate(sample.tokens); sample.tokens = sample.tokens + a.tokens; "
            "sample.response_length = 500; return sample",
            DataError,
            "a response_length of 500",
        ),
        ("await args.generate(sample.tokens, {'topk': 1})", DataError, "sampling_params has no 'topk'; it takes"),
        ("await args.generate(sample.tokens, 7)", DataError, "sampling_params must be a mapping, got int"),
    ],
    ids=["none", "empty", "untouched", "re-tokenised", "lengths", "unknown parameter", "no mapping"],
)
def test_mistakes_of_a_generate_function(run, body, error, expected):
    with pytest.raises(error, match=expected):
        run(f"async def generate(args, sample, sampling_params):\n    {body}\n", steps=1)


def test_a_generate_function_that_is_not_async(run):
    with pytest.raises(ConfigError, match="generate must be async"):
        run("def generate(args, sample, sampling_params):\n    return sample\n")


def test_its_arguments_read_like_the_command_line(run):
    done = run(
        "seen = []\n\nasync def generate(args, sample, sampling_params):\n"
        "    assert args.n_samples_per_prompt == 4 and args.rollout_max_response_len == 5\n"
        "    assert sampling_params['max_new_tokens'] == 5 and sampling_params['temperature'] == 1.0\n"
        "    answer = await args.generate(sample.tokens)\n"
        "    sample.tokens += answer.tokens\n    sample.response_length = len(answer.tokens)\n    return sample\n",
        steps=1,
    )
    assert done.metrics[0]["rollout/samples"] == 8


WAITS = """
import asyncio
import scored_groups

async def generate(args, sample, sampling_params):
    answer = await args.generate(sample.tokens)
    if sample.index % 4 == 3:
        async with asyncio.timeout(20):
            while sample.group_index not in scored_groups.numbers:
                await asyncio.sleep(0)
    sample.tokens, sample.response_length = sample.tokens + answer.tokens, len(answer.tokens)
    return sample

async def reward(args, sample):
    scored_groups.numbers.add(sample.group_index)
    return float(sample.index % 4)
"""


def test_samples_are_scored_before_the_last_response_of_their_group(run, tmp_path):
    (tmp_path / "scored_groups.py").write_text("numbers = set()\n")
    found = run(WAITS, n_samples_per_prompt=4, custom_rm_path=f"{tmp_path / 'generate.py'}:reward")
    assert {sample.reward for sample in found.run.state["samples"]} == {0.0, 1.0, 2.0, 3.0}


EXTENDING = """
async def generate(args, sample, sampling_params):
    answer = await args.generate(sample.tokens)
    sample.tokens += answer.tokens
    sample.response_length = len(answer.tokens)
    return sample
"""


def test_a_function_may_extend_the_prompt_of_its_sample(toy_run, tmp_path):
    (tmp_path / "extending.py").write_text(EXTENDING)
    own = toy_run(steps=1, custom_generate_function_path=tmp_path / "extending.py")
    plain = toy_run(steps=1)
    assert [s["tokens"] for s in own.samples] == [s["tokens"] for s in plain.samples]
