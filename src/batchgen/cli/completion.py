"""`batchgen completion SHELL`: the script that makes a shell complete batchgen's commands, options and names."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from batchgen.cli.completing import VARIABLE

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def command(context: click.Context, shell: str) -> int:
    """Print the completion script for a shell.

    \b
    bash:  eval "$(batchgen completion bash)"          in ~/.bashrc
    zsh:   eval "$(batchgen completion zsh)"           in ~/.zshrc
    fish:  batchgen completion fish > ~/.config/fish/completions/batchgen.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None  # click knows all of SHELLS
    click.echo(kind(context.find_root().command, {}, "batchgen", VARIABLE).source())
    return 0
