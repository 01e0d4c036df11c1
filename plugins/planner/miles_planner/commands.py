"""``miles plan --search``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from miles_core.cli.plan import USAGE, collect_facts, make_parser
from miles_core.config.command import CommandParser
from miles_core.plugin import ConfigError
from miles_planner.packages import PARTS, check_packages, read_option

if TYPE_CHECKING:
    from miles_core.config.command import Command
    from miles_core.config.config import Config
    from miles_core.plugin import Facts
    from miles_planner.task import Task
    from miles_planner.workload import Workload

SEARCH = "--search"


def search_layouts(argv: Sequence[str]) -> int:
    """Implement ``miles plan --search``, and ``miles plan --help`` with all options."""
    check_packages(argv, SEARCH in argv)
    options, rest, command = make_search_parser().parse_own(argv)
    if options.top < 1:
        raise ConfigError(f"--top {options.top}: show at least one layout")
    if options.launch:
        from miles_planner.launch.command import check_options

        check_options(options)
    from miles_planner.one_process import find_in_one_process
    from miles_planner.search import search
    from miles_planner.show import command_of, describe

    task, config, notes = make_task(options, rest, command)
    result = search(task, options.top)
    if not result.best:
        result = replace(result, one_process=tuple(find_in_one_process(rest, collect_facts(options))))
    print(describe(task, result, config, rest, notes, as_json=options.json))
    if options.launch and result.best:
        from miles_planner.launch.command import write_file

        words = shlex.split(command_of(result.best[0], config, rest))
        print(write_file(options, words[2:]), file=sys.stderr)
    return 0 if result.best or result.one_process else 2


def make_search_parser() -> CommandParser:
    """Create the parser of ``miles plan`` with all of its options."""
    from miles_planner.launch.command import KINDS, add_options

    parser = make_parser(
        "plan",
        f"{USAGE}\n       miles plan --search --hardware GPUS --hf-checkpoint DIR [...]",
        "Resolve a run without starting it.",
    )
    group = parser.add_argument_group("searching for a layout")
    group.add_argument(SEARCH, action="store_true", help="propose the fastest layouts of the run on --hardware")
    group.add_argument("--mean-response-len", type=float, metavar="N", help="mean tokens of a response (default: half)")
    group.add_argument("--mean-prompt-len", type=float, metavar="N", help="mean tokens of a prompt (default: 512)")
    group.add_argument("--top", type=int, default=6, metavar="N", help="number of layouts to show (default: 6)")
    group.add_argument(
        "--allow-precision",
        action="store_true",
        help="also search other number formats than those of the command line (FP8; INT4 if engines do not fit otherwise)",
    )
    group.add_argument("--launch", choices=KINDS, help="write a launch file for the fastest layout")
    add_options(parser.add_argument_group("the job, with --launch"))
    return parser


def make_task(options: Any, rest: Sequence[str], command: Command) -> tuple[Task, Config, list[str]]:
    """Read the options of a search; returns the task, the configuration, and what was assumed.

    Raises:
        ConfigError: hardware or checkpoint are missing, or a length is impossible.
    """
    from miles_core.config.load import load
    from miles_core.plugin.check import check
    from miles_core.plugin.model_config import model_config
    from miles_core.run.prepare import catalogue_for, facts_for
    from miles_planner.task import Task

    chosen = tuple(f"{flag}={value}" for flag, value in PARTS.items() if read_option(rest, flag) is None)
    config = load(rest, command=replace(command, after=chosen))
    if config.model.hf_checkpoint is None:
        raise ConfigError("--search: give the model with --hf-checkpoint (a directory with config.json is enough)")
    catalogue = dict(catalogue_for(config))
    given = facts_for(config, collect_facts(options))
    if not given.value("gpu.count"):
        raise ConfigError("--search: there is no GPU here; give the hardware, for example --hardware 64xH200")
    facts = check(config.requested, catalogue, given).facts
    name = config.model.hf_checkpoint
    model = model_config(name)
    if model is None:
        raise ConfigError(
            f"--hf-checkpoint {name}: neither a directory nor in the local hub cache; a search needs its config.json: "
            f"hf download {name} config.json"
        )
    work, notes = _workload(facts, options)
    return Task(facts, config.requested, catalogue, model, work, options.allow_precision), config, notes


def _workload(facts: Facts, options: Any) -> tuple[Workload, list[str]]:
    """Derive the work of a step from the options, and describe what was assumed."""
    from miles_planner.workload import Workload

    notes = []
    longest = int(facts.value("rollout.max_response_len") or 1024)
    prompt, response = options.mean_prompt_len, options.mean_response_len
    if response is None:
        response = longest / 2
        notes.append(
            f"responses of {response:,.0f} tokens on average: half of --rollout-max-response-len (--mean-response-len sets it)"
        )
    if not 1 <= response <= longest:
        raise ConfigError(
            f"--mean-response-len {response:g} must be between 1 and --rollout-max-response-len {longest}"
        )
    most = float(facts.value("rollout.max_prompt_len") or facts.value("model.context") or 1 << 20)
    if prompt is None:
        prompt = min(512.0, most)
        notes.append(f"prompts of {prompt:,.0f} tokens on average (--mean-prompt-len sets it)")
    if not 1 <= prompt <= most:
        raise ConfigError(f"--mean-prompt-len {prompt:g} must be between 1 and the longest prompt, {most:,.0f} tokens")
    samples = int(facts.value("rollout.batch_size") or 1) * int(facts.value("rollout.n_samples_per_prompt") or 1)
    steps = int(facts.value("train.num_steps_per_rollout") or 0)
    steps = steps or max(samples // int(facts.value("train.global_batch_size") or samples), 1)
    reference = bool(facts.value("algorithm.kl_loss_coef") or facts.value("algorithm.kl_coef"))
    old = steps > 1 and not facts.value("algorithm.use_rollout_logprobs")
    lag = {"ahead": 1, "async": int(facts.value("rollout.max_weight_staleness") or 1)}.get(
        str(facts.value("schedule")), 0
    )
    return Workload(samples, prompt, response, longest, steps, int(reference) + int(old), lag), notes
