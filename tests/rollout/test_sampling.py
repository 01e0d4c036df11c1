"""By default, evaluation samples as the rollout does."""

from __future__ import annotations

from miles_core.config.load import load
from miles_core.rollout.sampling import evaluation_sampling, training_sampling

EVALUATION = ("--eval-prompt-data", "set=set.jsonl", "--eval-interval", "1")


def test_evaluation_takes_the_rollouts_parameters_where_it_has_none():
    rollout = ("--rollout-temperature", "0.7", "--rollout-top-k", "5", "--rollout-stop", "END")
    config = load([*rollout, *EVALUATION, "--eval-top-p", "0.9"])
    training, evaluation = training_sampling(config), evaluation_sampling(config)
    assert (training.temperature, training.top_k, training.top_p, training.stop) == (0.7, 5, 1.0, ("END",))
    assert (evaluation.temperature, evaluation.top_k, evaluation.top_p, evaluation.stop) == (0.7, 5, 0.9, ("END",))


def test_greedy_evaluation():
    config = load([*EVALUATION, "--eval-temperature", "0", "--eval-max-response-len", "7"])
    sampling = evaluation_sampling(config)
    assert sampling.temperature == 0 and sampling.max_new_tokens == 7 and not sampling.truncated
