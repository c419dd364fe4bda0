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
    "Projects that share the pools, each with books of its own.\n\n"
    "A show may run frames once it has a share of a pool: `rota sub create`."
)
pool_app = command_group("Named groups of workers, which shows share through subscriptions.")
sub_app = command_group(
    "Subscriptions: a show's share of a pool, in cores.\n\n"
    "The size is what the show is promised: whoever is furthest below theirs is served first. The burst is what it "
    "never passes; 0 lets nothing run."
)


class TrueFalse(StrEnum):
    TRUE = "true"
    FALSE = "false"


@show_app.command("list")
def show_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Every show: who keeps its books, and what it uses of its subscriptions together."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, quota_queries.list_shows)


@show_app.command("info")
def show_info(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """All limits of a show, and what is used of each."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.show_info(accounting, name))


@show_app.command("create")
def show_create(
    context: typer.Context,
    name: NewName,
    managed: Annotated[bool, typer.Option("--managed", help="Let Redis keep its books from the beginning.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Make a show. PostgreSQL keeps its books unless --managed is given."""
    change(context, form, lambda admin, actor: admin.create_show(name, managed=managed, actor=actor))


@show_app.command("rename")
def show_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Give a show another name; everything it has stays."""
    change(context, form, lambda admin, actor: admin.rename_show(name, new, actor=actor))


@show_app.command("set")
def show_set(
    context: typer.Context,
    name: Name,
    max_jobs: Annotated[
        int, typer.Option("--max-jobs", help="Jobs that may run at once; -1: as many as there are.", show_default=False)
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Limit how many jobs of a show run at once. Those that run go on; the others wait as tenant_limit."""
    change(context, form, lambda admin, actor: admin.change_show(name, max_jobs=max_jobs, actor=actor))


@show_app.command("delete")
def show_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Remove a show with all its limits. Refused while frames of it run."""
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
    """Say who keeps a show's books. Redis books faster; either way no limit is ever passed.

    Frames may run meanwhile. Setting what is set changes nothing.
    """
    change(context, form, lambda admin, actor: admin.set_managed(name, managed is TrueFalse.TRUE, actor=actor))


@pool_app.command("list")
def pool_list(context: typer.Context, form: OutputOption = OutputFormat.TEXT) -> None:
    """Every pool, what is promised of it, and to which shows."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, quota_queries.list_pools)


@pool_app.command("create")
def pool_create(context: typer.Context, name: NewName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Make a pool; `rota sub create` gives shows a share of it."""
    change(context, form, lambda admin, actor: admin.create_pool(name, actor=actor))


@pool_app.command("rename")
def pool_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Give a pool another name."""
    change(context, form, lambda admin, actor: admin.rename_pool(name, new, actor=actor))


@pool_app.command("delete")
def pool_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Remove a pool. Refused while a show has a subscription to it."""
    change(context, form, lambda admin, actor: admin.delete_pool(name, actor=actor))


@sub_app.command("list")
def sub_list(context: typer.Context, show: ShowName, form: OutputOption = OutputFormat.TEXT) -> None:
    """A show's shares and what is used of them. The mark in a bar is where the size ends, its end the burst."""
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
    """Change a share; what is not given stays. What runs goes on, even where less is allowed now."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(size, burst, gpu_burst)
    change(
        context,
        form,
        lambda admin, actor: quota_actions.change_subscription(admin, actor, show, pool, size, burst, gpu_burst),
    )


@sub_app.command("delete")
def sub_delete(context: typer.Context, show: ShowName, pool: PoolName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Take a show's share of a pool away. Refused while frames run on it."""
    change(context, form, lambda admin, actor: admin.delete_subscription(show, pool, actor=actor))
