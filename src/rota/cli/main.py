"""The root command. Each command loads the settings, calls one function and prints its result."""

from __future__ import annotations

import io
import sys
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.cli.agents import commands as agents_commands
from rota.cli.approvals import commands as approvals_commands
from rota.cli.core import output, usage_errors
from rota.cli.core.exit_codes import ExitCode
from rota.cli.core.options import OutputOption, load_settings, run_async
from rota.cli.core.output_format import OutputFormat
from rota.cli.dlq import commands as dlq_commands
from rota.cli.events import commands as events_commands
from rota.cli.jobs import commands as jobs_commands
from rota.cli.keys import commands as keys_commands
from rota.cli.ledger import commands as ledger_commands
from rota.cli.outputs import commands as outputs_commands
from rota.cli.policy import commands as policy_commands
from rota.cli.pools import commands as pools_commands
from rota.cli.principals import commands as principals_commands
from rota.cli.queue import commands as queue_commands
from rota.cli.quota import cap_commands
from rota.cli.quota import commands as quota_commands
from rota.cli.worker import commands as worker_commands
from rota.cli.workflows import commands as workflows_commands
from rota.infra.extras import extra_missing, needs_extra
from rota.model.errors import RotaError

# No rich panels: they triple the time to the first line of help.
app = typer.Typer(
    help="A distributed job scheduler with exact quota accounting.",
    cls=usage_errors.RootGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Settings and their origin.", rich_markup_mode=None)
db_app = typer.Typer(help="The PostgreSQL schema.", no_args_is_help=True, rich_markup_mode=None)
audit_app = typer.Typer(help="The hash-chained audit log.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(audit_app, name="audit")
app.add_typer(quota_commands.show_app, name="show")
app.add_typer(quota_commands.pool_app, name="pool")
app.add_typer(quota_commands.sub_app, name="sub")
app.add_typer(cap_commands.folder_app, name="folder")
app.add_typer(cap_commands.dept_app, name="dept")
app.add_typer(cap_commands.job_app, name="job")
app.add_typer(cap_commands.layer_app, name="layer")
app.add_typer(ledger_commands.ledger_app, name="ledger")
app.add_typer(queue_commands.queue_app, name="queue")
app.add_typer(dlq_commands.dlq_app, name="dlq")
app.add_typer(outputs_commands.outputs_app, name="outputs")
app.add_typer(keys_commands.keys_app, name="keys")
app.add_typer(principals_commands.principals_app, name="principals")
app.add_typer(agents_commands.agents_app, name="agents")
app.add_typer(workflows_commands.workflow_app, name="workflow")
app.add_typer(policy_commands.policy_app, name="policy")
app.add_typer(approvals_commands.approvals_app, name="approvals")
app.command(cls=jobs_commands.SubmitCommand)(jobs_commands.submit)
app.command("jobs")(jobs_commands.jobs_list)
app.command()(jobs_commands.explain)
app.command()(events_commands.events)
app.command()(pools_commands.workers)
app.command()(worker_commands.worker)


class MigrationPhase(StrEnum):
    PRE = "pre"
    POST = "post"
    ALL = "all"


def main() -> None:
    """Run the command in `sys.argv`. An error prints one sentence to standard error; the exit status is not 0."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # never fail on a character that the terminal cannot encode
    try:
        sys.exit(root_command()(prog_name="rota", standalone_mode=False) or ExitCode.OK)
    except RotaError as error:
        sys.exit(output.print_error(error))
    except usage_errors.UsageError as error:
        if text := usage_errors.help_text(error):
            output.print_text(text)
            sys.exit(ExitCode.BAD_INPUT)
        sys.exit(output.print_error(usage_errors.to_invalid_input(error)))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(ExitCode.INTERRUPTED)
    except ModuleNotFoundError as error:
        sys.exit(output.print_error(extra_missing(error, "server", "This command")))
    except Exception as error:  # noqa: BLE001  last resort: users never see a traceback
        sys.exit(output.print_unexpected_error(error))


@cache
def root_command() -> Any:
    """The Click command tree of `app`, cached: building it takes longer than most commands run."""
    return typer.main.get_command(app)


@app.callback()
def _settings_file(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file (default: ./rota.yaml if it exists).", metavar="FILE")
    ] = None,
) -> None:
    context.obj = config


@app.command()
def up(
    context: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when ready; stop it with `rota down`.")
    ] = False,
    with_app: Annotated[
        str,
        typer.Option(
            "--app", metavar="APP", help="App with the worker's tasks: module:app or file.py.", show_default=False
        ),
    ] = "",
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Do not start a worker.")] = False,
) -> None:
    """Start Rota with a worker on this machine, and run until Ctrl-C."""
    with needs_extra("local", "`rota up`"):
        from rota.cli.local import up as local
        from rota.cli.local.embedded_worker import EmbeddedWorkerOptions
        from rota.infra import loop

    settings = load_settings(context, quietly=True).settings
    worker_options = None if no_worker else EmbeddedWorkerOptions(with_app, context.obj)
    if detach:
        sys.exit(local.up_detached(settings, context.obj, worker_options))
    sys.exit(loop.run(local.up(settings, worker_options)))


@app.command()
def down(context: typer.Context) -> None:
    """Stop the instance that `rota up` started in this data directory."""
    from rota.cli.local import up as local

    output.print_text(local.down(load_settings(context).settings))


@app.command()
def status(
    context: typer.Context,
    form: OutputOption = OutputFormat.TEXT,
    secrets: Annotated[bool, typer.Option("--secrets", help="Show passwords in URLs.")] = False,
) -> None:
    """Show whether Rota is up on this machine and whether each server answers. Exit status 1 when one does not."""
    from rota.cli.local import up as local

    found = run_async(local.status(load_settings(context).settings, with_secrets=secrets))
    output.print_data(found, form) if form.is_data else local.print_status(found)
    sys.exit(0 if found.ok else 1)


@app.command()
def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Refresh interval.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show shows with their quotas, pools, workers and jobs, live, until q or Ctrl-C."""
    from rota.cli.top import data as top_data

    top_data.show_top(load_settings(context, quietly=True).settings, every_s=every, once=once, form=form)


@app.command()
def doctor(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Check what Rota needs: servers, clocks, schema, accounting, disk. Exit status 1 when a check failed."""
    from rota.cli.doctor import checks as doctor_checks
    from rota.cli.doctor.view import Grade
    from rota.cli.quota.actions import print_page

    found = run_async(doctor_checks.run_checks(load_settings(context, quietly=True).settings))
    print_page(doctor_checks.checks_page(found), form=form)
    sys.exit(ExitCode.FAILED if any(check.grade is Grade.FAIL for check in found) else ExitCode.OK)


@app.command()
def demo() -> None:
    """Start a temporary stack, run a small workload while a server is killed, and exit."""
    with needs_extra("local", "`rota demo`"):
        from rota.demo import run as demo_run
        from rota.infra.telemetry import logs

    logs.configure("console", "critical")
    sys.exit(run_async(demo_run.run()))


@app.command()
def server(context: typer.Context) -> None:
    """Run one server replica with PostgreSQL, Redis and NATS at the configured URLs."""
    from rota import runtime
    from rota.infra import loop
    from rota.server import services

    settings = load_settings(context).settings
    sys.exit(loop.run(runtime.serve(settings, runtime.ServerUrls.from_settings(settings), services)))


@app.command()
def kernel(context: typer.Context) -> None:
    """Run the policy engine as a service for servers that are configured to use it."""
    from rota import runtime
    from rota.infra import loop
    from rota.policy.grpc import kernel_process

    settings = load_settings(context).settings
    target = runtime.redis_target(settings, None) if settings.redis.url else None
    sys.exit(loop.run(kernel_process.serve(settings, target)))


@config_app.callback(invoke_without_command=True)
def _config(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Without a command, the same as `rota config show`."""
    if context.invoked_subcommand is None:
        config_show(context, form)


@config_app.command("show")
def config_show(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show every setting, its value and its origin. Secrets are masked."""
    from rota.cli import config

    config.show(load_settings(context), form=form)


@db_app.command("migrate")
def db_migrate(
    context: typer.Context,
    phase: Annotated[
        MigrationPhase, typer.Option(help="pre: safe while the old version runs; post: after it has stopped; all.")
    ] = MigrationPhase.ALL,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be applied, and change nothing.")
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Migrate the schema to this version of Rota."""
    from rota.cli.db import commands as db_commands

    run_async(db_commands.migrate(load_settings(context).settings, phase=phase.value, dry_run=dry_run, form=form))


@db_app.command("status")
def db_status(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show which migrations are applied. Exit status 1 when some are missing."""
    from rota.cli.db import commands as db_commands

    sys.exit(run_async(db_commands.status(load_settings(context).settings, form=form)))


@audit_app.command("verify")
def audit_verify(
    context: typer.Context,
    expect: Annotated[
        str | None, typer.Option(help="A head recorded earlier; detects a truncated log.", metavar="SEQ:HASH")
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Verify the hash chain. Exit status 1 when an entry was changed, removed or added by hand."""
    from rota.cli.db import commands as db_commands

    sys.exit(run_async(db_commands.verify_audit(load_settings(context).settings, expect=expect, form=form)))
