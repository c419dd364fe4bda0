"""`rota policy`: whether a file is a policy, what it says, and what it would change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rota.cli.books_options import group
from rota.cli.exits import Exit
from rota.cli.form import Form
from rota.cli.options import Output, load, run
from rota.model.errors import InvalidInput

policy_app = group("The policy: check, test, simulate, explain and reload it.")
File = Annotated[Path, typer.Argument(metavar="FILE", help="A policy file.", show_default=False)]


@policy_app.command("check")
def policy_check(file: File, form: Output = Form.TEXT) -> None:
    """Whether a file is a policy; what is wrong is told with its line, and exit status 2."""
    from rota.cli import policy
    from rota.cli.books import print_page

    print_page(policy.checked(file), form=form)


@policy_app.command("test")
def policy_test(
    file: File,
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cases; FILE.cases.yaml beside policy FILE.yaml if left out."),
    ] = None,
    form: Output = Form.TEXT,
) -> None:
    """Whether a policy says of each case what is expected. Exit status 1 when it does not."""
    from rota.cli import policy
    from rota.cli.books import print_page

    page, is_good = policy.tested(file, cases)
    print_page(page, form=form)
    sys.exit(Exit.OK if is_good else Exit.FAILED)


@policy_app.command("simulate")
def policy_simulate(
    context: typer.Context,
    file: File,
    hours: Annotated[float, typer.Option(metavar="N", help="How many hours to look back.")] = 24.0,
    limit: Annotated[int, typer.Option(metavar="N", help="Jobs at most, the newest first.", min=1)] = 10_000,
    form: Output = Form.TEXT,
) -> None:
    """Of which jobs of the last hours a policy would have said something else. Changes nothing."""
    from rota.cli import policy
    from rota.cli.books import print_page

    settings = load(context, quietly=True).settings
    print_page(run(policy.simulated(settings, file, hours, limit)), form=form)


@policy_app.command("explain")
def policy_explain(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="[JOB]", help="Its id, the beginning of it, or its name.", show_default=False)
    ] = "",
    submission: Annotated[
        Path | None, typer.Option("--submission", "-s", metavar="FILE", help="A submission, as YAML or JSON.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Another policy than the one that is set.")
    ] = None,
    form: Output = Form.TEXT,
) -> None:
    """Which rules are for a job or a submission, and which of them decides."""
    from rota.cli import policy
    from rota.cli.books import print_page

    if bool(job) == (submission is not None):
        raise InvalidInput("Name a job, or a submission with --submission FILE.")
    settings = load(context, quietly=True).settings
    print_page(run(policy.explained(settings, job, submission, file)), form=form)


@policy_app.command("reload")
def policy_reload(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Have the policy file read anew now, by the kernel or by every server. A file that is wrong changes nothing."""
    from rota.cli import policy
    from rota.cli.books import print_page

    print_page(run(policy.reloaded(load(context, quietly=True).settings)), form=form)
