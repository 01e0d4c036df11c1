"""Command lines of other programs' example scripts (``lines.json``: what they pass, with variables expanded) become one line that loads."""

import json
import re
import shlex
from pathlib import Path

import pytest

from miles_core.config.load import load, schema_for
from miles_core.plugin import ConfigError
from miles_tools.command_line import COMPLETE
from miles_tools.foreign import explain, programs, recognize
from miles_tools.foreign.translate import _FLAG, translate
from miles_tools.foreign.words import read_groups

LINES = json.loads(Path(__file__).with_name("lines.json").read_text(encoding="utf-8"))
#: Options of each program's configuration, of which its scripts use few.
OPTIONS = json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
CASES = [(program, script) for program, scripts in LINES.items() for script in scripts]
#: Flags of miles' scripts that are named otherwise here or not needed.
MILES = (
    "--save-retain-interval 200 --num-gpus-per-node 8 --use-fault-tolerance --dump-details /root/dump --log-probs-chunk-size 1024 "
    "--custom-config-path a.yaml --gradient-checkpointing --custom-tis-function-path a.f --eval-config e.yaml --qkv-format thd "
    "--train-env-vars {} --wandb-team t --tito-model m --save-dir d --data-pad-size-multiplier 4096 "
    "--custom-agent-function-path a.f --wandb-host h --sglang-load-format dummy --use-opd --opd-type x --no-save-optim "
    "--use-session-server --session-server-port 1 --use-rollout-indexer-replay --fp8-param-gather --ci-test --use-prometheus "
    "--rollout-health-check-interval 30 --offload-train-disk-dir d --lora-base-cpu-backup --fsdp-cpu-offload --log-passrate"
)


@pytest.fixture(scope="module")
def schema():
    return schema_for([])


def answer(words):
    with pytest.raises(ConfigError) as error:
        load(words, environment={})
    return str(error.value)


def complete_line(text):
    assert text.count(COMPLETE) == 1, text
    line = shlex.split(text.rsplit(COMPLETE, 1)[1])
    assert line[:2] == ["miles", "train"]
    return line[2:]


@pytest.mark.parametrize(("program", "script"), CASES)
def test_a_script_s_command_line_becomes_a_complete_line(program, script):
    words = LINES[program][script]
    text = answer(words)
    assert f"these are options of {program}; " in text and "not known, and left out" not in text, text
    load(complete_line(text), environment={})


def test_scripts_of_each_program_are_in_the_file():
    assert {program: len(scripts) for program, scripts in LINES.items()} == {
        "verl": 15, "slime and miles": 12, "TRL": 6, "prime-rl": 10, "OpenRLHF": 4
    }  # fmt: skip


@pytest.mark.parametrize(("program", "script"), CASES)
def test_every_option_of_a_script_is_answered(program, script, schema):
    words = LINES[program][script]
    found = translate(words, schema)
    named = {typed.split("=")[0].split(" ")[0].lstrip("+") for typed, _ in found.changed}
    named |= {name for names in found.dropped.values() for name in names}
    known = set(schema.spellings())
    asked = {g.plain for g in read_groups(words) if g.name and g.name not in known and g.name not in ("-m", "--", "-u")}
    assert asked - named == set()


@pytest.mark.parametrize("program", OPTIONS)
def test_every_option_of_a_program_is_answered(program, schema):
    """Options of this program that are spelt alike are answered by their flags."""
    for option in OPTIONS[program].split():
        word = option if "." in option or option.startswith("--") else f"--{option}"
        found = translate([f"{word}=x"] if "." in option else [word, "x"], schema)
        known = word.replace("_", "-") in {*schema.spellings(), "--config"}
        assert known or not found.unknown, (option, found.unknown)


@pytest.mark.parametrize(
    "option", ["--vllm_num_engines", "--vllm_sync_backend", "--generate_max_len", "--ds.zero_stage"]
)
def test_a_name_counts_more_than_a_pattern_of_another_program(option):
    assert f"{option}, an option of OpenRLHF; here: " in explain(option)
    assert "an option of TRL" not in explain("--vllm_other") and "an option of TRL" in explain("--vllm_server_host")


