"""Typer command `rota events`."""

from __future__ import annotations

from typing import Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings, run_async
from rota.cli.core.output_format import OutputFormat


def events(
    context: typer.Context,
    show: Annotated[str, typer.Option(metavar="SHOW", help="Only events of this show.", show_default=False)] = "",
    job: Annotated[
        str, typer.Option(metavar="JOB", help="Only events of the job with this id.", show_default=False)
    ] = "",
    workflow_run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", help="Only events of the workflow run with this id.", show_default=False),
    ] = "",
    kind: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="Only this kind, such as job.failed, or job for all job events; repeatable."),
    ] = None,
    after: Annotated[
        str, typer.Option(metavar="ID", help="Resume after this event instead of starting now.", show_default=False)
    ] = "",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Follow events of jobs, runs, workers, dead letters and limits until Ctrl-C. JSON is one object per line."""
    from rota.cli.events import stream as events_stream

    settings = load_settings(context, quietly=True).settings
    filters = {"show": show, "job": job, "run": workflow_run, "kind": ",".join(kind or ())}
    run_async(events_stream.follow(settings, {name: value for name, value in filters.items() if value}, after, form))
