"""Hints about the metrics that every run writes; ``miles_core.observe.hints`` follows them."""

from miles_core.plugin.hint import (
    Hint,
    above,
    below,
    detect_fall,
    detect_growth,
    detect_jump,
    detect_rise,
    not_finite,
)

SOLVED = ("reward/mean", above(0.9))
#: Gradient norms below it come from rounding alone.
ZERO_GRADIENT = 1e-10
LEARNING = ("train/grad_norm", above(ZERO_GRADIENT))
MISMATCH = "miles verify --budget tells by cause; watch every sync (--verify-logprobs)"
DISAGREE = "engine and trainer disagree by a KL of {value} per token (a dense bfloat16 model has about 6e-4)"
UNSTABLE = (
    "lower --lr, keep --clip-grad at 1, look at the samples of that step; in a low precision, use block-wise scales "
    "and warm up in bfloat16"
)

HINTS = (
    Hint("not-finite", "train/*", not_finite(), "{metric} is {value}", UNSTABLE, trouble="instability"),
    Hint(
        "gradient-jump",
        "train/grad_norm",
        detect_jump(20, least=1.0),  # where clipping begins; after convergence any gradient is a jump
        "the gradient norm jumped to {value}",
        UNSTABLE,
        trouble="instability",
    ),
    Hint(
        "mismatch",
        "mismatch/kl_k3",
        above(2e-3),
        DISAGREE,
        MISMATCH,
        trouble="mismatch",
        when="schedule == sync and not rollout.partial_rollout",
    ),
    # otherwise a part of the KL is the change of the policy since a token was generated
    Hint("mismatch-of-current", "mismatch/current_kl_k3", above(2e-3), DISAGREE, MISMATCH, trouble="mismatch"),
    Hint(
        "mismatch-jump",
        "mismatch/kl_k3",
        detect_jump(
            10, least=1e-5
        ),  # far below the value of any bfloat16 model, and above the rounding noise of float32
        "the KL between engine and trainer jumped to {value}, over ten times its median: collapse often follows",
        f"lower --lr; {MISMATCH}",
        trouble="mismatch",
    ),
    Hint(
        "verify-jump",
        "verify/abs_log_prob",
        detect_jump(10, 3, least=1e-4),
        "after the last sync engine and trainer disagree by {value} nats a token, ten times more than before it",
        "a part of the weights did not arrive, or one side changed its number format; miles verify --budget --load RUN "
        "says which",
    ),
    Hint(
        "entropy-collapse",
        "rollout/entropy",
        detect_fall(0.1),
        "the policy's entropy fell to {value}, under a tenth of where it began, before the task was solved",
        "raise --eps-clip-high (0.28) or --entropy-coef (0.001 to 0.01), or lower --lr",
        unless=(SOLVED,),
    ),
    Hint(
        "no-signal",
        "reward/all_equal",
        above(0.9, 5),
        "in {percent} of the groups all rewards are equal, and the gradient is zero",
        "check the reward on some responses (miles report shows them), use easier or harder prompts, or raise "
        "--n-samples-per-prompt",
        unless=(SOLVED, LEARNING),  # a loss that does not come from the reward
    ),
    Hint(
        "no-gradient",
        "train/grad_norm",
        below(ZERO_GRADIENT, 3),
        "the gradient norm has been {value} for three steps although rewards differ: the run cannot learn",
        "check that weights to train have requires_grad, that the loss depends on output.log_probs, and that no correction or loss "
        "mask removes every token",
        unless=(("reward/all_equal", above(0.9)),),
    ),
    Hint(
        "zero-learning-rate",
        "train/lr",
        below(1e-30, 3),
        "the learning rate has been {value} for three steps: the weights do not change",
        "set --lr, and --min-lr for a schedule that would end at 0",
    ),
    Hint(
        "length-growth",
        "rollout/length_mean",
        detect_growth(3.0),
        "responses have grown to {value} tokens on average, over three times as many as at the start, and the reward has not risen",
        "look at the samples for repetition (miles report), lower --lr, or penalise long responses (--overlong-buffer-len)",
        unless=(SOLVED, ("reward/mean", detect_rise())),
    ),
    Hint(
        "truncated",
        "rollout/truncated",
        above(0.3, 5),
        "{percent} of the responses are cut at the length limit",
        "raise --rollout-max-response-len, or reward shorter answers",
        unless=(SOLVED,),
    ),
    Hint(
        "ids-without-token",
        "rollout/ids_without_token",
        above(0.0, 1),
        "{percent} of the sampled ids have no token in the tokenizer: they are trained on, and the text that is rewarded lacks them",
        "the model's output layer has more rows than the tokenizer has tokens; use the tokenizer of this checkpoint, and a checkpoint that was "
        "trained so that these rows are improbable, or cut them off with --rollout-top-p or --rollout-top-k",
    ),
    Hint(
        "clipped",
        "train/clip_fraction_*",
        above(0.3, 5),
        "{metric}: {percent} of the tokens are clipped, so the policy moves far within one rollout",
        "lower --lr or take fewer optimiser steps per rollout",
    ),
    Hint(
        "reference-drift",
        "train/ref_kl",
        above(1.0, 5),
        "the policy is {value} nats per token away from the reference model",
        "raise --kl-loss-coef or lower --lr",
    ),
    Hint(
        "engines-idle",
        "idle/engine-*",
        above(0.75, 5),
        "{metric}: the engine is idle {percent} of the time",
        "generate while the trainer trains (--schedule ahead or --fully-async), or give the trainer more of the GPUs",
        when="not colocate",
    ),
    Hint(
        "stale-samples",
        "rollout/staleness_mean",
        above(3.0, 5),
        "the samples of a step are {value} weight versions old on average",
        "bound their age (--max-weight-staleness), or give the engines more of the GPUs",
    ),
    Hint(
        "expert-imbalance",
        "*/expert_imbalance",
        above(4.0, 5),
        "the busiest expert gets {value} times its share of the tokens",
        "raise --aux-loss-coef (0.001 to 0.01)",
    ),
)
