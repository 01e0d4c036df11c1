"""A student comes closer to its teacher, in one process, in several and on two ranks."""

import json
import shutil
from importlib.resources import files
from statistics import mean

import pytest
import torch

from miles_core.plugin import ConfigError, MilesError, PlanError
from miles_testing import LearnContract, toy_files, toy_run

#: A runtime with trainer and engines in separate processes, loaded by its path.
REMOTE = str(files("miles_testing") / "doubles" / "remote.py")

OPTIONS = {"advantage_estimator": "distillation", "custom_rm_path": None, "rm_type": "nothing"}
KL, TOP = "distillation/reverse_kl", "distillation/top_k_reverse_kl"


class TestDistillation(LearnContract):
    """The frozen teacher is the model at the start."""

    plugins = ("distillation",)

    @property
    def options(self):
        file = toy_files() / "distillation.yaml"
        file.write_text("policies: {student: {}, teacher: {role: frozen}}")
        return OPTIONS | {"config": file, "lr": 1e-2, "distillation_top_k": 4}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """The toy model after a few steps towards even tokens: close to the student, and surer of itself."""
    directory = tmp_path_factory.mktemp("teacher") / "hf"
    toy_run(steps=5, lr=1e-2, rollout_batch_size=8, export_hf=directory)
    return directory


@pytest.fixture
def run(tmp_path, teacher):
    """A toy run whose policies are a student and that teacher."""
    file = tmp_path / "distillation.yaml"

    def run(plugins=(), policies="student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{}'}}", **options):
        file.write_text(f"policies: {{{policies.format(teacher)}}}")
        return toy_run(["distillation", *plugins], config=file, **OPTIONS | {"lr": 1e-3, **options})

    return run


@pytest.mark.parametrize("top_k", [0, 8])
def test_the_student_comes_closer_to_its_teacher(run, top_k):
    done = run(steps=16, rollout_batch_size=8, lr=5e-3, distillation_top_k=top_k)
    found = [record[KL] for record in done.metrics]
    assert mean(found[:3]) > 0.05 and mean(found[-3:]) < 0.75 * mean(found[:3])
    assert (TOP in done.metrics[0]) == bool(top_k)
    if top_k:
        exact = [record[TOP] for record in done.metrics]
        assert mean(exact[-3:]) < 0.5 * mean(exact[:3]) and done.metrics[0]["train/loss"] == pytest.approx(
            exact[0], rel=0.5
        )
    student, frozen = done.run.policies
    assert student.trained == 16 and (frozen.trained, frozen.version) == (0, -1) and done.parts[1].engine is None


@pytest.mark.parametrize("top_k", [0, 4])
def test_workers_in_other_processes_learn_the_same(run, top_k):
    here = run(steps=2, distillation_top_k=top_k)
    there = run([REMOTE], steps=2, runtime="remote", distillation_top_k=top_k)
    for name in (KL, "train/grad_norm", "train/loss", *([TOP] if top_k else [])):
        assert [m[name] for m in here.metrics] == [m[name] for m in there.metrics]


def test_a_teacher_equal_to_its_student_teaches_nothing(run):
    done = run(policies="student: {{}}, teacher: {{role: frozen}}", steps=1, distillation_top_k=4, adam_eps=1.0)
    assert abs(done.metrics[0][KL]) < 1e-5 and abs(done.metrics[0][TOP]) < 1e-5
    assert done.metrics[0]["train/grad_norm"] < 1e-4


