"""`kgen completion`: a shell's completion of kgen's commands and flags, made of the command line's own parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from kgen.commands.exit_codes import OK

__all__ = ["SHELLS", "completion"]

BASH = """\
_kgen() {{
  local word path= current=${{COMP_WORDS[COMP_CWORD]}}
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$path $word" in
{steps}
    esac
  done
  case "$path" in
{words}
  esac
}}
complete -o bashdefault -o default -F _kgen kgen
"""
ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"

Commands = dict[tuple[str, ...], argparse.ArgumentParser]


def completion(options: argparse.Namespace) -> int:
    """Prints the script that a shell runs at its start."""
    commands = dict(_commands(options.root))
    sys.stdout.write(SHELLS[options.shell](commands))
    return OK


def _commands(
    parser: argparse.ArgumentParser, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """Each command and action by the words before its flags."""
    yield path, parser
    for name, one in _below(parser).items():
        yield from _commands(one, (*path, name))


def _below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return {name: one for action in found for name, one in action.choices.items()}


def _flags(parser: argparse.ArgumentParser) -> list[tuple[str, str]]:
    """Each long flag with what it does; hidden ones are left out."""
    return [
        (flag, (action.help or "").replace("'", ""))
        for action in parser._actions
        for flag in action.option_strings
        if flag.startswith("--") and action.help is not argparse.SUPPRESS
    ]


def _bash(commands: Commands) -> str:
    steps = [f'      "{" ".join(path[:-1])} {path[-1]}") path="{" ".join(path)}" ;;' for path in commands if path]
    offered = {path: " ".join([*_below(one), *(flag for flag, _ in _flags(one))]) for path, one in commands.items()}
    words = [f'    "{" ".join(path)}") COMPREPLY=($(compgen -W "{text}" -- "$current")) ;;' for path, text in offered.items()]
    return BASH.format(steps="\n".join(steps), words="\n".join(words))


def _zsh(commands: Commands) -> str:
    return ZSH + _bash(commands)


def _fish(commands: Commands) -> str:
    lines = []
    for path, one in commands.items():
        seen = [f"__fish_seen_subcommand_from {word}" for word in path]
        inner = [f"not __fish_seen_subcommand_from {' '.join(_below(one))}"] if _below(one) else []
        condition = f" -n '{'; and '.join([*seen, *inner])}'" if seen or inner else ""
        lines += [f"complete -c kgen{condition} -f -a '{name}'" for name in _below(one)]
        lines += [f"complete -c kgen{condition} -l '{flag[2:]}' -d '{text}'" for flag, text in _flags(one)]
    return "\n".join(lines) + "\n"


SHELLS = {"bash": _bash, "zsh": _zsh, "fish": _fish}
