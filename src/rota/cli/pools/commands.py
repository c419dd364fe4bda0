"""Typer commands `rota pool topics|map|unmap|set|drain|activate` and `rota workers`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.api.resources import PlacementName
from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.commands import pool_app
from rota.cli.quota.options import Name

if TYPE_CHECKING:
    from rota.cli.core.tables import CliPage
    from rota.placement.route_store import RouteStore


TopicArg = Annotated[
    str, typer.Argument(metavar="TOPIC", help="A topic, or a glob such as 'render.*'.", show_default=False)
]


@pool_app.command("topics")
def pool_topics(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List topics with their pools, in order, and the status of each pool."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, pools_actions.list_topics)


@pool_app.command("map")
def pool_map(
    context: typer.Context,
    topic: TopicArg,
    pools: Annotated[
        list[str],
        typer.Argument(
            metavar="POOL...",
            help="Pools in order; a later one is used when those before are full.",
            show_default=False,
        ),
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Map a topic to pools. While no topic is mapped at all, the pool local runs everything."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, lambda routing: pools_actions.map_topic(routing, topic, pools))


@pool_app.command("unmap")
def pool_unmap(context: typer.Context, topic: TopicArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Remove the mapping of a topic: its jobs follow the next matching glob, or fail."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, lambda routing: pools_actions.unmap_topic(routing, topic))


@pool_app.command("set")
def pool_set(
    context: typer.Context,
    name: Name,
    placement: Annotated[
        PlacementName,
        typer.Option(
            help="Which worker with room gets a frame: fit (used least, by its scarcest resource), spread (fewest"
            " frames) or pack (used most, so that others stay empty).",
            show_default=False,
        ),
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Choose how the workers of a pool are filled."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, lambda routing: pools_actions.set_placement(routing, name, placement))


@pool_app.command("drain")
def pool_drain(
    context: typer.Context,
    name: Name,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="Time until the pool is inactive.")] = "5min",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Give a pool no new frames; running frames finish."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, lambda routing: pools_actions.drain_pool(routing, name, timeout))


@pool_app.command("activate")
def pool_activate(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Let a pool accept frames again."""
    from rota.cli.pools import actions as pools_actions

    _print(context, form, lambda routing: pools_actions.activate_pool(routing, name))


def workers(
    context: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="WORKER", help="Only these workers: names, ids or id prefixes.", show_default=False),
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Also stopped and lost workers.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List workers with their resources and bookings."""
    from rota.cli.pools import workers as pool_workers

    _print(context, form, lambda routing: pool_workers.list_workers(routing.database, names or (), everyone=everyone))


def _print(context: typer.Context, form: OutputFormat, work: Callable[[RouteStore], Awaitable[CliPage]]) -> None:
    from rota.cli.pools import actions as pools_actions

    pools_actions.run(load_settings(context, quietly=True).settings, work, form=form)
