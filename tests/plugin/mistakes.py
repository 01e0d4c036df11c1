"""A hundred mistakes that authors of plugins make, each as a single-file plugin, and what the error must name.

``test_mistakes.py`` installs each of them in turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles_testing.toy import toy_files

HEAD = """
from dataclasses import replace
import numpy as np
import torch
from miles_core.data import *
from miles_core.engine import *
from miles_core.plugin import *
from miles_core.trainer import *
"""


@dataclass(frozen=True)
class Mistake:
    """One mistake.

    Attributes:
        name: what was done wrong.
        hook: the hook that the error must name.
        value: what the error must show of the wrong value.
        code: the plugin.
        options: flags of the run.
    """

    name: str
    hook: str
    value: str
    code: str
    options: dict[str, Any] = field(default_factory=dict)

    def flags(self, folder: Path) -> dict[str, Any]:
        """The options, with files in place of ``PROMPTS`` and ``EXPORT``."""
        files = {"PROMPTS": toy_files() / "prompts.jsonl", "EXPORT": folder / "exported"}
        return {"steps": 1, **{name: files.get(value, value) for name, value in self.options.items()}}


def hook(name: str, arguments: str, body: str) -> str:
    """A single implementation of a hook."""
    lines = "\n    ".join(body.strip("\n").splitlines())
    return f"@hookimpl\ndef {name}({arguments}):\n    {lines}\n"


def around(name: str, body: str, arguments: str = "*args", kind: str = "def", asked: str = "run") -> str:
    """A ``wrap_*`` hook whose function has this body; ``inner`` is the inner function."""
    lines = "\n            ".join(body.strip("\n").splitlines())
    return (
        f"@hookimpl\ndef {name}({asked}):\n    def wrap(inner):\n"
        f"        {kind} outer({arguments}):\n            {lines}\n        return outer\n    return wrap\n"
    )


def part(kind: str, name: str, body: str, arguments: str = "run") -> str:
    """A manifest that provides one part, made by a function with this body."""
    lines = "\n    ".join(body.strip("\n").splitlines())
    return (
        f"plugin = Plugin('mine', 'a mistake', '0.1', '~=0.1', provides={{'{kind}': {{'{name}': 'make'}}}})\n"
        f"def make({arguments}):\n    {lines}\n"
    )


def advantage(body: str) -> tuple[str, dict[str, Any]]:
    """An advantage estimator, and the flag that selects it."""
    code = "def estimate(inputs):\n    " + "\n    ".join(body.strip("\n").splitlines()) + "\nreturn estimate"
    return part("advantage", "odd", code), {"advantage_estimator": "odd"}


def reward(body: str, kind: str = "async def") -> tuple[str, dict[str, Any]]:
    """A reward, and the flags that select it."""
    return part("reward", "odd", f"{kind} score(args, sample):\n    {body}\nreturn score"), {
        "rm_type": "odd",
        "custom_rm_path": None,
    }


def rollout(body: str, kind: str = "async def") -> tuple[str, dict[str, Any]]:
    """A rollout function, and the flag that selects it."""
    return part("generate", "odd", f"{kind} turns(sample, ask):\n    {body}\nreturn turns"), {"generate": "odd"}


def optimizer(body: str) -> tuple[str, dict[str, Any]]:
    """An optimizer, and the flag that selects it."""
    return part("optimizer", "odd", body, "run, policy, groups"), {"optimizer": "odd"}


def prompts(body: str) -> tuple[str, dict[str, Any]]:
    """A prompt source whose ``next(n)`` has this body, and the flags that select it."""
    code = (
        "plugin = Plugin('mine', 'a mistake', '0.1', '~=0.1', provides={'prompts': {'odd': 'make'}})\n"
        f"class Source(PromptSource):\n    def next(self, n):\n        {body}\n"
        "    def state(self):\n        return {}\n    def load_state(self, state):\n        pass\n"
        "def make(run):\n    return Source()\n"
    )
    return code, {"prompts": "odd", "prompt_data": None}


def field_of(value: str) -> str:
    """A plugin with a declared field that ``on_sample`` fills with a value."""
    return (
        "plugin = Plugin('mine', 'a mistake', '0.1', '~=0.1', hooks={'': 'Hooks'}, "
        "fields=(Field('odd', 'float32', 'response'),))\n"
        f"class Hooks:\n    @hookimpl\n    def on_sample(self, sample):\n        sample.fields['odd'] = {value}\n"
    )


def engine(body: str) -> tuple[str, dict[str, Any]]:
    """The embedded engine with its ``generate`` replaced, and the flag that selects it."""
    code = f"""
