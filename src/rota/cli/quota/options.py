"""Arguments and options of the quota commands, and how they run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rota.cli.core.options import load_settings
from rota.cli.core.output_format import OutputFormat

if TYPE_CHECKING:
    from rota.accounting.admin import QuotaAdmin
    from rota.accounting.resources import QuotaChange
    from rota.accounting.service import AccountingService
    from rota.cli.core.tables import CliPage


def _argument(metavar: str, text: str) -> Any:
    return typer.Argument(metavar=metavar, help=text, show_default=False)


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=metavar, help=text, show_default=False)


_SIZE = _option("CORES", "Guaranteed cores, such as 100 or 0.5.")
_BURST = _option("CORES", "Hard limit in cores, or relative to the size such as 150%.")

Name = Annotated[str, _argument("NAME", "Current name.")]
NewName = Annotated[str, _argument("NAME", "Up to 64 letters, digits, dots, hyphens and underscores.")]
RenameTarget = Annotated[str, _argument("NEW", "New name.")]
ShowName = Annotated[str, _argument("SHOW", "Name of the show.")]
PoolName = Annotated[str, _argument("POOL", "Name of the pool.")]
FolderName = Annotated[str, _argument("FOLDER", "Name of the folder.")]
DeptName = Annotated[str, _argument("DEPT", "Name of the department.")]
JobRef = Annotated[str, _argument("JOB", "Job id, id prefix, or a name that exactly one live job has.")]
LayerRef = Annotated[str, _argument("LAYER", "Layer id or id prefix.")]

Size = Annotated[str, _SIZE]
Burst = Annotated[str, _BURST]
NewSize = Annotated[str | None, _SIZE]
NewBurst = Annotated[str | None, _BURST]
GpuBurst = Annotated[str | None, _option("N", "Hard limit in GPUs; unlimited for no limit, 0 for none.")]
MinCores = Annotated[str | None, _option("CORES", "Served first while below this; never refuses.")]
MaxCores = Annotated[str | None, _option("CORES", "Hard limit in cores, such as 64 or 0.5; unlimited for no limit.")]
MinGpus = Annotated[str | None, _option("N", "Served first while below this number of GPUs; never refuses.")]
MaxGpus = Annotated[str | None, _option("N", "Hard limit in GPUs; unlimited for no limit.")]


def command_group(text: str) -> typer.Typer:
    return typer.Typer(help=text, no_args_is_help=True, rich_markup_mode=None)


def read(context: typer.Context, form: OutputFormat, page: Callable[[AccountingService], Awaitable[CliPage]]) -> None:
    from rota.cli.quota import actions as quota_actions

    quota_actions.read(load_settings(context, quietly=True).settings, page, form=form)


def change(
    context: typer.Context, form: OutputFormat, work: Callable[[QuotaAdmin, str], Awaitable[QuotaChange]]
) -> None:
    """Run `work` with the `QuotaAdmin` and the actor, and print the change."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.change(load_settings(context, quietly=True).settings, work, form=form)