def test_sizes_and_the_kl_of_openrlhf():
    dapo = load(complete_line(answer(LINES["OpenRLHF"]["0.9.9: train_dapo_ray_hybrid_engine.sh"])), environment={})
    assert (dapo.rollout.batch_size, dapo.rollout.n_samples_per_prompt, dapo.train.global_batch_size) == (128, 8, 128)
    assert (dapo.algorithm.kl_loss_coef, dapo.algorithm.kl_loss_type, dapo.algorithm.kl_coef) == (1e-3, "k3", 0)
    assert (dapo.algorithm.eps_clip, dapo.algorithm.eps_clip_high) == (0.2, 0.27)
    assert dapo.run.colocate and dapo.plugin("ray").rollout_num_gpus is None
    agent = load(
        complete_line(answer(LINES["OpenRLHF"]["train_reinforce_baseline_ray_agent_async.sh"])), environment={}
    )
    assert (agent.data.input_key, agent.data.label_key, agent.data.apply_chat_template) == ("prompt", "label", True)
    assert (agent.run.schedule, agent.run.colocate, agent.plugin("ray").rollout_num_gpus) == ("async", False, 4)


def test_a_key_of_wandb_is_not_repeated():
    text = answer(["--pretrain", "m", "--zero_stage", "3", "--packing_samples", "--use_wandb", "hunter2"])
    assert "hunter2" not in text and "--use-wandb" in complete_line(text)


def test_names_of_the_reward_and_filters_of_verl():
    """The name of the function is no path, and a filter has a name here."""
    line = complete_line(answer(LINES["verl"]["from memory: multi-turn with LoRA"]))
    assert line[line.index("--custom-rm-path") + 1] == "r.py:score"
    dapo = load(
        complete_line(answer(LINES["verl"]["from memory: recipe/dapo/run_dapo_qwen2.5_32b.sh"])), environment={}
    )
    assert (dapo.reward.overlong_buffer_len, dapo.rollout.dynamic_sampling_filter_path) == (4096, "nonzero_std")


def test_processes_and_accumulation_of_trl_make_the_rollout():
    trl = load(complete_line(answer(LINES["TRL"]["from memory: grpo.py with vLLM on eight GPUs"])), environment={})
    assert (
        trl.rollout.batch_size * trl.rollout.n_samples_per_prompt == 4 * 8 * 4
    )  # samples, processes, steps per generation


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--log-interval 10", ""),
        ("--ckpt-format torch_dist", ""),
        ("--critic-num-nodes 2", ""),
        ("--evl-interval 3", "--eval-interval 3"),
        ("--numrollout 3", "--num-rollout 3"),
        ("--rollout-tempreature 1", "--rollout-temperature 1"),
    ],
)
def test_another_word_is_no_typing_error(typed, line, schema):
    assert translate(typed.split(), schema).line == line.split()


def test_numbers_are_converted_to_the_units_here():
    line = complete_line(answer(LINES["verl"]["grpo_trainer/run_qwen3-8b.sh"]))
    config = load(line, environment={})
    assert config.rollout.batch_size == 1024 and config.train.global_batch_size == 256 * 5
    assert config.run.colocate and config.run.engine == "sglang" and config.plugin("ray").actor_num_gpus_per_node == 8
    assert config.plugin("sglang").mem_fraction_static == 0.6 and config.plugin("ray").rollout_num_gpus_per_engine == 2
    assert config.algorithm.kl_coef == 0
    trl = load(complete_line(answer(LINES["TRL"]["0"])), environment={})
    assert (trl.rollout.batch_size, trl.rollout.n_samples_per_prompt, trl.train.micro_batch_size) == (4, 4, 2)
    assert trl.plugin("lora").rank == 16
    prime = load(complete_line(answer(LINES["prime-rl"]["basic/reverse-text/rl.toml"])), environment={})
    assert prime.rollout.batch_size * prime.rollout.n_samples_per_prompt == 128


def test_the_text_shows_the_value_of_the_complete_line():
    text = answer(LINES["verl"]["grpo_trainer/run_qwen3-8b.sh"])
    assert "ppo_mini_batch_size=256 -> --global-batch-size 1280" in text
    assert "add --num-rollout with 15 times the number of prompts" in text


def test_a_toml_file_of_prime_rl_is_read(tmp_path):
    path = tmp_path / "rl.toml"
    path.write_text(
        'max_steps = 20\nseq_len = 2048\n[model]\nname = "Q/Q"\n[orchestrator]\nbatch_size = 128\ngroup_size = 16\n'
    )
    for words in ([str(path)], ["uv", "run", "rl", "@", str(path)], ["--config", str(path)]):
        config = load(complete_line(answer(words)), environment={})
        assert (config.rollout.num_rollout, config.rollout.batch_size, config.model.hf_checkpoint) == (20, 8, "Q/Q")


