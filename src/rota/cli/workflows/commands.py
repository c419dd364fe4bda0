"""Typer commands of `rota workflow`."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.cli.workflows.actions import WorkflowContext

workflow_app = command_group("Workflows: steps that depend on each other, and their compensation.")
RunArg = Annotated[str, typer.Argument(metavar="RUN", help="Run id or id prefix.", show_default=False)]
ShowOption = Annotated[str, typer.Option("--show", metavar="NAME", help="Show of the workflow (default: default).")]
DefinitionFileArg = Annotated[
    str,
    typer.Argument(
        metavar="FILE", help="A definition in YAML, JSON, or Python: app.py, app.py:workflow.", show_default=False
    ),
]


@workflow_app.command("validate")
def workflow_validate(context: typer.Context, file: DefinitionFileArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Validate a definition, and show the order of its steps. Changes nothing."""
    from rota.cli.quota.actions import print_page
    from rota.cli.workflows import actions as workflows_actions

    load_settings(context, quietly=True)
    print_page(workflows_actions.validate_file(file), form=form)


@workflow_app.command("declare")
def workflow_declare(context: typer.Context, file: DefinitionFileArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Declare a definition; a changed one becomes a new version. Existing runs keep theirs."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.declare_workflow(workflows, file))


@workflow_app.command("definitions")
def workflow_definitions(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List workflows in their latest version."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, workflows_actions.list_definitions)


@workflow_app.command("run")
def workflow_run(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="Name of a workflow, or a file: YAML, JSON, app.py.")
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Option("--input", "-i", metavar="NAME=VALUE", help="An input; the value is JSON or text."),
    ] = None,
    show: ShowOption = "",
    version: Annotated[
        int, typer.Option("--version", min=0, help="Version of the definition (default: the latest).")
    ] = 0,
    key: Annotated[
        str, typer.Option("--key", metavar="TEXT", help="Idempotency key: starting it again returns the same run.")
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the inputs; show the order of steps and what the policy says.")
    ] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait", help="Wait until the run has ended; the exit status says how. A terminal shows each step."
        ),
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Start a run. A file is declared first."""
    from rota.cli.workflows import actions as workflows_actions

    follow = form is OutputFormat.TEXT and sys.stderr.isatty()
    values = tuple(inputs or ())
    args = workflows_actions.StartRunArgs(what, values, show, version, key, dry_run=dry_run, wait=wait, follow=follow)
    _print(context, form, lambda workflows: workflows_actions.start_run(workflows, args))


@workflow_app.command("list")
def workflow_list(
    context: typer.Context,
    show: Annotated[str, typer.Option("--show", metavar="NAME", help="Only runs of this show.")] = "",
    name: Annotated[str, typer.Option("--workflow", "-w", metavar="NAME", help="Only runs of this workflow.")] = "",
    state: Annotated[
        str, typer.Option("--state", metavar="STATE", help="Only runs in this state, such as RUNNING or FAILED.")
    ] = "",
    most: Annotated[int, typer.Option("--last", "-n", min=1, max=1000, help="Number of runs.")] = 50,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List runs, newest first."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.list_runs(workflows, show, name, state, most))


@workflow_app.command("show")
def workflow_show(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show a run with its steps, what it waits for, and its compensation."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.show_run(workflows, run))


@workflow_app.command("timeline")
def workflow_timeline(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show the events of a run, in order."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.show_timeline(workflows, run))


@workflow_app.command("cancel")
def workflow_cancel(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Cancel a run; it is compensated if its workflow says so."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.cancel_run(workflows, run))


@workflow_app.command("pause")
def workflow_pause(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Pause a run: no further step starts; running steps continue."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.pause_run(workflows, run))


@workflow_app.command("resume")
def workflow_resume(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Resume a paused run: further steps start again."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.resume_run(workflows, run))


@workflow_app.command("rerun")
def workflow_rerun(
    context: typer.Context,
    run: RunArg,
    step: Annotated[str, typer.Option("--from", metavar="STEP", help="The step to start from.")],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Start a new run from a step, with the results of earlier steps taken from an ended run."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.rerun_from_step(workflows, run, step))


@workflow_app.command("rollback")
def workflow_rollback(context: typer.Context, run: RunArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Compensate an ended run, or retry a compensation that failed."""
    from rota.cli.workflows import actions as workflows_actions

    _print(context, form, lambda workflows: workflows_actions.roll_back_run(workflows, run))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[WorkflowContext], Awaitable[CliPage]]) -> None:
    from rota.cli.workflows import actions as workflows_actions

    workflows_actions.run(load_settings(context, quietly=True).settings, work, form=form)