def test_the_step_follows_the_gradient_of_the_divergence(run):
    """One token, the whole vocabulary: the gradient that the trainer applied is that of the divergence, computed apart."""
    from transformers import AutoModelForCausalLM

    checkpoint = toy_files() / "model"
    student = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    size = student.config.vocab_size
    done = run(steps=1, rollout_max_response_len=1, distillation_top_k=size, clip_grad=1e9)
    teacher = AutoModelForCausalLM.from_pretrained(done.run.policies[1].hf_checkpoint, dtype=torch.float32)
    total = torch.zeros(())
    for sample in done.samples:
        prompt = torch.tensor([sample["tokens"][:-1]])
        own, other = student(prompt).logits[0, -1].log_softmax(-1), teacher(prompt).logits[0, -1].log_softmax(-1)
        total = total + (own.exp() * (own - other.detach())).sum() / len(done.samples)
    total.backward()
    norm = torch.stack([p.grad.norm() for p in student.parameters() if p.grad is not None]).norm()
    assert done.metrics[0][TOP] == pytest.approx(float(total.detach()), rel=1e-4)
    assert done.metrics[0]["train/grad_norm"] == pytest.approx(float(norm), rel=1e-3)


@pytest.mark.parametrize(
    ("policies", "options", "message"),
    [
        ("student: {{}}", {}, "needs a frozen policy as its teacher.*frozen policies: none"),
        ("student: {{}}, a: {{role: frozen}}, b: {{role: frozen}}", {}, "the frozen policies: a, b"),
        ("student: {{}}, a: {{role: frozen}}", {"distillation_teacher": "b"}, "and b is none"),
        ("student: {{}}, a: {{role: frozen}}", {"advantage_estimator": "grpo"}, "every token the advantage 0"),
        ("student: {{}}, a: {{role: frozen}}", {"distillation_coef": 0.5}, "this estimator ignores rewards"),
        ("student: {{}}, a: {{role: frozen}}", {"reward_key": "x"}, "this reward is a number"),
        ("student: {{}}, a: {{role: frozen}}", {"distillation_score_with": "engine"}, "generates: true"),
        (
            "student: {{}}, a: {{role: frozen, generates: true}}",
            {"distillation_score_with": "engine", "distillation_top_k": 2},
            "an engine scores",
        ),
        (
            "student: {{}}, a: {{role: frozen}}",
            {"distillation_teacher": "a", "distillation_weights": "1,2"},
            "has 2 values for a",
        ),
        (
            "student: {{}}, a: {{role: frozen, hf_checkpoint: '{}'}}",
            {"distillation_refresh_interval": 1},
            "leave hf_checkpoint of the teacher out",
        ),
    ],
)
def test_a_run_that_cannot_distil_is_refused_in_the_plan(plan, tmp_path, teacher, policies, options, message):
    file = tmp_path / "distillation.yaml"
    file.write_text(f"policies: {{{policies.format(teacher)}}}")
    with pytest.raises(PlanError, match=f"(?s){message}"):
        plan(["distillation"], config=file, **OPTIONS | options)


def other_tokenizer(directory, change):
    other = shutil.copytree(toy_files() / "model", directory / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    change(content["model"]["vocab"])
    (other / "tokenizer.json").write_text(json.dumps(content))
    return other


def swap(words):
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda words: words.pop("!"), "the student has 259 tokens and the teacher 258;"),
        (swap, ", but the student's token 0 .* is 1 for the teacher"),
    ],
)
def test_a_teacher_with_other_tokens_is_refused_in_the_plan(plan, run, tmp_path, change, message):
    file, other = tmp_path / "distillation.yaml", other_tokenizer(tmp_path, change)
    file.write_text(f"policies: {{student: {{}}, teacher: {{role: frozen, hf_checkpoint: '{other}'}}}}")
    with pytest.raises(PlanError, match=f"(?s)one vocabulary for the student.*{message}"):
        plan(["distillation"], config=file, **OPTIONS)


def test_a_tokenizer_that_the_plan_cannot_read_is_compared_at_the_start(run, tmp_path, monkeypatch):
    monkeypatch.setattr("miles_distillation.review.vocabulary", lambda directory: None)
    other = other_tokenizer(tmp_path, swap)
    with pytest.raises(ConfigError, match="another vocabulary than the student"):
        run(policies=f"student: {{{{}}}}, teacher: {{{{role: frozen, hf_checkpoint: '{other}'}}}}")


