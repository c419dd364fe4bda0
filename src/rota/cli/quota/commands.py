"""Typer commands of `rota show`, `rota pool` and `rota sub`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from rota.cli.core.options import OutputOption
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import (
    Burst,
    GpuBurst,
    Name,
    NewBurst,
    NewName,
    NewSize,
    PoolName,
    RenameTarget,
    ShowName,
    Size,
    change,
    command_group,
    read,
)

show_app = command_group(
    "Projects (tenants) that share the pools, each with its own accounting.\n\n"
    "A show can run frames once it has a share of a pool: `rota sub create`."
)
pool_app = command_group("Named groups of workers, which shows share through subscriptions.")
sub_app = command_group(
    "Subscriptions: a show's share of a pool, in cores.\n\n"
    "The size is guaranteed: the show furthest below its size is served first. The burst is a hard limit; with 0 "
    "nothing runs."
)


class TrueFalse(StrEnum):
    TRUE = "true"
    FALSE = "false"


@show_app.command("list")
def show_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List shows with their accounting store and their total usage."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, quota_queries.list_shows)


@show_app.command("info")
def show_info(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show all limits of a show and their usage."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.show_info(accounting, name))


@show_app.command("create")
def show_create(
    context: typer.Context,
    name: NewName,
    managed: Annotated[bool, typer.Option("--managed", help="Account in Redis from the start.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Create a show. It is accounted in PostgreSQL unless --managed is given."""
    change(context, form, lambda admin, actor: admin.create_show(name, managed=managed, actor=actor))


@show_app.command("rename")
def show_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Rename a show; everything else stays."""
    change(context, form, lambda admin, actor: admin.rename_show(name, new, actor=actor))


@show_app.command("set")
def show_set(
    context: typer.Context,
    name: Name,
    max_jobs: Annotated[
        int, typer.Option("--max-jobs", help="Maximum number of concurrent jobs; -1 for no limit.", show_default=False)
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Limit the concurrent jobs of a show. Running jobs continue; further jobs wait as tenant_limit."""
    change(context, form, lambda admin, actor: admin.change_show(name, max_jobs=max_jobs, actor=actor))


@show_app.command("delete")
def show_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Delete a show with all its limits. Refused while its frames run."""
    change(context, form, lambda admin, actor: admin.delete_show(name, actor=actor))


@show_app.command("set-managed")
def show_set_managed(
    context: typer.Context,
    name: Name,
    managed: Annotated[
        TrueFalse,
        typer.Argument(metavar="true|false", help="true: Redis; false: PostgreSQL alone.", case_sensitive=False),
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Choose the store for a show's accounting. Redis books faster; limits are exact in both.

    Frames can run during the change. Setting the current value changes nothing.
    """
    change(context, form, lambda admin, actor: admin.set_managed(name, managed is TrueFalse.TRUE, actor=actor))


@pool_app.command("list")
def pool_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """List pools with the shares of their shows."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, quota_queries.list_pools)


@pool_app.command("create")
def pool_create(context: typer.Context, name: NewName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Create a pool; `rota sub create` gives shows a share of it."""
    change(context, form, lambda admin, actor: admin.create_pool(name, actor=actor))


@pool_app.command("rename")
def pool_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Rename a pool; everything else stays."""
    change(context, form, lambda admin, actor: admin.rename_pool(name, new, actor=actor))


@pool_app.command("delete")
def pool_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Delete a pool. Refused while a show has a subscription to it."""
    change(context, form, lambda admin, actor: admin.delete_pool(name, actor=actor))


@sub_app.command("list")
def sub_list(context: typer.Context, show: ShowName, form: OutputOption = OutputFormat.TEXT) -> None:
    """List the shares of a show with their usage. The divider in a bar is the size, its end the burst."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.list_subscriptions(accounting, show))


@sub_app.command("create")
def sub_create(
    context: typer.Context,
    show: ShowName,
    pool: PoolName,
    size: Size,
    burst: Burst,
    gpu_burst: GpuBurst = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Give a show a share of a pool, such as `rota sub create duck main --size 100 --burst 150%`."""
    from rota.cli.quota import actions as quota_actions

    change(
        context,
        form,
        lambda admin, actor: quota_actions.create_subscription(admin, actor, show, pool, size, burst, gpu_burst),
    )


@sub_app.command("set")
def sub_set(
    context: typer.Context,
    show: ShowName,
    pool: PoolName,
    size: NewSize = None,
    burst: NewBurst = None,
    gpu_burst: GpuBurst = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Change a share; omitted values stay. Running frames continue, even above a lower limit."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(size, burst, gpu_burst)
    change(
        context,
        form,
        lambda admin, actor: quota_actions.change_subscription(admin, actor, show, pool, size, burst, gpu_burst),
    )


@sub_app.command("delete")
def sub_delete(context: typer.Context, show: ShowName, pool: PoolName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Delete a show's share of a pool. Refused while frames run on it."""
    change(context, form, lambda admin, actor: admin.delete_subscription(show, pool, actor=actor))
