"""The `rota` command. Heavy imports live inside commands, so that `rota --help` answers at once."""

from rota.cli.app import main

__all__ = ["main"]
