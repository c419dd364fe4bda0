"""`rota pool topics|map|unmap|drain|activate` and `rota workers`: where frames may run, and who runs them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.books_app import pool_app
from rota.cli.books_options import Name
from rota.cli.form import Form
from rota.cli.options import Output, load

if TYPE_CHECKING:
    from rota.cli.books_view import Page
    from rota.placement.routing import Routing

Topic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="A topic, or several by a glob such as 'render.*'.", show_default=False)
]


@pool_app.command("topics")
def pool_topics(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Which pools run which topic, in order, and whether each takes frames now."""
    from rota.cli import pools

    _print(context, form, pools.topics)


@pool_app.command("map")
def pool_map(
    context: typer.Context,
    topic: Topic,
    pools: Annotated[
        list[str], typer.Argument(metavar="POOL...", help="A later one when those before are full.", show_default=False)
    ],
    form: Output = Form.TEXT,
) -> None:
    """Say which pools run a topic. While no topic is mapped at all, the pool local runs everything."""
    from rota.cli import pools as routes

    _print(context, form, lambda routing: routes.mapped(routing, topic, pools))


@pool_app.command("unmap")
def pool_unmap(context: typer.Context, topic: Topic, form: Output = Form.TEXT) -> None:
    """Take the mapping of a topic away: its jobs follow the next best glob, or fail."""
    from rota.cli import pools

    _print(context, form, lambda routing: pools.unmapped(routing, topic))


@pool_app.command("drain")
def pool_drain(
    context: typer.Context,
    name: Name,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="It counts as inactive after that.")] = "5min",
    form: Output = Form.TEXT,
) -> None:
    """Give a pool nothing new; what runs there ends."""
    from rota.cli import pools

    _print(context, form, lambda routing: pools.drained(routing, name, timeout))


@pool_app.command("activate")
def pool_activate(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """Let a pool take frames again."""
    from rota.cli import pools

    _print(context, form, lambda routing: pools.activated(routing, name))


def workers(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKER", help="These alone: names, ids or beginnings of ids.", show_default=False),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Also those that are gone or were lost.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Who is up, what each has, and what is booked there."""
    from rota.cli import workers as working

    _print(context, form, lambda routing: working.listed(routing.database, names or (), everyone=everyone))


def _print(context: typer.Context, form: Form, work: Callable[[Routing], Awaitable[Page]]) -> None:
    from rota.cli import pools

    pools.run(load(context, quietly=True).settings, work, form=form)
