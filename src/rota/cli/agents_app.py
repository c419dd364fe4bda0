"""`rota agents`: recurring work, and what can be done with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.books_options import group
from rota.cli.form import Form
from rota.cli.options import Output, load
from rota.model.errors import InvalidInput

if TYPE_CHECKING:
    from rota.agents.admin import Admin
    from rota.cli.books_view import Page

agents_app = group("Recurring agents: when they run, where, and what came of it.")
Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)]


@agents_app.command("list")
def agents_list(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Every agent, what it does now and when it is due."""
    from rota.cli import agents

    _print(context, form, agents.listed)


@agents_app.command("show")
def agents_show(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """All there is to know of one agent."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.shown(admin, name))


@agents_app.command("pause")
def agents_pause(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """Let no further run begin; one that is under way ends by itself."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.paused(admin, name))


@agents_app.command("resume")
def agents_resume(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """Let it run again. What it missed is caught up as it was declared to."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.resumed(admin, name))


@agents_app.command("trigger")
def agents_trigger(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """Run it now, or once more after the run that is under way."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.triggered(admin, name))


@agents_app.command("backfill")
def agents_backfill(
    context: typer.Context,
    name: Name,
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="The first moment, such as 2026-01-31T00:00Z.")
    ] = "",
    until: Annotated[
        str, typer.Option("--to", metavar="TIME", help="The moment to stop before; now if left out.")
    ] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Begin no more runs of the one under way.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Run it for past moments of its schedule, one by one, in between those that come."""
    from rota.cli import agents

    if stop == bool(since):
        raise InvalidInput("Say --from TIME to begin a backfill, or --stop to end it.")
    _print(
        context,
        form,
        lambda admin: agents.backfill_stopped(admin, name) if stop else agents.backfilled(admin, name, since, until),
    )


@agents_app.command("history")
def agents_history(
    context: typer.Context,
    name: Name,
    most: Annotated[int, typer.Option("--last", "-n", min=1, max=50, help="How many runs.")] = 20,
    form: Output = Form.TEXT,
) -> None:
    """Its last runs, the latest first, with duration and error."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.history(admin, name, most))


@agents_app.command("remove")
def agents_remove(context: typer.Context, name: Name, form: Output = Form.TEXT) -> None:
    """Forget an agent that no app declares any more, and its history."""
    from rota.cli import agents

    _print(context, form, lambda admin: agents.removed(admin, name))


@agents_app.command("health")
def agents_health(context: typer.Context, form: Output = Form.TEXT) -> None:
    """Whether agents run on time, who runs them, and what is wrong. Exit status 1 when something is."""
    from rota.cli import agents

    _print(context, form, agents.health)


def _print(context: typer.Context, form: Form, work: Callable[[Admin], Awaitable[Page]]) -> None:
    from rota.cli import agents

    agents.run(load(context, quietly=True).settings, work, form=form)
