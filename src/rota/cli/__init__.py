"""The `rota` command. Heavy imports live inside commands, so that `rota --help` answers at once."""

from rota.cli.main import main

__all__ = ["main"]
