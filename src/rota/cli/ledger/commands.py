"""Typer commands of `rota ledger`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings, run_async
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

ledger_app = command_group("Whether the books agree, and how they fill.")


@ledger_app.command("audit")
def ledger_audit(
    context: typer.Context,
    show: Annotated[str | None, typer.Option(metavar="NAME", help="This show alone.", show_default=False)] = None,
    repair: Annotated[bool, typer.Option("--repair", help="Bring everything to what PostgreSQL says.")] = False,
    whole: Annotated[bool, typer.Option("--all", help="Show keys that agree, too.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Compare Redis, the accounting tables and the procs, key by key. Exit status 1 when they do not agree."""
    from rota.cli.ledger import actions as ledger_actions

    settings = load_settings(context, quietly=True).settings
    sys.exit(run_async(ledger_actions.audit(settings, show, repair=repair, form=form, whole=whole)))


@ledger_app.command("watch")
def ledger_watch(
    context: typer.Context,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.", min=0.1)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """What every show uses of its pools, live, until Ctrl-C."""
    from rota.cli.ledger import actions as ledger_actions

    run_async(ledger_actions.watch(load_settings(context, quietly=True).settings, every_s=every, once=once, form=form))
