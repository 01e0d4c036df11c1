"""``miles completion SHELL``: a script that completes commands, flags and their values in bash, zsh or fish.

The script contains the flags of the plugins installed now, so generate it in the shell's startup file:
``source <(miles completion bash)``, ``source <(miles completion zsh)``, ``miles completion fish | source``.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miles_core.config.command import CommandParser

if TYPE_CHECKING:
    from miles_core.cli.commands import Commands

#: Text in the help of commands that also accept the flags of ``miles train``.
_ANY = "miles train"


@dataclass(frozen=True)
class Words:
    """Words to complete.

    Attributes:
        commands: command -> description.
        flags: command -> its flags.
        values: flag -> its choices.
    """

    commands: Mapping[str, str]
    flags: Mapping[str, list[str]]
    values: Mapping[str, list[str]]


def run(argv: Sequence[str]) -> int:
    """Print the script for the shell that ``argv`` names."""
    parser = CommandParser("completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=sorted(SCRIPTS), help="the shell that reads the script")
    print(SCRIPTS[parser.parse_all(argv).shell](words()))
    return 0


def words() -> Words:
    """Collect the words: flags from the commands' help texts, values from the options' declarations."""
    from miles_core.cli.commands import Commands
    from miles_core.config.load import schema_for
    from miles_core.plugin.discovery import discover
    from miles_core.precision.schedule import PLAIN

    commands = Commands.installed()
    helps = {name: _help_of(commands, name) for name in commands if name != "completion"}
    found = {name: re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", text) for name, text in helps.items()}
    found = {name: found[name] + (found["train"] if _ANY in helps[name] else []) for name in helps}
    flags = {name: sorted(set(own)) for name, own in found.items()}
    schema = schema_for([])
    values = {name: [str(c) for c in flag.option.choices] for name, flag in schema.flags.items() if flag.option.choices}
    formats = {name for manifest in discover().values() for name in manifest.formats}
    values["--to"] = sorted(formats | {PLAIN})
    return Words(commands.summaries, {**flags, "completion": sorted(SCRIPTS)}, values)


def _help_of(commands: Commands, name: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text), suppress(SystemExit):
        commands.load(name)(["--help-all" if name == "train" else "--help"])
    return text.getvalue()


def _bash(words: Words) -> str:
    def cases(found: Mapping[str, Sequence[str]], do: str) -> str:
        return "\n".join(f"    {name}) {do.format(shlex.quote(' '.join(each)))} ;;" for name, each in found.items())

    reply = 'COMPREPLY=($(compgen -W {} -- "$current")); return'
    return f"""\
_miles() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    {reply.format(shlex.quote(" ".join(words.commands)))}
  fi
  case "$before" in
{cases(words.values, reply)}
  esac
  case "${{COMP_WORDS[1]}}" in
{cases(words.flags, "words={}")}
  esac
  case "$current" in
    -*) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
    *) COMPREPLY=($(compgen -f -- "$current")) ;;
  esac
  if [ "${{COMP_WORDS[1]}}" = completion ]; then COMPREPLY=($(compgen -W "$words" -- "$current")); fi
}}
complete -o filenames -F _miles miles"""


def _zsh(words: Words) -> str:
    return f"autoload -Uz compinit bashcompinit && compinit && bashcompinit\n{_bash(words)}"


def _fish(words: Words) -> str:
    lines = ["complete -c miles -e"]
    for name, text in words.commands.items():
        lines.append(f"complete -c miles -f -n __fish_use_subcommand -a {name} -d {shlex.quote(text)}")
    for name, found in words.flags.items():
        for word in found:
            if word.startswith("--"):
                values = words.values.get(word)
                takes = f" -x -a {shlex.quote(' '.join(values))}" if values else ""
                lines.append(f"complete -c miles -n '__fish_seen_subcommand_from {name}' -l {word[2:]}{takes}")
            else:
                lines.append(f"complete -c miles -f -n '__fish_seen_subcommand_from {name}' -a {word}")
    return "\n".join(lines)


SCRIPTS: dict[str, Callable[[Words], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