@pytest.mark.parametrize("flag", [word for word in MILES.split() if word.startswith("--")])
def test_each_flag_of_miles_is_answered(flag):
    assert "slime and miles" in explain(flag) or flag == "--gradient-checkpointing"


def test_flags_of_miles_become_a_complete_line():
    text = answer([*shlex.split(MILES), "--lr", "1e-6"])
    assert "not known, and left out" not in text
    config = load(complete_line(text), environment={})
    assert config.train.lr == 1e-6 and config.plugin("ray").actor_num_gpus_per_node == 8 and str(config.run.save) == "d"


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("--lrr 3", "--lr 3"),
        ("--hepl", "--help"),
        ("--prompt-dta x --lr 1", "--prompt-data x --lr 1"),
        ("--eps_clip 0.2", "--eps-clip 0.2"),
        ("--train.lr 1", "--lr 1"),
        ("--save-hf out", "--export-hf out"),
        ("--rollout-stop a b", "--rollout-stop a,b"),
        ("--zzz 3 --lr 1", "--lr 1"),
        ("--num-gpus-per-node 8", "--actor-num-gpus-per-node 8"),
        ("trainer.nnodes=2 --lr 1", "--actor-num-nodes 2 --lr 1"),
    ],
)
def test_a_single_mistake_gets_a_complete_line(typed, line):
    assert complete_line(answer(shlex.split(typed))) == shlex.split(line)


@pytest.mark.parametrize("typed", ["--port 13141 --lr 1", "--tp 8 --lr 1"])
def test_a_flag_that_is_only_a_little_similar_is_not_replaced(typed):
    assert complete_line(answer(shlex.split(typed))) == ["--lr", "1"]


def test_a_fact_is_no_option():
    assert "miles plan --fact gpu.sm=VALUE" in answer(["--gpu.sm", "100"])


def test_a_line_of_this_program_with_one_wrong_flag_is_not_completed_like_another_program_s():
    line = complete_line(answer(["--beta", "0.1", "--hf-checkpoint", "x"]))
    assert line == ["--kl-loss-coef", "0.1", "--hf-checkpoint", "x"]


def test_a_key_is_not_repeated():
    text = answer(["--wandb-key", "hunter2", "--use-kl-loss", "--lr", "1"])
    assert "hunter2" not in text and "WANDB_API_KEY" in text


def test_every_flag_that_a_sentence_recommends_exists(schema):
    known = {*schema.spellings(), "--config", "--eval-*", "--sglang-NAME"}
    for program in programs():
        for key, sentence in program.names.items():
            assert sentence.strip() and (not sentence.endswith(".") or sentence.endswith("...")), key
            for flag in re.findall(r"--[A-Za-z0-9*-]+", sentence):
                assert flag in known, (program.name, key, flag)


def test_every_replacement_of_a_value_loads(schema):
    for program in programs():
        for key, table in program.values.items():
            assert key in program.names or key.startswith("--"), (program.name, key)
            for replacement in table.values():
                flags = [word for word in replacement.split() if word.startswith("--")]
                assert all(flag in schema.spellings() for flag in flags), (program.name, key, replacement)


def test_a_sentence_that_begins_with_a_flag_and_a_placeholder_is_a_translation():
    assert _FLAG.match("--lr X")[1] == "--lr" and _FLAG.match("--seed N: one seed")[1] == "--seed"
    assert _FLAG.match("--custom-rm-path FILE.py:FN; return")[1] == "--custom-rm-path"
    assert _FLAG.match("--rollout-batch-size and --global-batch-size set") is None
    assert recognize(["--nothing"]) is None


def test_a_file_of_this_program_is_not_taken_for_another_program_s(tmp_path):
    """Its tables have names that verl and prime-rl have, too."""
    path = tmp_path / "run.yaml"
    path.write_text(
        "data:\n  shuffle: true\n  input_key: q\nalgorithm:\n  gamma: 0.9\ntrain:\n  lr: 0.1\n  weight_decay: 0.0\n"
    )
    assert complete_line(answer(["--config", str(path), "--lrr", "1"])) == ["--config", str(path), "--lr", "1"]
    flat = tmp_path / "flat.yaml"
    flat.write_text(
        "weight-decay: 0.1\nadam-beta1: 0.9\nadam-beta2: 0.9\nseed: 3\nrollout-batch-size: 3\nnum-rollout: 2\n"
    )
    assert complete_line(answer(["--config", str(flat), "--lrr", "1"])) == ["--config", str(flat), "--lr", "1"]
