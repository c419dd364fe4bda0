"""The commands, and nothing else: each reads the settings, calls one function, and prints what it returns."""

from __future__ import annotations

import io
import sys
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from rota.cli import (
    agents_app,
    approvals_app,
    books_app,
    books_caps_app,
    dlq_app,
    events_app,
    jobs_app,
    keys_app,
    ledger_app,
    output,
    outputs_app,
    policy_app,
    pools_app,
    queue_app,
    usage,
    worker_app,
    workflow_app,
)
from rota.cli.exits import Exit
from rota.cli.form import Form
from rota.cli.options import Output, load, run
from rota.model.errors import RotaError

# Plain help: rich's panels triple the time until the first line.
app = typer.Typer(
    help="A distributed job scheduler that keeps exact books.",
    cls=usage.Root,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="What is set, and where it was set.", rich_markup_mode=None)
db_app = typer.Typer(help="The schema in PostgreSQL.", no_args_is_help=True, rich_markup_mode=None)
audit_app = typer.Typer(help="The hash-chained audit log.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(db_app, name="db")
app.add_typer(audit_app, name="audit")
app.add_typer(books_app.show_app, name="show")
app.add_typer(books_app.pool_app, name="pool")
app.add_typer(books_app.sub_app, name="sub")
app.add_typer(books_caps_app.folder_app, name="folder")
app.add_typer(books_caps_app.dept_app, name="dept")
app.add_typer(books_caps_app.job_app, name="job")
app.add_typer(books_caps_app.layer_app, name="layer")
app.add_typer(ledger_app.ledger_app, name="ledger")
app.add_typer(queue_app.queue_app, name="queue")
app.add_typer(dlq_app.dlq_app, name="dlq")
app.add_typer(outputs_app.outputs_app, name="outputs")
app.add_typer(keys_app.keys_app, name="keys")
app.add_typer(agents_app.agents_app, name="agents")
app.add_typer(workflow_app.workflow_app, name="workflow")
app.add_typer(policy_app.policy_app, name="policy")
app.add_typer(approvals_app.approvals_app, name="approvals")
app.command(cls=jobs_app.TaskOrCommand)(jobs_app.submit)
app.command("jobs")(jobs_app.jobs_list)
app.command()(jobs_app.explain)
app.command()(events_app.events)
app.command()(pools_app.workers)
app.command()(worker_app.worker)


class Phase(StrEnum):
    PRE = "pre"
    POST = "post"
    ALL = "all"


def main() -> None:
    """Run the command of `sys.argv`; an error is one sentence on standard error and a status that is not 0."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a mark still gets the sentence
    try:
        sys.exit(command()(prog_name="rota", standalone_mode=False) or Exit.OK)
    except RotaError as error:
        sys.exit(output.refusal(error))
    except usage.UsageError as error:
        if text := usage.help_of(error):
            output.say(text)
            sys.exit(Exit.BAD_INPUT)
        sys.exit(output.refusal(usage.refused(error)))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(Exit.INTERRUPTED)
    except Exception as error:  # noqa: BLE001  the last net: nobody should ever see a traceback
        sys.exit(output.defect(error))


@cache
def command() -> Any:
    """What `app` declares, which takes longer to make than most commands to run."""
    return typer.main.get_command(app)


@app.callback()
def _settings_file(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option(help="Settings file; ./rota.yaml when there is one.", metavar="FILE")
    ] = None,
) -> None:
    context.obj = config


@app.command()
def up(
    context: typer.Context,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Return when it is ready; stop with `rota down`.")
    ] = False,
    with_app: Annotated[
        str,
        typer.Option("--app", metavar="APP", help="Tasks of its worker: module:app or file.py.", show_default=False),
    ] = "",
    no_worker: Annotated[bool, typer.Option("--no-worker", help="Start no worker beside the server.")] = False,
) -> None:
    """Start everything on this machine, a worker too, and stay up until Ctrl-C."""
    from rota.cli import local
    from rota.cli.local_worker import Beside
    from rota.infra import loop

    settings = load(context, quietly=True).settings
    beside = None if no_worker else Beside(with_app, context.obj)
    if detach:
        sys.exit(local.up_detached(settings, context.obj, beside))
    sys.exit(loop.run(local.up(settings, beside)))


@app.command()
def down(context: typer.Context) -> None:
    """Stop what `rota up` started in this data directory."""
    from rota.cli import local

    output.say(local.down(load(context).settings))


@app.command()
def status(
    context: typer.Context,
    form: Output = Form.TEXT,
    secrets: Annotated[bool, typer.Option("--secrets", help="Show URLs with their passwords.")] = False,
) -> None:
    """Whether Rota is up here, and how each server answers. Exit status 1 when something does not."""
    from rota.cli import local

    found = run(local.status(load(context).settings, with_secrets=secrets))
    output.as_data(found, form) if form.is_data else local.print_status(found)
    sys.exit(0 if found.ok else 1)


@app.command()
def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(metavar="SECONDS", help="Time between two looks.", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and leave.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Shows with their quotas, pools, workers and jobs, live, until q or Ctrl-C."""
    from rota.cli import top as looking

    looking.show(load(context, quietly=True).settings, every_s=every, once=once, form=form)


@app.command()
def doctor(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Look at everything Rota needs: servers, clocks, schema, books, disk. Exit status 1 when a check failed."""
    from rota.cli import doctor as examining
    from rota.cli.books import print_page
    from rota.cli.doctor_told import Grade

    found = run(examining.examine(load(context, quietly=True).settings))
    print_page(examining.page(found), form=form)
    sys.exit(Exit.FAILED if any(check.grade is Grade.FAIL for check in found) else Exit.OK)


@app.command()
def demo() -> None:
    """Start a stack of its own, run a small workload through it with a server killed on the way, and leave."""
    from rota.cli import demo as tour
    from rota.infra.telemetry import logs

    logs.configure("console", "critical")
    sys.exit(run(tour.run()))


@app.command()
def server(context: typer.Context) -> None:
    """Run one replica against PostgreSQL, Redis and NATS by URL."""
    from rota import runtime
    from rota.infra import loop
    from rota.server import services

    settings = load(context).settings
    sys.exit(loop.run(runtime.serve(settings, runtime.Urls.of(settings), services)))


@app.command()
def kernel(context: typer.Context) -> None:
    """Decide by the policy file for servers that are set to ask here."""
    from rota import runtime
    from rota.infra import loop
    from rota.policy import process

    settings = load(context).settings
    target = runtime.redis_target(settings, None) if settings.redis.url else None
    sys.exit(loop.run(process.serve(settings, target)))


@config_app.callback(invoke_without_command=True)
def _config(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Without more words, the same as `rota config show`."""
    if context.invoked_subcommand is None:
        config_show(context, form)


@config_app.command("show")
def config_show(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Every setting, its value and where the value came from. Secrets are masked."""
    from rota.cli import config

    config.show(load(context), form=form)


@db_app.command("migrate")
def db_migrate(
    context: typer.Context,
    phase: Annotated[
        Phase, typer.Option(help="pre: safe while the old version runs; post: once it is gone; all.")
    ] = Phase.ALL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be applied.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Bring the schema to this version of Rota."""
    from rota.cli import db

    run(db.migrate(load(context).settings, phase=phase.value, dry_run=dry_run, form=form))


@db_app.command("status")
def db_status(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Which migrations are applied. Exit status 1 when some are missing."""
    from rota.cli import db

    sys.exit(run(db.status(load(context).settings, form=form)))


@audit_app.command("verify")
def audit_verify(
    context: typer.Context,
    expect: Annotated[
        str | None, typer.Option(help="A head noted earlier; finds a log that was cut.", metavar="SEQ:HASH")
    ] = None,
    form: Output = Form.TEXT,
) -> None:
    """Recompute the chain. Exit status 1 when an entry was changed, removed or added by hand."""
    from rota.cli import db

    sys.exit(run(db.verify_audit(load(context).settings, expect=expect, form=form)))
