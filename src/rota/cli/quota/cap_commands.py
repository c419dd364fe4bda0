"""Typer commands of `rota folder`, `rota dept`, and the caps of `rota job` and `rota layer`."""

from __future__ import annotations

from typing import Annotated

import typer

from rota.cli.core.options import OutputOption
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.options import (
    DeptName,
    FolderName,
    JobRef,
    LayerRef,
    MaxCores,
    MaxGpus,
    MinCores,
    MinGpus,
    Name,
    NewName,
    RenameTarget,
    ShowName,
    change,
    command_group,
    read,
)

folder_app = command_group(
    "Groups of jobs inside a show, with caps of their own.\n\n"
    "A maximum is never passed. Whoever is below their minimum is served first."
)
dept_app = command_group(
    "Departments, and what each may use in a show.\n\n"
    "`create` makes a department; `add` takes it into a show, `set` changes its caps there, `remove` takes it out."
)
job_app = command_group("Single jobs: how they are, what came of them, stopping them, and their caps.")
layer_app = command_group("Caps of single layers.")


@folder_app.command("list")
def folder_list(context: typer.Context, show: ShowName, form: OutputOption = OutputFormat.TEXT) -> None:
    """A show's folders and what is used of their caps."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.list_folders(accounting, show))


@folder_app.command("create")
def folder_create(
    context: typer.Context,
    show: ShowName,
    name: NewName,
    min_cores: MinCores = None,
    max_cores: MaxCores = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Make a folder, such as `rota folder create duck shots --max-cores 64`. What is not given is unlimited."""
    from rota.cli.quota import actions as quota_actions

    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.create_folder(show, name, caps=caps, actor=actor))


@folder_app.command("set")
def folder_set(
    context: typer.Context,
    show: ShowName,
    name: FolderName,
    min_cores: MinCores = None,
    max_cores: MaxCores = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Change a folder's caps; what is not given stays. What runs goes on, even where less is allowed now."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(min_cores, max_cores, min_gpus, max_gpus)
    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.change_folder(show, name, caps, actor=actor))


@folder_app.command("rename")
def folder_rename(
    context: typer.Context, show: ShowName, name: FolderName, new: RenameTarget, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Give a folder another name."""
    change(context, form, lambda admin, actor: admin.rename_folder(show, name, new, actor=actor))


@folder_app.command("delete")
def folder_delete(
    context: typer.Context, show: ShowName, name: FolderName, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Remove a folder. Refused while frames of it run."""
    change(context, form, lambda admin, actor: admin.delete_folder(show, name, actor=actor))


@dept_app.command("list")
def dept_list(
    context: typer.Context,
    show: Annotated[
        str | None, typer.Argument(metavar="[SHOW]", help="Only those of this show, with caps and use.")
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Every department and the shows it works on; with a show, its caps there and what is used of them."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.list_departments(accounting, show))


@dept_app.command("create")
def dept_create(context: typer.Context, name: NewName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Make a department; `rota dept add` takes it into a show."""
    change(context, form, lambda admin, actor: admin.create_dept(name, actor=actor))


@dept_app.command("rename")
def dept_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Give a department another name."""
    change(context, form, lambda admin, actor: admin.rename_dept(name, new, actor=actor))


@dept_app.command("delete")
def dept_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Remove a department. Refused while it is part of a show."""
    change(context, form, lambda admin, actor: admin.delete_dept(name, actor=actor))


@dept_app.command("add")
def dept_add(
    context: typer.Context,
    show: ShowName,
    dept: DeptName,
    min_cores: MinCores = None,
    max_cores: MaxCores = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Take a department into a show, with caps if it needs any."""
    from rota.cli.quota import actions as quota_actions

    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.create_point(show, dept, caps=caps, actor=actor))


@dept_app.command("set")
def dept_set(
    context: typer.Context,
    show: ShowName,
    dept: DeptName,
    min_cores: MinCores = None,
    max_cores: MaxCores = None,
    min_gpus: MinGpus = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Change a department's caps in a show; what is not given stays."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(min_cores, max_cores, min_gpus, max_gpus)
    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.change_point(show, dept, caps, actor=actor))


@dept_app.command("remove")
def dept_remove(context: typer.Context, show: ShowName, dept: DeptName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Take a department out of a show. Refused while frames of it run there."""
    change(context, form, lambda admin, actor: admin.delete_point(show, dept, actor=actor))


@job_app.command("set")
def job_set(
    context: typer.Context,
    show: ShowName,
    job: JobRef,
    max_cores: MaxCores = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Change how much one job may use at once; what is not given stays."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(max_cores, max_gpus)
    change(context, form, lambda admin, actor: quota_actions.change_job(admin, actor, show, job, max_cores, max_gpus))


@layer_app.command("set")
def layer_set(
    context: typer.Context,
    show: ShowName,
    layer: LayerRef,
    max_cores: MaxCores = None,
    max_gpus: MaxGpus = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Change how much one layer may use at once; what is not given stays."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(max_cores, max_gpus)
    change(
        context, form, lambda admin, actor: quota_actions.change_layer(admin, actor, show, layer, max_cores, max_gpus)
    )
