"""The commands, and nothing else: each reads the settings, calls one function, and prints what it returns."""

from __future__ import annotations

import asyncio
import io
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rota.cli import (
    books_app,
    books_caps_app,
    dlq_app,
    jobs_app,
    keys_app,
    ledger_app,
    output,
    pools_app,
    queue_app,
    worker_app,
)
from rota.cli.options import Json, load
from rota.infra import loop
from rota.model.errors import RotaError

# Plain help: rich's panels triple the time until the first line.
app = typer.Typer(
    help="A distributed job scheduler that keeps exact books.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="What is set, and where it was set.", no_args_is_help=True, rich_markup_mode=None)
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
app.add_typer(keys_app.keys_app, name="keys")
app.command(cls=jobs_app.TaskOrCommand)(jobs_app.submit)
app.command("jobs")(jobs_app.jobs_list)
app.command()(jobs_app.explain)
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
        app()
    except RotaError as error:
        sys.exit(output.refusal(error))
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # noqa: BLE001  the last net: nobody should ever see a traceback
        sys.exit(output.defect(error))


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
    json: Json = False,
    secrets: Annotated[bool, typer.Option("--secrets", help="Show URLs with their passwords.")] = False,
) -> None:
    """Whether Rota is up here, and how each server answers. Exit status 1 when something does not."""
    from rota.cli import local

    found = asyncio.run(local.status(load(context).settings, with_secrets=secrets))
    output.as_json(found) if json else local.print_status(found)
    sys.exit(0 if found.ok else 1)


@app.command()
def demo() -> None:
    """Start a stack of its own, run a small workload through it with a server killed on the way, and leave."""
    from rota.cli import demo as tour
    from rota.infra.telemetry import logs

    logs.configure("console", "critical")
    sys.exit(asyncio.run(tour.run()))


@app.command()
def server(context: typer.Context) -> None:
    """Run one replica against PostgreSQL, Redis and NATS by URL."""
    from rota import runtime
    from rota.server import services

    settings = load(context).settings
    sys.exit(loop.run(runtime.serve(settings, runtime.Urls.of(settings), services)))


@config_app.command("show")
def config_show(context: typer.Context, json: Json = False) -> None:
    """Every setting, its value and where the value came from. Secrets are masked."""
    from rota.cli import config

    config.show(load(context), as_json=json)


@db_app.command("migrate")
def db_migrate(
    context: typer.Context,
    phase: Annotated[
        Phase, typer.Option(help="pre: safe while the old version runs; post: once it is gone; all.")
    ] = Phase.ALL,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be applied.")] = False,
    json: Json = False,
) -> None:
    """Bring the schema to this version of Rota."""
    from rota.cli import db

    asyncio.run(db.migrate(load(context).settings, phase=phase.value, dry_run=dry_run, as_json=json))


@db_app.command("status")
def db_status(context: typer.Context, json: Json = False) -> None:
    """Which migrations are applied. Exit status 1 when some are missing."""
    from rota.cli import db

    sys.exit(asyncio.run(db.status(load(context).settings, as_json=json)))


@audit_app.command("verify")
def audit_verify(
    context: typer.Context,
    expect: Annotated[
        str | None, typer.Option(help="A head noted earlier; finds a log that was cut.", metavar="SEQ:HASH")
    ] = None,
    json: Json = False,
) -> None:
    """Recompute the chain. Exit status 1 when an entry was changed, removed or added by hand."""
    from rota.cli import db

    sys.exit(asyncio.run(db.verify_audit(load(context).settings, expect=expect, as_json=json)))
