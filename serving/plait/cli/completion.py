"""`plait completion`: what a shell asks for while somebody types a command."""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from typing import Annotated, Literal

import typer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)


_BASH = 'complete -o default -C "plait --complete" plait'
_SCRIPTS = {
    "bash": _BASH,
    "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}",
    "fish": "complete -c plait -a '(env COMP_LINE=(commandline -cp) plait --complete)'",
}


@app.command()
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="for this shell")]) -> None:
    """Print what a shell reads to complete commands and options: add `eval "$(plait completion bash)"` to ~/.bashrc.

    For fish: `plait completion fish > ~/.config/fish/completions/plait.fish`.
    """
    print(_SCRIPTS[shell])


def candidates(line: str, commands: Collection[str]) -> list[str]:
    """Return what the last word of a line may become: one of plait's commands, or an option; nothing where it may be a
    file."""
    *before, last = [*line.split()[1:], *[""] * line.endswith(" ")] or [""]
    names = [*commands, "help"]
    if before and before[0] == "help":
        before = before[1:]
    if before:
        if before[0] not in commands:
            return []
        command = typer.main.get_command(import_module(f"plait.cli.{before[0]}").app)
        for word in before[1:]:
            command = getattr(command, "commands", {}).get(word, command)
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("-")]
        names = [*getattr(command, "commands", ()), *([*options, "--help"] if last.startswith("-") else ())]
    return sorted(name for name in names if name.startswith(last))
