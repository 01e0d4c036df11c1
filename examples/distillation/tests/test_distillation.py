"""A student comes closer to its teacher, in one process, in several and on two ranks."""

from importlib.resources import files
from statistics import mean

import pytest
import torch

from miles_core.plugin import ConfigError, PlanError
from miles_testing import toy_files, toy_run

#: A runtime with trainer and engines in separate processes, loaded by its path.
APART = str(files("miles_testing") / "doubles" / "apart.py")

OPTIONS = {"advantage_estimator": "distillation", "custom_rm_path": None, "rm_type": "nothing"}
KL, TOP = "distillation/reverse_kl", "distillation/top_k_reverse_kl"


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
    there = run([APART], steps=2, runtime="apart", distillation_top_k=top_k)
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
        ("student: {{}}", {}, r"needs --distillation-teacher NAME.*has none. Add one there"),
        ("student: {{}}, a: {{role: frozen}}, b: {{role: frozen}}", {}, "the configuration file has a, b"),
        (
            "student: {{}}, a: {{role: frozen}}",
            {"distillation_teacher": "b"},
            "--distillation-teacher b: no frozen policy",
        ),
        (
            "student: {{}}, a: {{role: frozen}}",
            {"advantage_estimator": "grpo"},
            "learns from the teacher's probabilities",
        ),
    ],
)
def test_a_run_that_cannot_distil_is_refused(run, policies, options, message):
    with pytest.raises((ConfigError, PlanError), match=message):
        run(policies=policies, **options)


def test_a_teacher_with_other_tokens_is_refused(run, tmp_path):
    import json
    import shutil

    other = shutil.copytree(toy_files() / "model", tmp_path / "other")
    content = json.loads((other / "tokenizer.json").read_text())
    words = content["model"]["vocab"]
    first, second, *_ = words
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="another vocabulary than the student"):
        run(policies=f"student: {{{{}}}}, teacher: {{{{role: frozen, hf_checkpoint: '{other}'}}}}")
