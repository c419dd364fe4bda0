"""What the stops of the demo share: the open stack, and lines that are checked before they are printed."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rota.infra.nats import Bus
from rota.infra.postgres import Database
from rota.local import LocalStack
from rota.model.errors import RotaError


class Tour:
    """The open stack, and somewhere to write."""

    def __init__(self, console: Console, stack: LocalStack, database: Database, bus: Bus) -> None:
        self.console = console
        self.stack = stack
        self.database = database
        self.bus = bus

    def shown(self, kept: bool, text: str) -> None:
        if not kept:
            raise RotaError(f"The demo found a promise broken: {text}; please report it.")
        self.console.print(f"  [green]✓[/] {text}")


def bars(console: Console) -> Progress:
    return Progress(
        TextColumn("  {task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )
