"""Training on data that exists, without an engine: supervised (SFT), on preferences (DPO, IPO, KTO), and reward models, for miles-core."""

from miles_core.data import Field
from miles_core.plugin import Panel, Plugin, Rule, Set
from miles_offline.config import OfflineConfig

__version__ = "0.1.0"

_PAIRS = "algorithm.advantage_estimator in {dpo, ipo, reward_model}"
_KTO = "algorithm.advantage_estimator == kto"
_PREFERENCES = "algorithm.advantage_estimator in {dpo, ipo, kto, reward_model}"
_WITH_REFERENCE = "algorithm.advantage_estimator in {dpo, ipo, kto}"
_SUPERVISED = "algorithm.advantage_estimator == sft"
_REWARD_MODEL = "algorithm.advantage_estimator == reward_model"
_NO_ENGINE = "the samples are rows of --prompt-data, and no engine generates any"

_ESTIMATORS = ("sft", "dpo", "ipo", "kto", "reward_model")
#: Defaults of options that only generation reads.
_GENERATION = (
    "rollout.max_response_len == 1024",
    "rollout.max_running_requests == 256",
    "rollout.kv_cache_dtype == auto",
    "rollout.top_p == 1",
    "rollout.top_k == -1",
    "not rollout.stop",
    "not rollout.stop_token_ids",
    "rollout.generate == turn",
    "rollout.generate_key == none",
    "rollout.custom_generate_function_path == none",
    "rollout.dynamic_sampling_filter_path == none",
    "rollout.over_sampling_batch_size == none",
    "rollout.workers == none",
    "engine == embedded",
    "not verify_logprobs",
    "not colocate",
)
#: Plugin -> what it does with the samples or the weights of an engine.
_OF_ENGINES = {
    "tis": "weights tokens by the engine's log-probabilities",
    "r3": "replays the engine's choice of experts",
    "speculative": "trains and uses the drafts of an engine",
    "zero_copy": "shares weights with an engine",
    "true_on_policy": "makes the trainer compute as an engine does",
    "pass_at_k": "counts correct samples of an engine",
    "ppo": "trains a critic on the samples of an engine",
}

