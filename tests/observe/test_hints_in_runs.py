"""A run with a planted trouble shows its hint, in the log and from its files; sound runs show none of these hints."""

import pytest

from miles_core.observe.hints import hints_of, review
from miles_core.plugin.discovery import discover
from miles_testing import toy_run
from miles_testing.doubles import remote

HEAD = "import dataclasses, time\nfrom miles_core.plugin import hookimpl\n\n@hookimpl\n"
LOSS = """def wrap_loss(run, policy):
    def wrap(inner):
        def loss(*args):
            found = inner(*args)
            return dataclasses.replace(found, value=found.value * 0)
        return loss
    return wrap
"""
#: The limit of the responses grows with every step.
LONGER = """def on_request(run, policy, request):
    request.sampling = dataclasses.replace(request.sampling, max_new_tokens=2 + 2 * run.step)
"""
SLOW = """def wrap_optimizer_step(run, policy):
    def wrap(inner):
        def step():
            time.sleep(0.3)
            return inner()
        return step
    return wrap
"""
#: A learning rate that is too high moves all probability to a few tokens, although the reward never exceeds a half.
FEW_TOKENS = """
async def reward(args, sample):
    response = sample.tokens[sample.prompt_length :]
    return 0.5 * sum(token < 32 for token in response) / len(response)
"""
CONSTANT = "async def reward(args, sample):\n    return 0.5\n"
STALE = {"schedule": "async", "max_weight_staleness": 5, "steps": 14, "plugins": ["tis"]}
#: Hint -> (code of a plugin, code of the reward, options).
PLANTED = {
    "no-gradient": (LOSS, "", {"steps": 4}),
    "zero-learning-rate": ("", "", {"steps": 3, "lr": 0}),
    "no-signal": ("", CONSTANT, {"steps": 6}),
    "entropy-collapse": ("", FEW_TOKENS, {"steps": 20, "lr": 0.03, "n_samples_per_prompt": 8}),
    "length-growth": (LONGER, "", {"steps": 14, "rollout_max_response_len": 40}),
    "engines-idle": (SLOW, "", {"steps": 6, "plugins": [remote.__file__], "runtime": "remote"}),
    "stale-samples": ("", "", STALE),
}
SOUND = {
    "grpo": {},
    "dense": {"family": "llama"},
    "r3": {"plugins": ["r3"]},
    "ppo": {"plugins": ["ppo"], "advantage_estimator": "ppo"},
    "lora": {"plugins": ["lora"], "lora_target_modules": "all-linear"},
    "tis": {"plugins": ["tis"], "num_steps_per_rollout": 2},
    "ahead": {"plugins": ["tis"], "schedule": "ahead"},
    "async": {"plugins": ["tis"], "schedule": "async"},
    "workers": {"plugins": [remote.__file__], "runtime": "remote"},
    "cosine": {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "seed": 7},
}


def find_names(run):
    """Return the names of the hints that a run's metrics lead to."""
    known = hints_of(discover().values(), run.run.plan.holds)
    return {advice.hint.name: str(advice) for advice in review(run.metrics, known)}


def start(directory, plugin="", reward="", plugins=(), **options):
    paths = list(plugins)
    if plugin:
        (directory / "planted.py").write_text(HEAD + plugin)
        paths.append(str(directory / "planted.py"))
    if reward:
        (directory / "reward.py").write_text(reward)
        options["custom_rm_path"] = directory / "reward.py"
    return toy_run(paths, directory / "run", **options)


@pytest.mark.parametrize("hint", PLANTED)
def test_a_planted_trouble_is_named(hint, tmp_path):
    plugin, reward, options = PLANTED[hint]
    run = start(tmp_path, plugin, reward, **options)
    found = find_names(run)
    assert hint in found
    assert found[hint] in (run.directory / "run.log").read_text()


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_run_has_none_of_them(name, tmp_path):
    run = start(tmp_path, steps=12, **SOUND[name])
    assert not find_names(run).keys() & PLANTED.keys()
