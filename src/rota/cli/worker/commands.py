"""Typer command `rota worker`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rota.cli.core.options import load_settings
from rota.infra.extras import needs_extra


def worker(
    context: typer.Context,
    app: Annotated[
        str,
        typer.Argument(
            metavar="[APP]",
            help="App with the tasks: module:app or file.py; without it, the worker runs only commands.",
        ),
    ] = "",
    pool: Annotated[str | None, typer.Option(help="Pool of the worker.", show_default=False)] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent frames.", show_default=False)
    ] = None,
    cores: Annotated[
        str | None, typer.Option(help="Cores for frames (default: all of this machine).", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs for frames (default: all detected).", show_default=False)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory for frames, such as 16GiB (default: all).", show_default=False)
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the worker (default: host and process id).", show_default=False)
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label for placement; repeatable.", show_default=False)
    ] = None,
    capability: Annotated[
        list[str] | None, typer.Option(metavar="WORD", help="Capability for placement; repeatable.", show_default=False)
    ] = None,
    agents: Annotated[bool, typer.Option("--agents/--no-agents", help="Also run the agents of APP.")] = True,
) -> None:
    """Run frames of a pool, and the agents of APP, until Ctrl-C.

    The first signal lets frames finish, the second returns them to the queue immediately. Frames need NATS only: at
    nats.url, or that of the `rota up` in this directory. Agents also need PostgreSQL and Redis.
    """
    with needs_extra("worker", "`rota worker`"):
        from rota.cli.worker import process

    args = process.WorkerArgs(
        app=app,
        pool=pool,
        slots=slots,
        cores=cores,
        gpus=gpus,
        memory=memory,
        name=name,
        labels=tuple(label or ()),
        capabilities=tuple(capability or ()),
        agents=agents,
    )
    sys.exit(process.run(load_settings(context).settings, args))
