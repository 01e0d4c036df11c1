"""``--generate tools`` in real runs: conversations, masks, limits, failures, and what the plan refuses."""

import json

import pytest

from miles_core.data import CannotExtend, Renderer
from miles_core.plugin import PlanError
from miles_tool_calls import plugin

TOOLS = '''
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b

async def shout(text: str, times: int = 1) -> str:
    """Repeat a text."""
    return text * times

async def wait() -> str:
    """Wait for half a minute."""
    import asyncio
    await asyncio.sleep(30)

class Lock:
    """One per conversation."""

    def __init__(self, row):
        if row.get("bad"):
            raise OSError("no lock")
        self.opened = 0

    async def open(self) -> str:
        """Open."""
        self.opened += 1
        return f"opened {self.opened} times"
'''
#: A function that is not async runs in a worker process.
WORKING = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''
REWARD = """
def reward(args, sample):
    return float(sample.index % 2) + 0.1 * len(sample.metadata["tool_calls"])
"""


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.fixture
def run(toy_run, checkpoint, tmp_path):
    """``run(rows, **options)``: one step on prompts with tools."""
    (tmp_path / "mine.py").write_text(TOOLS)
    (tmp_path / "reward.py").write_text(REWARD)

    def run(rows=({}, {}), **options):
        lines = [{"input": f"question {i}", "metadata": row} for i, row in enumerate(rows)]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        given = {
            "hf_checkpoint": checkpoint,
            "prompt_data": tmp_path / "p.jsonl",
            "custom_rm_path": tmp_path / "reward.py",
            "apply_chat_template": True,
            "generate": "tools",
            "tools": f"{tmp_path}/mine.py",
            "rollout_max_response_len": 300,
            "n_samples_per_prompt": 2,
        }
        return toy_run(steps=1, **{**given, **options})

    return run


def trained(sample):
    """The text of the tokens that are trained on."""
    mask = sample["loss_mask"] or [1] * sample["response_length"]
    return "".join(piece for piece, learns in zip(sample["pieces"], mask, strict=True) if learns)


def test_calls_are_carried_out_and_their_results_are_masked(run, scripted, tmp_path):
    first = f"Let me see.{call('add', a=2, b=3)}{call('shout', text='x')}"

    def answer(text):
        return first if "<tool_response>" not in text else call("open") if "opened" not in text else "It is 5."

    scripted(answer)
    done = run(tools=f"{tmp_path}/mine.py,{tmp_path}/mine.py:Lock")
    metrics = done.metrics[0]
    wanted = {"calls": 3, "errors": 0, "malformed": 0, "limited": 0, "failed_samples": 0}
    assert {name: metrics[f"tools/{name}"] for name in wanted} == wanted
    assert 0 < metrics["tools/seconds"] < 10 and metrics["rollout/turns"] == 3 and metrics["rollout/branches"] == 0
    assert len(done.samples) == 4
    for sample in done.samples:
        whole = "".join(sample["pieces"])
        results = (
            "<tool_response>5</tool_response>",
            "<tool_response>x</tool_response>",
            "<tool_response>opened 1 times</tool_response>",
        )
        assert all(result in whole for result in results)
        assert trained(sample).replace("<|end|>", "") == f"{first}{call('open')}It is 5."
        assert [c["name"] for c in sample["metadata"]["tool_calls"]] == ["add", "shout", "open"]
        assert sample["status"] == "completed" and sample["reward"] == pytest.approx(sample["index"] % 2 + 0.3)


def test_without_support_in_the_template_schemas_and_results_are_text(run, scripted):
    seen = []

    def answer(text):
        seen.append(text)
        return "3." if "<tool_response>" in text else call("add", a=1, b=2)

    scripted(answer)
    done = run(tool_prompt="text")
    assert '"name": "add", "description": "Add two numbers."' in seen[0]
    assert "<tool_response>\n3\n</tool_response>" in seen[-1]
    assert done.metrics[0]["tools/calls"] == 1 and trained(done.samples[0]).endswith("3.<|end|>")


