"""Rollout functions of plugins: their life cycle, selection by name and by row, policies, messages, and what is refused."""

from __future__ import annotations

import json

import pytest

from miles_core.errors import ConfigError, DataError, PluginError

PLUGIN = """
from miles_core.plugin import Plugin, Policy, RolloutFunction, hookimpl

EVENTS = []

class Debate(RolloutFunction):
    async def start(self):
        EVENTS.append("start")

    async def stop(self):
        EVENTS.append("stop")

    async def __call__(self, sample, ask):
        EVENTS.append("open")
        try:
            BODY
        finally:
            EVENTS.append("close")

def make(run):
    return Debate()

async def twice(sample, ask):
    first = await ask(sampling={"max_new_tokens": 2})
    await ask([70], after=first)
    ask.metrics["twice/calls"] = 2.0
    return ask.transcript.samples(sample)

def make_twice():
    return twice

def make_wrong():
    return 5

class Hooks:
    @hookimpl
    def on_start(self, run):
        run.state["samples"], run.state["requests"], run.state["events"] = [], [], EVENTS
        if SECOND:
            run.policies.append(Policy(hf_checkpoint=run.policy.hf_checkpoint, name="second"))

    @hookimpl
    def on_request(self, run, request):
        run.state["requests"].append(request)

    @hookimpl
    def on_sample(self, run, sample):
        run.state["samples"].append(sample)

plugin = Plugin(
    name="debate", summary="two answers", version="1", core=">=0", hooks={"": f"{__name__}:Hooks"},
    provides={"generate": {"debate": f"{__name__}:make", "twice": f"{__name__}:make_twice", "wrong": f"{__name__}:make_wrong"}},
)
"""

TURNS = """first = await ask()
            await ask([70, 71], after=first)
            return ask.transcript.samples(sample)"""


@pytest.fixture
def run(toy_run, tmp_path, monkeypatch):
    """``run(body, second, **options)``: a toy run with a plugin whose rollout function has this body."""

    def call(body=TURNS, second=False, **options):
        path = tmp_path / "debate.py"
        code = PLUGIN.replace("BODY", body).replace("SECOND", str(second))
        wrong = ', "wrong": f"{__name__}:make_wrong"'
        path.write_text(code if options.get("generate") == "wrong" else code.replace(wrong, ""))
        given = {"steps": 1, "rollout_max_response_len": 4, "generate": "debate", **options}
        return toy_run([str(path)], **given)

    return call


def test_life_cycle_and_samples_of_a_transcript(run):
    done = run()
    events, samples = done.run.state["events"], done.run.state["samples"]
    assert events[0] == "start" and events[-1] == "stop" and events.count("open") == events.count("close") == 8
    for sample in samples:
        first = sample.mask.index(0)
        assert sample.tokens[sample.prompt_length + first :][:2] == [70, 71]
        assert sample.mask == [1] * first + [0, 0] + [1] * (sample.response_length - first - 2)
        assert sample.policy == "policy"
    assert done.metrics[0]["rollout/turns"] == 2.0 and done.metrics[0]["rollout/branches"] == 0.0
    assert done.metrics[0]["mismatch/abs_log_prob"] < 1e-4
    keys = [request.key for request in done.run.state["requests"]]
    assert len(set(keys)) == len(keys) == 16


