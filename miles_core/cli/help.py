"""``miles train --help``: the flags most runs use, one section or the result of a search, or everything."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from miles_core.config.flags import add_flag, build_help, describe, new_help
from miles_core.config.schema import CORE, Schema
from miles_core.errors import ConfigError
from miles_core.nearest import did_you_mean

ALL = "--help-all"
#: How else help can be requested; rows of the help itself.
REQUESTS = (
    ("--help NAME", "show a section or a plugin; any other word is searched in the flags and their help"),
    (ALL, "show every flag"),
)
#: What most runs set, in the order in which a user needs them.
MOST_USED = (
    "model.hf_checkpoint",
    "data.prompt_data",
    "data.input_key",
    "data.label_key",
    "data.apply_chat_template",
    "reward.rm_type",
    "reward.custom_rm_path",
    "rollout.num_rollout",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.max_response_len",
    "rollout.temperature",
    "algorithm.advantage_estimator",
    "train.lr",
    "train.global_batch_size",
    "train.seed",
    "evaluation.prompt_data",
    "evaluation.interval",
    "run.plugins",
    "run.engine",
    "run.trainer",
    "run.save",
    "run.save_interval",
    "run.load",
    "run.export_hf",
)
#: Lines of the short help at most: two screens.
LINES = 80
WIDTH = 110


def help_text(argv: Sequence[str], schema: Schema, command: str, extra: Sequence[tuple[str, str]] = ()) -> str:
    """Return the help that a command line requests: every flag for ``--help-all``, the flags that match the words after ``--help``, or the
    most used flags if there are none.

    Args:
        argv: the arguments, with ``--help``, ``-h`` or ``--help-all``.
        schema: the options.
        command: name of the command.
        extra: further flags and their help.

    Raises:
        ConfigError: no section, plugin or flag matches a word.
    """
    at = next((i for i, word in enumerate(argv) if word in ("--help", "-h")), len(argv))
    rest = argv[at + 1 :]
    end = next((i for i, word in enumerate(rest) if word.startswith("-")), len(rest))
    words = [ALL] if ALL in argv else list(rest[:end])
    if words == [ALL]:
        return build_help(schema, command, (*REQUESTS, *extra)).format_help()
    if not words:
        return _short(schema, command, extra)
    chosen = {spelling for word in words for spelling in _matching(schema, word)}
    text = build_help(schema, command, (), chosen).format_help()
    end_of_command = text.index("\n\n", text.index("command:"))
    return text[end_of_command + 2 :]  # without the section "command", which was not searched


def _matching(schema: Schema, word: str) -> set[str]:
    """Spellings of the flags in a section or of a plugin, else of those that mention ``word``."""
    tables = {table for table in schema.groups if word in (table, schema.owners[table])}
    if tables:
        owners = {schema.owners[table] for table in tables}
        flags = {f.spelling for f in schema.distinct_flags() if tables & {option.group for option in f.options}}
        return flags | {
            alias.spelling
            for alias in schema.aliases.values()
            if alias.owner in owners and (alias.owner != CORE or next(iter(alias.values)).partition(".")[0] in tables)
        }
    wanted = word.lower().replace("_", "-")
    found = {
        flag.spelling
        for flag in schema.distinct_flags()
        if any(wanted in name for name in (flag.spelling, *flag.aliases))
        or re.search(rf"\b{re.escape(word)}", describe(flag), re.IGNORECASE)
    }
    found |= {spelling for spelling in schema.aliases if wanted in spelling}
    if not found:
        near = did_you_mean(word, [*schema.groups, *schema.spellings()], "; ")
        raise ConfigError(f"--help {word}: no section, plugin or flag has this name or mentions it{near}")
    return found


def _short(schema: Schema, command: str, extra: Sequence[tuple[str, str]]) -> str:
    parser = new_help(command, (*REQUESTS, *extra))
    section = parser.add_argument_group("most used")
    for path in MOST_USED:
        add_flag(section, schema.flag_of(path))
    lines = parser.format_help().rstrip().splitlines()
    counts = dict.fromkeys(schema.groups, 0)
    for option in schema.options.values():
        counts[option.group] += 1
    core = [table for table in counts if schema.owners[table] == CORE]
    plugins = [table for table in counts if schema.owners[table] != CORE]
    end = ["", f"{command} --help rollout shows one section; {command} --help staleness searches."]
    lines += ["", "sections (--help NAME):", *(_section(schema, table, counts[table]) for table in core)]
    rows = [_section(schema, table, counts[table]) for table in plugins]
    if len(lines) + len(rows) + 2 + len(end) > LINES:
        rows = textwrap.wrap(", ".join(plugins), WIDTH, initial_indent="  ", subsequent_indent="  ")
    if rows:
        lines += ["", "sections of installed plugins (--help NAME):", *rows]
    return "\n".join([*lines, *end]) + "\n"


def _section(schema: Schema, table: str, count: int) -> str:
    owner = schema.owners[table]
    summary = (schema.groups[table].__doc__ or "").strip().split("\n")[0]
    text = summary if owner == CORE else schema.manifests[owner].summary
    return f"  {table:<14}{count:>4} flags  {textwrap.shorten(text, WIDTH - 30, placeholder=' ...')}"
