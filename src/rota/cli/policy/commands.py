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
    """Check a policy file. Errors are printed with their line, with exit status 2."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    print_page(policy_actions.check_policy_file(file), form=form)


@policy_app.command("test")
def policy_test(
    file: PolicyFileArg,
    cases: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Test cases (default: FILE.cases.yaml next to FILE.yaml)."),
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Run the test cases of a policy. Exit status 1 when one fails."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    page, passed = policy_actions.run_policy_cases(file, cases)
    print_page(page, form=form)
    sys.exit(ExitCode.OK if passed else ExitCode.FAILED)


@policy_app.command("simulate")
def policy_simulate(
    context: typer.Context,
    file: PolicyFileArg,
    hours: Annotated[float, typer.Option(metavar="N", help="Time window in hours.")] = 24.0,
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number of jobs, newest first.", min=1)] = 10_000,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List recent jobs for which a policy would have decided differently. Changes nothing."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    settings = load_settings(context, quietly=True).settings
    print_page(run_async(policy_actions.simulate_policy(settings, file, hours, limit)), form=form)


@policy_app.command("explain")
def policy_explain(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="[JOB]", help="Job id, id prefix, or name.", show_default=False)] = "",
    submission: Annotated[
        Path | None, typer.Option("--submission", "-s", metavar="FILE", help="A submission file, as YAML or JSON.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--policy", metavar="FILE", help="Policy file (default: the configured policy).")
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show which rules match a job or a submission, and which of them decides."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    if bool(job) == (submission is not None):
        raise InvalidInput("Exactly one of JOB and --submission is required: name a job, or use --submission FILE.")
    settings = load_settings(context, quietly=True).settings
    print_page(run_async(policy_actions.explain_policy(settings, job, submission, file)), form=form)


@policy_app.command("reload")
def policy_reload(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Reload the policy file, in the kernel or in every server. An invalid file changes nothing."""
    from rota.cli.policy import actions as policy_actions
    from rota.cli.quota.actions import print_page

    print_page(run_async(policy_actions.reload_policy(load_settings(context, quietly=True).settings)), form=form)
