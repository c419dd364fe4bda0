"""Typer command `rota worker`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rota.cli.core.options import load_settings


def worker(
    context: typer.Context,
    app: Annotated[
        str, typer.Argument(metavar="[APP]", help="Its tasks: module:app or file.py; without it only commands run.")
    ] = "",
    pool: Annotated[str | None, typer.Option(help="Pool it works for.", show_default=False)] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Frames at a time at most.", show_default=False)] = None,
    cores: Annotated[
        str | None, typer.Option(help="Cores that frames may use; all of this machine.", show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=0, help="GPUs that frames may use; all that are found.", show_default=False)
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="Memory that frames may use, such as 16GiB; all.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Option(help="Its name; host and process.", show_default=False)] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="For placement; repeat it.", show_default=False)
    ] = None,
    capability: Annotated[
        list[str] | None, typer.Option(metavar="WORD", help="What it can do; repeat it.", show_default=False)
    ] = None,
    agents: Annotated[bool, typer.Option("--agents/--no-agents", help="Also run the agents of APP.")] = True,
) -> None:
    """Run frames of a pool, and the agents of APP, until Ctrl-C.

    The first signal lets frames finish, the second gives them back at once. For frames only NATS is spoken to: the one
    of nats.url, or of the `rota up` in this directory. Agents need PostgreSQL and Redis, too.
    """
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