from miles_embedded.engine.build import make_engine
made = make_engine(run, policy)
answer = made.generate
async def generate(request):
    found = await answer(request)
    {body}
    return found
made.generate = generate
return made
"""
    return part("engine", "odd", code, "run, policy"), {"engine": "odd"}


MISTAKES = [
    Mistake("an advantage per sample", "make_advantage (odd)", "float64 [8]", *advantage("return inputs.rewards")),
    Mistake("an advantage without return", "make_advantage (odd)", "None", *advantage("inputs.rewards.sum()")),
    Mistake("a NaN advantage", "make_advantage (odd)", "nan", *advantage("return inputs.mask * float('nan')")),
    Mistake("an advantage of integers", "make_advantage (odd)", "int64", *advantage("return inputs.mask.long()")),
    Mistake("an advantage that is a list", "make_advantage (odd)", "a list", *advantage("return [0.0]")),
    Mistake("an estimator factory without return", "make_advantage (odd)", "None", part("advantage", "odd", "pass"),
            {"advantage_estimator": "odd"}),
    Mistake("a column of wrong length", "on_batch", "3 rows",
            hook("on_batch", "batch", "batch.columns['extra'] = torch.zeros(3)")),
    Mistake("a scalar of wrong length", "on_batch", "float32 [3]",
            hook("on_batch", "batch", "batch.scalars['reward'] = torch.zeros(3)")),
    Mistake("a column that is a list", "on_batch", "a list of 2",
            hook("on_batch", "batch", "batch.columns['extra'] = [1, 2]")),
    Mistake("a batch with tokens cut off", "on_batch", "rows",
            hook("on_batch", "batch", "batch.tokens = batch.tokens[:-1]")),
    Mistake("a loss without return", "wrap_loss", "None", around("wrap_loss", "inner(*args)")),
    Mistake("a loss that is a bare tensor", "wrap_loss", "float32 []", around("wrap_loss", "return inner(*args).value")),
    Mistake("a loss per token", "wrap_loss", "float32 [",
            around("wrap_loss", "return Loss(-args[0].log_probs, {})")),
    Mistake("a detached loss", "wrap_loss", "no gradient",
            around("wrap_loss", "loss = inner(*args)\nreturn Loss(loss.value.detach(), loss.metrics)")),
    Mistake("a metric that is a list", "wrap_loss", "'mine/all'",
            around("wrap_loss", "loss = inner(*args)\nloss.metrics['mine/all'] = [1.0]\nreturn loss")),
    Mistake("a metric without a prefix", "wrap_loss", "'penalty'",
            around("wrap_loss", "loss = inner(*args)\nloss.metrics['penalty'] = (loss.value.detach(), 1.0)\nreturn loss")),
    Mistake("an async loss", "wrap_loss", "a coroutine", around("wrap_loss", "return inner(*args)", kind="async def")),
    Mistake("a wrap without return", "wrap_loss", "None",
            "@hookimpl\ndef wrap_loss(run):\n    def wrap(inner):\n        pass\n    return wrap\n"),
    Mistake("a hook that returns no function", "wrap_loss", "42", hook("wrap_loss", "run", "return 42")),
    Mistake("a forward without return", "wrap_forward", "None", around("wrap_forward", "inner(*args)")),
    Mistake("a forward that returns a tuple", "wrap_forward", "a tuple of 2",
            around("wrap_forward", "return inner(*args), {}")),
    Mistake("log-probs of wrong shape", "wrap_forward", "float32 [1,",
            around("wrap_forward", "found = inner(*args)\nfound.log_probs = found.log_probs[None]\nreturn found")),
    Mistake("a negative weight", "wrap_correction", "-1.0",
            around("wrap_correction", "found = inner(*args)\nreturn replace(found, weight=found.weight - 2)")),
    Mistake("a weight per sample", "wrap_correction", "float32 [8]",
            around("wrap_correction", "found = inner(*args)\n"
                   "return replace(found, weight=torch.ones(len(args[0].lengths)))")),
    Mistake("keep as floats", "wrap_correction", "float32",
            around("wrap_correction", "found = inner(*args)\nreturn replace(found, keep=found.keep.float())")),
    Mistake("an optimizer step without return", "wrap_optimizer_step", "None", around("wrap_optimizer_step", "inner()")),
    Mistake("a weight stream without return", "wrap_weights", "None",
            around("wrap_weights", "list(inner())", asked="run, policy")),
    Mistake("a weight stream of pairs", "wrap_weights", "a tuple of 2",
            around("wrap_weights", "for unit in inner():\n    yield from unit.tensors.items()", asked="run, policy")),
    Mistake("a weight as a list", "wrap_weights", "a list",
            around("wrap_weights", "for unit in inner():\n    yield WeightUnit({n: t.tolist() for n, t in unit.tensors.items()})",
                   asked="run, policy")),
    Mistake("a weight of wrong shape", "wrap_weights", "model.embed_tokens.weight",
            around("wrap_weights", "for unit in inner():\n"
                   "    yield WeightUnit({n: t[1:] if 'embed' in n else t for n, t in unit.tensors.items()})",
                   asked="run, policy")),
    Mistake("all weights frozen", "on_model", "requires_grad",
            hook("on_model", "model", "model.requires_grad_(False)")),
    Mistake("an output layer of another size", "on_model", "scores 5 tokens",
            hook("on_model", "model", "model.lm_head = torch.nn.Linear(model.config.hidden_size, 5)")),
    Mistake("a field of wrong length", "on_sample", "'odd'",
            "plugin = Plugin('mine', 'a mistake', '0.1', '~=0.1', hooks={'': 'Hooks'}, "
            "fields=(Field('odd', 'float32', 'response'),))\n"
            "class Hooks:\n    @hookimpl\n    def on_sample(self, sample):\n"
            "        sample.fields['odd'] = np.zeros(1, np.float32)\n"),
    Mistake("a response cut short", "on_sample", "response_length",
            hook("on_sample", "sample", "sample.response_length = len(sample.tokens) + 1")),
    Mistake("a request without a prompt", "on_request", "a list of 0", hook("on_request", "request", "request.tokens = []")),
    Mistake("a step metric that is a list", "on_step", "'mine/all'",
            hook("on_step", "metrics", "metrics['mine/all'] = [1.0]")),
    Mistake("a step metric without a prefix", "on_step", "'penalty'", hook("on_step", "metrics", "metrics['penalty'] = 1.0")),
    Mistake("an async event", "on_step", "async", "@hookimpl\nasync def on_step(run, metrics):\n    pass\n"),
    Mistake("an event with yield", "on_step", "yield", hook("on_step", "metrics", "yield")),
    Mistake("an error while stopping", "on_stop", "no such file", hook("on_stop", "run", "raise OSError('no such file')")),
    Mistake("state that JSON cannot hold", "on_save", "mine/state",
            hook("on_save", "run, policy, store", "store.put('mine/state', data=object())")),
    Mistake("a reward of None", "make_reward (odd)", "None", *reward("pass")),
    Mistake("a reward that is text", "make_reward (odd)", "'good'", *reward("return 'good'")),
    Mistake("a reward of NaN in a dict", "make_reward (odd)", "nan", *reward("return {'all': float('nan')}")),
    Mistake("a reward that is not async", "make_reward (odd)", "1.0", *reward("return 1.0", kind="def")),
    Mistake("an engine factory without return", "make_engine (odd)", "None", part("engine", "odd", "pass", "run, policy"),
            {"engine": "odd"}),
    Mistake("more tokens than asked for", "make_engine (odd)", "max_new_tokens 4",
            *engine("found = replace(found, tokens=[5] * 9, log_probs=[-1.0] * 9, weight_versions=[(0, 0)])")),
    Mistake("a log-prob missing", "make_engine (odd)", "log_probs", *engine("found.log_probs = found.log_probs[:-1]")),
    Mistake("versions out of order", "make_engine (odd)", "[(0, 3), (1, 2)]",
            *engine("found.weight_versions = [(0, 3), (1, 2)]")),
    Mistake("a response of None", "make_engine (odd)", "None", *engine("return None")),
    Mistake("no tokens and finished", "make_engine (odd)", "no tokens",
            *engine("found = replace(found, tokens=[], log_probs=[], finish='stop', weight_versions=[])")),
    Mistake("a transport factory without return", "make_transport (odd)", "None",
            part("transport", "odd", "pass", "run, policy, engine, world"), {"transport": "odd"}),
    Mistake("a NaN loss", "wrap_loss", "the loss itself",
            around("wrap_loss", "loss = inner(*args)\nreturn Loss(loss.value * float('nan'), loss.metrics)")),
    Mistake("an advantage with a gradient", "make_advantage (odd)", "has a gradient",
            *advantage("return inputs.mask.double().requires_grad_()")),
    Mistake("a reward that raises", "make_reward (odd)", "division by zero", *reward("return 1 / 0")),
    Mistake("tokens that are floats", "rollout function odd", "'float' object cannot be interpreted",
            *rollout("sample.tokens = (await ask()).tokens\n    sample.tokens[-1] = 5.5\n    return sample")),
    Mistake("a token beyond the vocabulary", "rollout function odd", "the token 99999",
            *rollout("sample.tokens = [*(await ask()).tokens, 99999]\n    return sample")),
    Mistake("a loss mask of wrong length", "on_sample", "loss_mask has 1 entries",
            hook("on_sample", "sample", "sample.loss_mask = [1]")),
    Mistake("a reward of text in a sample", "on_sample", "'good'", hook("on_sample", "sample", "sample.reward = 'good'")),
    Mistake("a batch whose tokens are floats", "on_batch", "float32",
            hook("on_batch", "batch", "batch.tokens = batch.tokens.float()")),
    Mistake("an event that returns its result", "on_batch", "a Batch", hook("on_batch", "batch", "return replace(batch)")),
    Mistake("NaN log-probs", "wrap_forward", "the log-probs that the forward returned",
            around("wrap_forward", "found = inner(*args)\nfound.log_probs = found.log_probs * float('nan')\nreturn found")),
    Mistake("a detached forward", "wrap_forward", "no gradient",
            around("wrap_forward", "found = inner(*args)\nfound.log_probs = found.log_probs.detach()\nreturn found")),
    Mistake("a weight that is renamed", "wrap_weights", "xmodel.embed_tokens.weight",
            around("wrap_weights", "for unit in inner():\n    yield WeightUnit({'x' + n: t for n, t in unit.tensors.items()})",
                   asked="run, policy")),
    Mistake("a weight that is dropped", "wrap_weights", "are missing, model.embed_tokens.weight",
            around("wrap_weights", "for number, unit in enumerate(inner()):\n    if number:\n        yield unit", asked="run, policy")),
    Mistake("weights sent twice", "wrap_weights", "twice",
            around("wrap_weights", "for unit in inner():\n    yield unit\n    yield unit", asked="run, policy")),
    Mistake("weights as integers", "wrap_weights", "is integer [",
            around("wrap_weights", "for unit in inner():\n    yield WeightUnit({n: t.long() for n, t in unit.tensors.items()})",
                   asked="run, policy")),
    Mistake("a module removed from the model", "on_model", "'norm'", hook("on_model", "model", "del model.model.norm")),
    Mistake("a request beyond the vocabulary", "on_request", "the token 123456",
            hook("on_request", "request", "request.tokens = [123456]")),
    Mistake("a request for no tokens", "on_request", "max_new_tokens=0",
            hook("on_request", "request", "request.sampling = replace(request.sampling, max_new_tokens=0)")),
    Mistake("a log-prob above 0", "make_engine (odd)", "0.5", *engine("found.log_probs = [0.5] * len(found.log_probs)")),
    Mistake("a log-prob of NaN", "make_engine (odd)", "nan", *engine("found.log_probs = [float('nan')] * len(found.log_probs)")),
    Mistake("a response beyond the vocabulary", "make_engine (odd)", "1000000",
            *engine("found.tokens = [10**6] * len(found.tokens)")),
    Mistake("a sink that is a function", "make_sink (odd)", "write(step, metrics)", part("sink", "odd", "return print")),
    Mistake("a learn function without return", "wrap_learn", "returned None",
            around("wrap_learn", "await inner(*args)", kind="async def")),
    Mistake("a learn function that is not awaited", "wrap_learn", "a coroutine",
            around("wrap_learn", "return inner(*args)", kind="async def")),
    Mistake("an export that is async", "wrap_export", "a coroutine",
            around("wrap_export", "inner(*args)", kind="async def", asked="run, policy"), {"export_hf": "EXPORT"}),
    Mistake("an evaluation metric that is text", "on_evaluation", "'good'",
            hook("on_evaluation", "metrics", "metrics['mine/x'] = 'good'"), {"eval_prompt_data": "PROMPTS", "eval_interval": 1}),
    Mistake("a check that is not async", "make_check (odd)", "a dict of 1",
            part("check", "odd", "def look(parts):\n    return {'mine/x': 1.0}\nreturn look")),
    Mistake("a check that returns a list", "make_check (odd)", "a list of 1",
            part("check", "odd", "async def look(parts):\n    return [1.0]\nreturn look")),
    Mistake("NaN in a column that no loss uses", "on_batch", "'extra' with nan",
            hook("on_batch", "batch", "batch.columns['extra'] = batch.tokens / 0 * 0.0")),
    Mistake("a column on another device", "on_batch", "'extra' on meta",
            hook("on_batch", "batch", "batch.columns['extra'] = torch.zeros(len(batch.tokens), device='meta')")),
    Mistake("tokens changed in place", "on_batch", "expected token ids from 0 to",
            hook("on_batch", "batch", "batch.tokens += 1000")),
    Mistake("a hook that raises KeyError", "on_batch", "'rewards'",
            hook("on_batch", "batch", "batch.columns['extra'] = batch.columns['rewards']")),
    Mistake("a field that no manifest declares", "on_sample", "'score'",
            hook("on_sample", "sample", "sample.fields['score'] = np.zeros(sample.response_length)")),
    Mistake("a field of texts", "on_sample", "'odd'", field_of("['a'] * sample.response_length")),
    Mistake("a field with one dimension too many", "on_sample", "float64 [", field_of("np.zeros((sample.response_length, 2))")),
    Mistake("a field of bfloat16", "on_sample", "bfloat16", field_of("torch.zeros(sample.response_length, dtype=torch.bfloat16)")),
    Mistake("an undeclared extra", "on_request", "'logits'", hook("on_request", "request", "request.extras.add('logits')")),
    Mistake("no policies", "on_start", "run.policies is empty", hook("on_start", "run", "run.policies = []")),
    Mistake("a rollout function without return", "rollout function odd", "NoneType", *rollout("await ask()")),
    Mistake("a rollout function that is not async", "make_generate (odd)", "a function", *rollout("return sample", kind="def")),
    Mistake("a rollout function that raises KeyError", "rollout function odd", "'question'",
            *rollout("return sample.metadata['question']")),
    Mistake("prompts that are texts", "make_prompts (odd)", "['a', 'a']", *prompts("return ['a'] * n")),
    Mistake("prompts from a generator", "make_prompts (odd)", "generator", *prompts("yield Row('a')")),
    Mistake("a prompt source that raises", "Source.next", "'question'", *prompts("return [Row({}['question'])] * n")),
    Mistake("a prompt source without return", "make_prompts (odd)", "None", part("prompts", "odd", "pass"),
            {"prompts": "odd", "prompt_data": None}),
    Mistake("an optimizer without return", "make_optimizer (odd)", "None", *optimizer("pass")),
    Mistake("an optimizer of other parameters", "make_optimizer (odd)", "leaves out",
            *optimizer("return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)")),
    Mistake("tokens as a tensor", "make_engine (odd)", "int64 [4]", *engine("found.tokens = torch.tensor(found.tokens)")),
    Mistake("log-probs as a matrix", "make_engine (odd)", "float64 [1, 4]", *engine("found.log_probs = np.array([found.log_probs])")),
    Mistake("log-probs in lists", "make_engine (odd)", "(list)", *engine("found.log_probs = [[p] for p in found.log_probs]")),
    Mistake("versions without positions", "make_engine (odd)", "[3]", *engine("found.weight_versions = [3]")),
    Mistake("an engine that raises KeyError", "generate (", "'meta_info'", *engine("raise KeyError('meta_info')")),
    Mistake("a sink that raises", "Sink.write", "'loss'",
            part("sink", "odd", "class Sink:\n    def write(self, step, metrics):\n        metrics['loss']\n"
                 "    def close(self):\n        pass\nreturn Sink()")),
    Mistake("a part that is misspelled", "make_advantage (odd)", "did you mean make",
            part("advantage", "odd", "pass").replace("'make'", "'mkae'"), {"advantage_estimator": "odd"}),
]  # fmt: skip
