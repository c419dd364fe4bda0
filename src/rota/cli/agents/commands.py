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

agents_app = command_group("Recurring agents: schedules, runs and results.")
AgentNameArg = Annotated[str, typer.Argument(metavar="NAME", help="Name of the agent.", show_default=False)]


@agents_app.command("list")
def agents_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List agents with their state and next due time."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, agents_actions.list_agents)


@agents_app.command("show")
def agents_show(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show one agent with its schedule and last run."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.show_agent(admin, name))


@agents_app.command("pause")
def agents_pause(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Pause an agent; a current run continues to its end."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.pause_agent(admin, name))


@agents_app.command("resume")
def agents_resume(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Resume an agent. It catches up on missed runs as declared."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.resume_agent(admin, name))


@agents_app.command("trigger")
def agents_trigger(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Run an agent now, or once more after the current run."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.trigger_agent(admin, name))


@agents_app.command("backfill")
def agents_backfill(
    context: typer.Context,
    name: AgentNameArg,
    since: Annotated[str, typer.Option("--from", metavar="TIME", help="Start, such as 2026-01-31T00:00Z.")] = "",
    until: Annotated[str, typer.Option("--to", metavar="TIME", help="End, exclusive (default: now).")] = "",
    stop: Annotated[bool, typer.Option("--stop", help="Start no more runs of the current backfill.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Run an agent for past due times, one after the other, between its regular runs."""
    from rota.cli.agents import actions as agents_actions

    if stop == bool(since):
        raise InvalidInput(
            "Exactly one of --from and --stop is required: use --from TIME to start a backfill, or --stop to end it."
        )
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
    most: Annotated[int, typer.Option("--last", "-n", min=1, max=50, help="Number of runs.")] = 20,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List the latest runs of an agent, newest first, with duration and error."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.agent_history(admin, name, most))


@agents_app.command("remove")
def agents_remove(context: typer.Context, name: AgentNameArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Delete an agent that no app declares any more, with its history."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, lambda admin: agents_actions.remove_agent(admin, name))


@agents_app.command("health")
def agents_health(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Check whether agents run on time, and show their replicas and problems. Exit status 1 when there is a problem."""
    from rota.cli.agents import actions as agents_actions

    _print(context, form, agents_actions.agents_health)


def _print(context: typer.Context, form: OutputFormat, work: Callable[[AgentAdmin], Awaitable[CliPage]]) -> None:
    from rota.cli.agents import actions as agents_actions

    agents_actions.run(load_settings(context, quietly=True).settings, work, form=form)
