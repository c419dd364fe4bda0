"""Typer commands of `rota ledger`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings, run_async
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

ledger_app = command_group("Audit of the quota accounting, and live usage.")


@ledger_app.command("audit")
def ledger_audit(
    context: typer.Context,
    show: Annotated[str | None, typer.Option(metavar="NAME", help="Only this show.", show_default=False)] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Set everything to PostgreSQL's values.")] = False,
    whole: Annotated[bool, typer.Option("--all", help="Also print keys that agree.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Compare Redis, the accounting tables and the procs, key by key. Exit status 1 when they do not agree."""
    from rota.cli.ledger import actions as ledger_actions

    settings = load_settings(context, quietly=True).settings
    sys.exit(run_async(ledger_actions.audit(settings, show, repair=repair, form=form, whole=whole)))


@ledger_app.command("watch")
def ledger_watch(
    context: typer.Context,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Refresh interval.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show the usage of every show in its pools, live, until Ctrl-C."""
    from rota.cli.ledger import actions as ledger_actions

    run_async(ledger_actions.watch(load_settings(context, quietly=True).settings, every_s=every, once=once, form=form))
