"""Typer commands of `rota policy`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from rota.cli.core.exit_codes import ExitCode
from rota.cli.core.options import OutputOption, load_settings, run_async
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group
from rota.model.errors import InvalidInput

policy_app = command_group("The policy: check, test, simulate, explain and reload it.")
PolicyFileArg = Annotated[Path, typer.Argument(metavar="FILE", help="A policy file.", show_default=False)]


@policy_app.command("check")
def policy_check(file: PolicyFileArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Whether a file is a policy; what is wrong is told with its line, and exit status 2."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    print_page(policy_actions.check_policy_file(file), form=form)


@policy_app.command("test")
def policy_test(
    file: PolicyFileArg,
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Cases; FILE.cases.yaml beside policy FILE.yaml if left out."),
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Whether a policy says of each case what is expected. Exit status 1 when it does not."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    page, passed = policy_actions.run_policy_cases(file, cases)
    print_page(page, form=form)
    sys.exit(ExitCode.OK if passed else ExitCode.FAILED)


@policy_app.command("simulate")
def policy_simulate(
    context: typer.Context,
    file: PolicyFileArg,
    hours: Annotated[float, typer.Option(metavar="N", help="How many hours to look back.")] = 24.0,
    limit: Annotated[int, typer.Option(metavar="N", help="Jobs at most, the newest first.", min=1)] = 10_000,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Of which jobs of the last hours a policy would have said something else. Changes nothing."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    settings = load_settings(context, quietly=True).settings
    print_page(run_async(policy_actions.simulate_policy(settings, file, hours, limit)), form=form)


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
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Which rules are for a job or a submission, and which of them decides."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    if bool(job) == (submission is not None):
        raise InvalidInput("Name a job, or a submission with --submission FILE.")
    settings = load_settings(context, quietly=True).settings
    print_page(run_async(policy_actions.explain_policy(settings, job, submission, file)), form=form)


@policy_app.command("reload")
def policy_reload(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Have the policy file read anew now, by the kernel or by every server. A file that is wrong changes nothing."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    print_page(run_async(policy_actions.reload_policy(load_settings(context, quietly=True).settings)), form=form)