@pytest.mark.parametrize("top_k", [0, 4])
def test_rewards_and_divergence_add_up(run, top_k):
    """The gradient of the sum is the sum of the gradients: with a coefficient of 0 the rewards' alone."""
    options = {"advantage_estimator": "grpo", "custom_rm_path": toy_files() / "reward.py", "rm_type": None, "steps": 1}
    options |= {"distillation_top_k": top_k, "clip_grad": 1e9}
    alone, both, double = (run(distillation_coef=c, **options).metrics[0] for c in (0.0, 1.0, 2.0))
    term = both["train/loss"] - alone["train/loss"]
    assert term > 0.01 and double["train/loss"] - alone["train/loss"] == pytest.approx(2 * term, rel=1e-4)
    assert term == pytest.approx(both[TOP if top_k else KL], rel=0.3)  # weighted by sample and not by token
    assert both["train/grad_norm"] != alone["train/grad_norm"] > 0


def test_an_engine_scores_like_the_trainer(run):
    policies = "student: {{}}, teacher: {{role: frozen, generates: true, hf_checkpoint: '{}'}}"
    on_trainer, on_engine = (
        run(policies=policies, steps=2, distillation_score_with=where, rollout_temperature=0.8).metrics
        for where in ("trainer", "engine")
    )
    for one, two in zip(on_trainer, on_engine, strict=True):
        assert one[KL] == pytest.approx(two[KL], abs=1e-5) and one["train/grad_norm"] == pytest.approx(
            two["train/grad_norm"], rel=1e-3
        )


def test_several_teachers_are_weighted(run):
    policies = "student: {{}}, far: {{role: frozen, hf_checkpoint: '{}'}}, near: {{role: frozen}}"
    options = {"policies": policies, "steps": 1, "distillation_top_k": 4, "distillation_teacher": "far,near"}
    one, mixed, other = (run(distillation_weights=weights, **options).metrics[0] for weights in ("1,0", "1,3", "0,1"))
    for name in (KL, TOP):
        assert abs(other[name]) < 1e-5 and mixed[name] == pytest.approx(one[name] / 4, rel=1e-3)


def test_a_prompt_names_its_teacher(run, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"input": letter, "metadata": {"subject": name}} for letter, name in (("a", "far"), ("b", "near"))]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    policies = "student: {{}}, far: {{role: frozen, hf_checkpoint: '{}'}}, near: {{role: frozen}}"
    options = {"policies": policies, "prompt_data": prompts, "metadata_key": "metadata", "steps": 1}
    done = run(distillation_teacher="far,near", distillation_teacher_key="subject", **options)
    assert abs(done.metrics[0][KL]) > 1e-3
    with pytest.raises(MilesError, match="names the teacher 'far'"):
        run(distillation_teacher="near", distillation_teacher_key="subject", **options)


def test_a_student_of_another_size_learns(run):
    small = toy_files(num_hidden_layers=1, hidden_size=16) / "model"
    done = run(steps=2, hf_checkpoint=small, prompt_data=toy_files() / "prompts.jsonl")
    assert all(record[KL] != 0 and record["train/grad_norm"] > 0 for record in done.metrics)


def test_a_past_student_teaches_and_a_resumed_run_has_it(run, tmp_path):
    """The initial teacher is the student, so the first divergence is 0; after a refresh it is 0 again."""
    options = {"policies": "student: {{}}, teacher: {{role: frozen}}", "advantage_estimator": "grpo", "rm_type": None}
    options |= {"custom_rm_path": toy_files() / "reward.py", "distillation_refresh_interval": 2, "lr": 1e-2}
    whole = run(steps=5, directory=tmp_path / "whole", **options).metrics
    gaps = [abs(record[KL]) for record in whole]
    assert max(gaps[0], gaps[2], gaps[4]) < 1e-5 < 1e-4 < min(gaps[1], gaps[3])
    run(steps=3, directory=tmp_path / "parts", **options)
    resumed = run(steps=5, directory=tmp_path / "parts", load=tmp_path / "parts", **options).metrics
    for one, two in zip(whole, resumed, strict=True):
        assert [one[n] for n in (KL, "train/loss", "train/grad_norm")] == [
            two[n] for n in (KL, "train/loss", "train/grad_norm")
        ]
