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
    "Groups of jobs inside a show, with their own caps.\n\n"
    "A maximum is never exceeded. Folders below their minimum are served first."
)
dept_app = command_group(
    "Departments and their caps in shows.\n\n"
    "`create` creates a department; `add` adds it to a show, `set` changes its caps there, `remove` removes it."
)
job_app = command_group("Single jobs: state, results, cancellation and caps.")
layer_app = command_group("Caps of single layers.")


@folder_app.command("list")
def folder_list(context: typer.Context, show: ShowName, form: OutputOption = OutputFormat.TEXT) -> None:
    """List the folders of a show with their caps and usage."""
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
    """Create a folder, such as `rota folder create duck shots --max-cores 64`. Omitted caps are unlimited."""
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
    """Change the caps of a folder; omitted caps stay. Running frames continue, even above a lower cap."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(min_cores, max_cores, min_gpus, max_gpus)
    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.change_folder(show, name, caps, actor=actor))


@folder_app.command("rename")
def folder_rename(
    context: typer.Context, show: ShowName, name: FolderName, new: RenameTarget, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Rename a folder; everything else stays."""
    change(context, form, lambda admin, actor: admin.rename_folder(show, name, new, actor=actor))


@folder_app.command("delete")
def folder_delete(
    context: typer.Context, show: ShowName, name: FolderName, form: OutputOption = OutputFormat.TEXT
) -> None:
    """Delete a folder. Refused while its frames run."""
    change(context, form, lambda admin, actor: admin.delete_folder(show, name, actor=actor))


@dept_app.command("list")
def dept_list(
    context: typer.Context,
    show: Annotated[
        str | None, typer.Argument(metavar="[SHOW]", help="Only departments of this show, with caps and usage.")
    ] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List departments with their shows; with SHOW, its departments with caps and usage."""
    from rota.cli.quota import queries as quota_queries

    read(context, form, lambda accounting: quota_queries.list_departments(accounting, show))


@dept_app.command("create")
def dept_create(context: typer.Context, name: NewName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Create a department; `rota dept add` adds it to a show."""
    change(context, form, lambda admin, actor: admin.create_dept(name, actor=actor))


@dept_app.command("rename")
def dept_rename(context: typer.Context, name: Name, new: RenameTarget, form: OutputOption = OutputFormat.TEXT) -> None:
    """Rename a department; everything else stays."""
    change(context, form, lambda admin, actor: admin.rename_dept(name, new, actor=actor))


@dept_app.command("delete")
def dept_delete(context: typer.Context, name: Name, form: OutputOption = OutputFormat.TEXT) -> None:
    """Delete a department. Refused while it is part of a show."""
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
    """Add a department to a show, with optional caps."""
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
    """Change the caps of a department in a show; omitted caps stay."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(min_cores, max_cores, min_gpus, max_gpus)
    caps = quota_actions.parse_caps(min_cores=min_cores, max_cores=max_cores, min_gpus=min_gpus, max_gpus=max_gpus)
    change(context, form, lambda admin, actor: admin.change_point(show, dept, caps, actor=actor))


@dept_app.command("remove")
def dept_remove(context: typer.Context, show: ShowName, dept: DeptName, form: OutputOption = OutputFormat.TEXT) -> None:
    """Remove a department from a show. Refused while its frames run there."""
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
    """Change the caps on concurrent usage of a job; omitted caps stay."""
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
    """Change the caps on concurrent usage of a layer; omitted caps stay."""
    from rota.cli.quota import actions as quota_actions

    quota_actions.require_any_option(max_cores, max_gpus)
    change(
        context, form, lambda admin, actor: quota_actions.change_layer(admin, actor, show, layer, max_cores, max_gpus)
    )
