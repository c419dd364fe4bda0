"""Typer commands of `rota agents`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated

import typer

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import command_group
from rota.model.errors import InvalidInput

if TYPE_CHECKING:
    from rota.agents.admin import AgentAdmin
    from rota.cli.core.tables import CliPage

agents_app = command_group("Recurring agents: when they run, where, and what came of it.")
AgentNameArg = Annotated[str, typer.Argument(metavar="NAME", help="Its name.", show_default=False)]


@agents_app.command("list")
def agents_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Every agent, what it does now and when it is due."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, agents_actions.list_agents)


@agents_app.command("show")
def agents_show(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """All there is to know of one agent."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.show_agent(admin, name))


@agents_app.command("pause")
def agents_pause(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Let no further run begin; one that is under way ends by itself."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.pause_agent(admin, name))


@agents_app.command("resume")
def agents_resume(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Let it run again. What it missed is caught up as it was declared to."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.resume_agent(admin, name))


@agents_app.command("trigger")
def agents_trigger(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Run it now, or once more after the run that is under way."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.trigger_agent(admin, name))


@agents_app.command("backfill")
def agents_backfill(
    context: typer.Context,
    name: AgentNameArg,
    since: Annotated[
        str, typer.Option("--from", metavar="TIME", help="The first moment, such as 2026-01-31T00:00Z.")
    ] = "",
    until: Annotated[
        str, typer.Option("--to", metavar="TIME", help="The moment to stop before; now if left out.")
    ] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Begin no more runs of the one under way.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Run it for past moments of its schedule, one by one, in between those that come."""
    from rota.cli.agents import actions as agents_actions

    if stop == bool(since):
        raise InvalidInput("Say --from TIME to begin a backfill, or --stop to end it.")
    _print(
        context,
        form,
        lambda admin: (
            agents_actions.stop_backfill(admin, name)
            if stop
            else agents_actions.backfill_agent(admin, name, since, until)
        ),
    )


@agents_app.command("history")
def agents_history(
    context: typer.Context,
    name: AgentNameArg,
    most: Annotated[int, typer.Option("--last", "-n", min=1, max=50, help="How many runs.")] = 20,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Its last runs, the latest first, with duration and error."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.agent_history(admin, name, most))


@agents_app.command("remove")
def agents_remove(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Forget an agent that no app declares any more, and its history."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.remove_agent(admin, name))


@agents_app.command("health")
def agents_health(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Whether agents run on time, who runs them, and what is wrong. Exit status 1 when something is."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, agents_actions.agents_health)


def _print(context: typer.Context, form: OutputFormat, work: Callable[[AgentAdmin], Awaitable[CliPage]]) -> None:
    from rota.cli.agents import actions as agents_actions

    agents_actions.run(load_settings(context, quietly=True).settings, work, form=form)