def test_errors_go_to_the_model_and_the_run_goes_on(run, scripted):
    def answer(text):
        if "<tool_response>" in text:
            return "I give up."
        return (
            call("add", a="x", b=1)
            + call("divide")
            + "<tool_call>{oops</tool_call>"
            + call("shout", text="ab", times=100)
        )

    scripted(answer)
    done = run(tool_chars_per_call=50, tool_calls_per_turn=4)
    metrics = done.metrics[0]
    assert {name for panel in plugin.panels for name in panel.lines} <= metrics.keys()
    assert (metrics["tools/calls"], metrics["tools/errors"], metrics["tools/malformed"]) == (4, 3, 1)
    whole = "".join(done.samples[0]["pieces"])
    for text in (
        "wrong arguments: a: Input",
        "no tool 'divide'",
        "not valid JSON",
        "ab" * 25 + "\n[150 more characters were cut]",
    ):
        assert text in whole


@pytest.mark.parametrize(
    ("options", "text", "status", "turns"),
    [
        ({"tool_turns": 2}, "", "truncated", 2),
        ({"tool_calls_per_turn": 1}, "at most 1 calls are allowed in one answer", "completed", 3),
        ({"tool_calls_per_sample": 2}, "no calls are left; answer without tools", "completed", 3),
        ({"tool_seconds_per_sample": 1e-9}, "no time is left for tools", "completed", 3),
        ({"tool_chars_per_sample": 3}, "the results of this conversation are too long", "completed", 3),
        ({"rollout_max_context_len": 1000}, "", "truncated", 2),
    ],
    ids=["turns", "calls per turn", "calls per sample", "seconds", "characters", "context"],
)
def test_limits(run, scripted, options, text, status, turns):
    def answer(text):
        return "Done." if text.count("<tool_response>") >= 4 else call("shout", text="ab") + call("add", a=1, b=1)

    scripted(answer)
    done = run(**options)
    sample = done.samples[0]
    assert (sample["status"], done.metrics[0]["rollout/turns"]) == (status, turns)
    assert text in "".join(sample["pieces"]) and done.metrics[0]["tools/limited"] == 1


def test_a_call_that_takes_too_long_is_an_error_for_the_model(run, scripted):
    scripted(lambda text: "Done." if "<tool_response>" in text else call("wait"))
    done = run(tool_seconds_per_call=0.02)
    assert done.metrics[0]["tools/errors"] == done.metrics[0]["tools/calls"] == 1
    assert "the call took longer than 0.02 seconds" in "".join(done.samples[0]["pieces"])


def test_a_call_in_a_cut_answer_is_not_carried_out(run, scripted):
    scripted(lambda text: call("add", a=1, b=1) + "…")
    done = run()
    assert done.metrics[0]["tools/calls"] == 0 and done.samples[0]["status"] == "truncated"


def test_a_template_that_rewrites_history_starts_a_branch(run, scripted, monkeypatch):
    """Every turn is in exactly one sample, and the model sees the whole conversation."""
    seen = []

    def answer(text):
        seen.append(text)
        return "<think>\nwhy\n</think>\n\n" + (call("add", a=1, b=2) if "<tool_response>" not in text else "3.")

    def refuse(self, *args):
        raise CannotExtend("the template removes reasoning", "reasoning")

    monkeypatch.setattr(Renderer, "extend", refuse)
    scripted(answer)
    done = run()
    assert done.metrics[0]["rollout/branches"] == 1 and done.metrics[0]["rollout/unused_turns"] == 0
    assert call("add", a=1, b=2).replace(" ", "") in seen[-1].replace(" ", "")
    texts = [trained(sample) for sample in done.samples[:2]]
    assert sorted(text.count("3.") for text in texts) == [0, 1] and all(text.count("why") == 1 for text in texts)


def test_a_sample_whose_tools_fail_is_left_out(run, scripted, tmp_path, caplog):
    """The class of the tool fails for the second answer to each prompt."""
    count = iter(range(99))
    scripted(lambda text: "Done." if "<tool_response>" in text or next(count) % 2 else call("open"))
    done = run(rows=({"bad": 1}, {"bad": 1}), tools=f"{tmp_path}/mine.py:Lock")
    assert done.metrics[0]["tools/failed_samples"] == 0.5
    assert all(trained(s) == "Done.<|end|>" for s in done.samples) and len(done.samples) == 2
    assert "sample 0 fails: the tool class Lock cannot be instantiated: OSError: no lock" in caplog.text