plugin = Plugin(
    name="offline",
    summary="training without an engine: supervised (SFT) on messages, DPO, IPO, KTO and reward models on preferences",
    version=__version__,
    core="~=0.1",
    config=OfflineConfig,
    fields=(
        Field("kto_reference", "float64", "sample"),
        Field("reward_margin", "float64", "sample"),
        Field("values", "float32", "response"),
    ),
    provides={
        "advantage": {name: f"miles_offline.{name}:make_{name}" for name in _ESTIMATORS},
        "schedule": {"offline": "miles_offline.schedule:OfflineSchedule"},
        "prompts": {"offline": "miles_offline.schedule:make_prompts"},
        "reward": {"preference": "miles_offline.schedule:make_reward"},
    },
    sets={
        "schedule": Set("offline", because=_NO_ENGINE),
        "data.prompts": Set(
            "offline",
            because="it reads the layouts messages, prompt/completion (with or without label) and prompt/chosen/rejected",
        ),
        "reward.rm_type": Set("preference", because="rows are trained on as they are; no reward is computed"),
        "rollout.n_samples_per_prompt": (
            Set(1, when=f"{_SUPERVISED} or {_KTO}", because="a row is one sample"),
            Set(2, when=_PAIRS, because="a row is a pair of samples"),
        ),
        "algorithm.kl_coef": Set(0.1, when=_WITH_REFERENCE, because="it is the beta of the loss, and 0.1 is usual"),
        "algorithm.loss_aggregation": Set(
            "constant", when=_PREFERENCES, because="the log-ratios of a preference are sums over its tokens"
        ),
        "algorithm.loss_constant_length": Set(
            1, when=_PREFERENCES, because="the loss is divided by the number of pairs (kto: rows) only"
        ),
    },
    requires=(
        Rule(
            f"algorithm.advantage_estimator in {{{', '.join(_ESTIMATORS)}}}",
            because="the other estimators compare samples of the policy",
        ),
        Rule(
            "data.prompt_data",
            when="data.prompts == offline",
            because="its rows are trained on: give --prompt-data FILE",
        ),
        Rule("algorithm.kl_coef > 0", when=_WITH_REFERENCE, because="--kl-coef is the beta of the loss"),
        Rule(
            "algorithm.kl_coef == 0 and algorithm.kl_loss_coef == 0 and algorithm.entropy_coef == 0",
            when=_REWARD_MODEL,
            because="a reward model has a score in place of the probabilities of tokens",
        ),
        Rule(
            "trainer == embedded",
            when=_REWARD_MODEL,
            because="only the embedded trainer exports a score head as Transformers stores a classifier",
        ),
        Rule(
            "lora.export == merged",
            when=f"{_REWARD_MODEL} and plugin.lora",
            because="an adapter in peft's format has no trained score head",
        ),
        Rule(
            "algorithm.kl_coef == 0",
            when=_SUPERVISED,
            because="its loss has no reward from which a KL is subtracted; use --kl-loss-coef",
        ),
        Rule(
            "train.num_steps_per_rollout in {none, 1} and train.global_batch_size == none",
            when=_PREFERENCES,
            because="log-ratios or scores are computed before the optimizer step; --rollout-batch-size is the number of pairs (kto: rows) per step",
        ),
        Rule(
            "rollout.batch_size > 1",
            when=_KTO,
            because="its reference is estimated with the answers of other rows of the step",
        ),
        Rule("not algorithm.normalize_advantages", because="the advantages are the gradient of the loss"),
        Rule("not algorithm.use_rollout_logprobs", because=_NO_ENGINE),
        Rule("algorithm.gamma == 1", because="there are no rewards to discount"),
        *(Rule(needs, because=_NO_ENGINE) for needs in _GENERATION),
        *(
            Rule(f"not plugin.{name}", because=f"it {what}, and a run without an engine has none")
            for name, what in _OF_ENGINES.items()
        ),
        Rule(
            "train.precision != bf16",
            when="rollout.precision != bf16",
            because="no engine computes in the rollout's format",
        ),
        Rule(
            "algorithm.eps_clip == 0.2 and algorithm.eps_clip_high == none and algorithm.eps_clip_c == none",
            because="its losses have no ratio to an old policy that could be clipped",
        ),
        Rule("rollout.temperature == 1", because="the likelihood of given text has no sampling temperature"),
        Rule("reward.overlong_buffer_len == none", because="the loss of a row does not contain its reward"),
        Rule(
            "rollout.max_prompt_len == none",
            because="rows are limited by their whole length: --rollout-max-context-len",
        ),
        Rule(
            "data.label_key == none",
            when=_PREFERENCES,
            because="the columns of a preference are prompt (--input-key), chosen and rejected; for kto prompt, completion and label",
        ),
        Rule("not data.media", because="it trains on text only"),
        Rule("not evaluation.prompt_data", because=f"{_NO_ENGINE}; --held-out-data measures the loss on other rows"),
        Rule("not sft.data", because="--advantage-estimator sft is supervised training itself"),
        Rule(
            "precision.warmup_steps == 0",
            because="the precision is switched at a weight sync, and there is none without an engine",
        ),
    ),
    hooks={
        "": "miles_offline.hooks:Offline",
        _KTO: "miles_offline.hooks:Kto",
        _WITH_REFERENCE: "miles_offline.hooks:PreferenceMetrics",
        _REWARD_MODEL: "miles_offline.hooks:RewardModel",
        "offline.held_out": "miles_offline.hooks:HeldOut",
    },
    panels=(
        Panel(
            "offline_rewards",
            "Rewards of preferred and rejected texts",
            {"offline/reward_chosen": "chosen", "offline/reward_rejected": "rejected"},
            section="preferences",
        ),
    ),
    foreign_flags={"--dpo-beta": {"*": "--kl-coef {}"}},
    # adapters freeze what a model consists of, and the score head is trained
    after=("lora",),
    toy={
        "advantage_estimator": "sft",
        "label_key": "label",
        "custom_rm_path": None,
        "n_samples_per_prompt": None,
        "rollout_max_response_len": None,
        "rollout_batch_size": 8,
    },
)
