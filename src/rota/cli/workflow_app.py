"""`rota workflow`: definitions, and runs of them."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.books_options import group
from rota.cli.form import Form
from rota.cli.options import Output, load

if TYPE_CHECKING:
    from rota.cli.books_view import Page
    from rota.cli.workflow import Office

workflow_app = group("Workflows: steps that depend on each other, and what undoes them.")
Run = Annotated[str, typer.Argument(metavar="RUN", help="Its id, or the beginning of it.", show_default=False)]
Show = Annotated[str, typer.Option("--show", metavar="NAME", help="The show of the workflow; default if left out.")]
File = Annotated[
    str, typer.Argument(metavar="FILE", help="YAML, JSON, or Python: app.py, app.py:workflow.", show_default=False)
]


@workflow_app.command("validate")
def workflow_validate(context: typer.Context, file: File, form: Output = Form.TEXT) -> None:
    """Check a definition, and show in which order its steps may run. Nothing is changed."""
    from rota.cli import workflow
    from rota.cli.books import print_page

    load(context, quietly=True)
    print_page(workflow.validated(file), form=form)


@workflow_app.command("declare")
def workflow_declare(context: typer.Context, file: File, form: Output = Form.TEXT) -> None:
    """Make a definition known; one that differs from the latest is a new version. Runs keep theirs."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.declared(office, file))


@workflow_app.command("definitions")
def workflow_definitions(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Every workflow in its latest version."""
    from rota.cli import workflow

    _print(context, form, workflow.definitions)


@workflow_app.command("run")
def workflow_run(
    context: typer.Context,
    what: Annotated[
        str, typer.Argument(metavar="NAME|FILE", help="A workflow by name, or a file: YAML, JSON, app.py.")
    ],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", "-i", metavar="NAME=VALUE", help="A value is JSON, or text.")
    ] = None,
    show: Show = "",
    version: Annotated[int, typer.Option("--version", min=0, help="Of the definition; the latest if left out.")] = 0,
    key: Annotated[str, typer.Option("--key", metavar="TEXT", help="Two runs of one key are one run.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only check the inputs and show the order.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until it has ended; the exit status says how, and a terminal each step.")
    ] = False,
    form: Output = Form.TEXT,
) -> None:
    """Start a run. A file is declared first."""
    from rota.cli import workflow

    follow = form is Form.TEXT and sys.stderr.isatty()
    given = tuple(inputs or ())
    wanted = workflow.Wanted(what, given, show, version, key, dry_run=dry_run, wait=wait, follow=follow)
    _print(context, form, lambda office: workflow.started(office, wanted))


@workflow_app.command("list")
def workflow_list(
    context: typer.Context,
    show: Annotated[str, typer.Option("--show", metavar="NAME", help="Of this show alone.")] = "",
    name: Annotated[str, typer.Option("--workflow", "-w", metavar="NAME", help="Of this workflow alone.")] = "",
    state: Annotated[str, typer.Option("--state", metavar="STATE", help="Such as RUNNING or FAILED.")] = "",
    most: Annotated[int, typer.Option("--last", "-n", min=1, max=1000, help="How many runs.")] = 50,
    form: Output = Form.TEXT,
) -> None:
    """Runs, the newest first."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.listed(office, show, name, state, most))


@workflow_app.command("show")
def workflow_show(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """A run with its steps: what each does or waits for, and what is to be undone."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.shown(office, run))


@workflow_app.command("timeline")
def workflow_timeline(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """Everything that happened to a run, in order."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.timeline(office, run))


@workflow_app.command("cancel")
def workflow_cancel(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """Stop what a run does; what it did is undone if its workflow says so."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.cancelled(office, run))


@workflow_app.command("pause")
def workflow_pause(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """Let no further step begin; those under way go on."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.paused(office, run))


@workflow_app.command("resume")
def workflow_resume(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """Let steps begin again."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.resumed(office, run))


@workflow_app.command("rerun")
def workflow_rerun(
    context: typer.Context,
    run: Run,
    step: Annotated[str, typer.Option("--from", metavar="STEP", help="The step to begin with.")],
    form: Output = Form.TEXT,
) -> None:
    """A new run from a step on, with what came before taken over from one that has ended."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.rerun(office, run, step))


@workflow_app.command("rollback")
def workflow_rollback(context: typer.Context, run: Run, form: Output = Form.TEXT) -> None:
    """Undo what a run did that has ended, or what could not be undone before."""
    from rota.cli import workflow

    _print(context, form, lambda office: workflow.rolled_back(office, run))


def _print(context: typer.Context, form: Form, work: Callable[[Office], Awaitable[Page]]) -> None:
    from rota.cli import workflow

    workflow.run(load(context, quietly=True).settings, work, form=form)