def test_functions_side_by_side_chosen_by_row(run, tmp_path):
    rows = [{"input": "a"}, {"input": "b", "metadata": {"how": "twice"}}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(prompt_data=tmp_path / "p.jsonl", generate_key="how")
    lengths = {sample.metadata.get("how"): sample.mask.count(0) for sample in done.run.state["samples"]}
    assert lengths == {None: 2, "twice": 1} and done.metrics[0]["twice/calls"] == 2.0
    (tmp_path / "p.jsonl").write_text(json.dumps({"input": "b", "metadata": {"how": "thrice"}}) + "\n")
    with pytest.raises(
        DataError,
        match=r"names the rollout function 'thrice' \(--generate-key how\); the functions of this run are: .*twice",
    ):
        run(prompt_data=tmp_path / "p.jsonl", generate_key="how")


def test_two_policies_answer_each_other_through_their_own_engines(run):
    done = run(
        "first = await ask()\n            await ask([70], after=first, policy='second')\n"
        "            return ask.transcript.samples(sample)",
        second=True,
    )
    requests, samples = done.run.state["requests"], done.run.state["samples"]
    assert [sum(r.policy == name for r in requests) for name in ("policy", "second")] == [8, 8]
    assert [sum(s.policy == name for s in samples) for name in ("policy", "second")] == [8, 8]
    for name in ("policy", "second"):
        assert done.metrics[0][f"{name}/mismatch/abs_log_prob"] < 1e-4  # on-policy, each with its own engine
        assert done.metrics[0][f"{name}/train/grad_norm"] > 0 and f"{name}/reward/mean" in done.metrics[0]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return None", "the rollout function debate of plugin debate returned NoneType for sample"),
        (
            "raise ValueError('boom')",
            "the rollout function debate of plugin debate, on sample [0-7]: it raised ValueError: boom",
        ),
        (
            "await ask(policy='third')",
            "asks the policy 'third'; the policies of this run that generate are: policy",
        ),
        ("await ask([1], messages=[{}])", "ask takes token ids or messages, not both"),
        ("await ask('text')", "ask takes token ids, not text"),
        ("await ask(after=await ask())", "needs the tokens or messages that follow the turn"),
        (
            "return ask.transcript.samples(sample) if not await ask() else []",
            "the rollout function debate of plugin debate returned list for sample",
        ),
    ],
)
def test_mistakes_of_a_rollout_function(run, body, expected):
    with pytest.raises(DataError, match=expected):
        run(body)


def test_a_dropped_sample_releases_what_it_holds(run):
    done = run(
        "if sample.group_index in (0, 3):\n                await __import__('asyncio').sleep(300)\n"
        "            await ask()\n            return ask.transcript.samples(sample)",
        rollout_batch_size=1,
        over_sampling_batch_size=2,
    )
    events = done.run.state["events"]
    assert events[-1] == "stop" and events.count("open") == events.count("close") == 8


def test_what_provides_no_rollout_function(run):
    with pytest.raises(
        PluginError,
        match=r"plugin debate, hook make_generate \(wrong\): it returned a int, 5; expected a RolloutFunction",
    ):
        run(generate="wrong")
    with pytest.raises(ConfigError, match="a sample has one rollout function"):
        run(custom_generate_function_path="x.py")


def test_messages_continue_a_turn_token_by_token(run):
    done = run(
        "turn = await ask(messages=[{'role': 'user', 'content': 'sum'}], sampling={'stop_token_ids': list(range(200))})\n"
        "            again = await ask(messages=[{'role': 'tool', 'content': '4<|end|>'}], after=turn)\n"
        "            assert again.tokens[: len(turn.tokens)] == turn.tokens\n"
        "            sample.metadata['text'] = ask.tokenizer.decode(list(again.prompt))\n"
        "            return ask.transcript.samples(sample)"
    )
    for sample in done.run.state["samples"]:
        assert sample.metadata["text"].endswith("<|start|>tool: 4<|end|><|end|><|start|>assistant: ")
        assert sample.mask.count(0) > 0
    assert done.metrics[0]["mismatch/abs_log_prob"] < 1e-4


@pytest.mark.parametrize("limit", [3, None])
def test_at_most_max_concurrent_samples_are_generated_at_once(run, limit):
    body = f"""EVENTS.append(EVENTS.count("open") - EVENTS.count("close"))
            await ask()
            return ask.transcript.samples(sample)  # {limit}"""  # a text of its own is a module of its own
    counts = [event for event in run(body, max_concurrent_samples=limit).run.state["events"] if isinstance(event, int)]
    assert max(counts) == (limit or 8) and len(counts) == 8


def test_requests_of_cancelled_calls_are_aborted_when_their_function_returns(run):
    done = run(
        "import asyncio\n"
        "            lost = asyncio.ensure_future(ask(sampling={'max_new_tokens': 400, 'ignore_eos': True}))\n"
        "            await ask()\n"
        "            lost.cancel()\n"
        "            await asyncio.gather(lost, return_exceptions=True)\n"
        "            assert ask.abandoned and len(ask.transcript.turns) == 1\n"
        "            return ask.transcript.samples(sample)"
    )
    assert not done.engine.rows and not done.engine.scheduler.waiting
    assert max(sample.response_length for sample in done.run.state["samples"]) <= 4