def test_plain_functions_in_a_run(run, scripted, tmp_path):
    (tmp_path / "working.py").write_text(WORKING)
    scripted(lambda text: "5." if "<tool_response>5" in text else call("add", a=2, b=3))
    done = run(tools=tmp_path / "working.py", tool_workers=1)
    assert all(trained(s).endswith("5.<|end|>") for s in done.samples)


def test_evaluation_uses_tools(run, scripted, tmp_path):
    scripted(lambda text: "Done." if "<tool_response>" in text else call("add", a=1, b=1))
    done = run(eval_prompt_data=tmp_path / "p.jsonl", eval_interval=1)
    assert done.metrics[-1]["eval/reward"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": None}, "the model has no tools to call: give --tools FILE.py or --mcp-servers FILE"),
        ({"apply_chat_template": None}, "schemas, calls and results are written by the model's chat template"),
        ({"generate": None}, "tools are offered to the model by this rollout function only"),
    ],
)
def test_runs_that_the_plan_refuses(plan, options, message):
    given = {"tools": "mine.py", "apply_chat_template": True, "generate": "tools"}
    plan(["tools"], **given)
    with pytest.raises(PlanError, match=message):
        plan(["tools"], **{**given, **options})


def test_tools_run_in_rollout_workers(run, tmp_path):
    """Conversations, tool calls, rewards and metrics are those of the driver alone."""
    from miles_testing.doubles import remote

    rows = ({}, {}, {}, {})
    here = run(rows, rollout_batch_size=4)
    there = run(rows, rollout_batch_size=4, plugins=[remote.__file__], runtime="remote", rollout_workers=2)
    assert [(s["tokens"], s["reward"], s["metadata"]) for s in there.samples] == [
        (s["tokens"], s["reward"], s["metadata"]) for s in here.samples
    ]
    turns = [m["rollout/turns"] for m in here.metrics]
    assert [m["rollout/turns"] for m in there.metrics] == turns and turns[0] >= 1


HALF = '''
async def answer(text: str) -> str:
    """Return half of a pair."""
    return text + "\\ud83d\\x00"

async def fail(text: str) -> str:
    """Raise it."""
    raise ValueError("\\udc00" + text)

class Odd(BaseException):
    def __str__(self):
        raise KeyError

async def panic(text: str) -> str:
    """Raise no Exception."""
    raise Odd

def read(path: str) -> str:
    """Read a file that is not UTF-8."""
    return open(path, encoding="utf-8", errors="surrogateescape").read()

async def number(text: str):
    """Return no text."""
    return {"a": float("nan"), "b": {1, 2}, 3: b"x"}
'''


@pytest.mark.parametrize("mode", ["template", "text"])
def test_no_text_of_a_call_or_a_tool_ends_the_run(run, scripted, tmp_path, mode):
    """Half a surrogate pair in arguments, answers, errors and files, and results that are no texts."""
    (tmp_path / "half.py").write_text(HALF)
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    calls = [call(name, text="\ud800x") for name in ("answer", "fail", "panic", "number", "nothing\udfff")]
    calls += [call("read", path=str(tmp_path / "latin")), call("answer", **{"k\ud800": 1})]
    scripted(lambda text: "Done." if "<tool_response>" in text else "".join(calls))
    limits = {"tool_calls_per_turn": 20} if mode == "template" else {"tool_prompt": "text"}
    done = run(tools=f"{tmp_path}/half.py", rollout_max_response_len=900, **limits)
    assert len(done.samples) == 4 and done.metrics[0]["tools/failed_samples"] == 0
    for sample in done.samples:
        assert sample["metadata"]["tool_calls"][0]["arguments"] == {"text": "\ufffdx"}
        json.dumps(sample, ensure_ascii=False).encode()


def test_a_text_that_cannot_be_tokenized_fails_its_sample(run, scripted, monkeypatch):
    def refuse(self, tokens, messages, tools=None):
        if "xx" in messages[0]["content"]:
            raise RuntimeError("Already borrowed")
        return extend(self, tokens, messages, tools)

    extend = Renderer.extend
    monkeypatch.setattr(Renderer, "extend", refuse)
    answers = iter([call("shout", text="x", times=2), *[call("shout", text="x")] * 3, *["Done."] * 9])
    scripted(lambda text: "Done." if "<tool_response>" in text else next(answers))
    done = run()
    assert len(done.samples) == 3 and done.metrics[0]["tools/failed_samples"] == 0.25
