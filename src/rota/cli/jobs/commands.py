"""Typer commands `rota submit`, `rota jobs`, `rota explain`, and those of `rota job` except caps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from rota.cli.core.options import OutputOption, load_settings
from rota.cli.core.output_format import OutputFormat
from rota.cli.quota.cap_commands import job_app
from rota.model.errors import InvalidInput

ARGV_KEY = "rota.argv"
AfterFailed = Literal["cancel", "fail", "run"]
StreamName = Literal["stdout", "stderr", "log"]


class SubmitCommand(TyperCommand):
    """Takes everything after `--` as the command to run, never as options or arguments of `rota submit`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[ARGV_KEY] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


JobArg = Annotated[
    str, typer.Argument(metavar="JOB", help="Job id, id prefix, or name (the newest job with it).", show_default=False)
]

SubmissionFileOption = Annotated[
    Path | None, _option("FILE", "A complete submission as YAML or JSON; excludes all other options.")
]
LabelsOption = Annotated[list[str] | None, _option("KEY=VALUE", "A label; repeatable.", "--label")]
ArtifactsOption = Annotated[
    list[str] | None,
    _option("GLOB", "Files to collect from each frame's directory, such as out/*.png; repeatable.", "--artifact"),
]
LimitsOption = Annotated[
    list[str] | None,
    _option(
        "NAME=VALUE",
        "Limits of the command's processes: cpu=10min, address=4GiB, open-files=64, file-size=1GiB.",
        "--limit",
    ),
]


def submit(
    context: typer.Context,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Name of a task.", show_default=False)] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the task: JSON, name=JSON, or text.", show_default=False),
    ] = None,
    file: SubmissionFileOption = None,
    show: Annotated[
        str, _option("SHOW", "Show whose quota the job uses (default: the show that `rota up` creates).")
    ] = "default",
    folder: Annotated[str | None, _option("FOLDER", "Folder of the show.")] = None,
    dept: Annotated[str | None, _option("DEPT", "Department.")] = None,
    topic: Annotated[
        str | None, _option("TOPIC", "Topic, which selects the pools (default: name of the task).")
    ] = None,
    name: Annotated[str | None, _option("NAME", "Name of the job.")] = None,
    frames: Annotated[
        str | None, _option("SPEC", "Frames, such as 1-100, 1-100x2 or 1,5,9-20 (default: one frame).")
    ] = None,
    cores: Annotated[str | None, _option("CORES", "Cores per frame, such as 4 or 0.5.")] = None,
    gpus: Annotated[int | None, _option("N", "GPUs per frame.")] = None,
    memory: Annotated[str | None, _option("SIZE", "Memory per frame, such as 512MiB or 4GiB.")] = None,
    max_cores: Annotated[str | None, _option("CORES", "Maximum cores of all concurrent frames together.")] = None,
    priority: Annotated[str | None, _option("PRIORITY", "Priority: 1 to 9, or BATCH, INTERACTIVE, CRITICAL.")] = None,
    labels: LabelsOption = None,
    requires: Annotated[
        list[str] | None, _option("WORD", "A capability that the pool must provide; repeatable.")
    ] = None,
    retries: Annotated[int | None, _option("N", "Retries after a failed first attempt.")] = None,
    timeout: Annotated[str | None, _option("TIME", "Time limit of one attempt, such as 10min.")] = None,
    artifacts: ArtifactsOption = None,
    limits: LimitsOption = None,
    deadline: Annotated[str | None, _option("TIME", "Time limit of the whole job from now, such as 2h.")] = None,
    max_wait: Annotated[str | None, _option("TIME", "The job fails if no frame has started within this time.")] = None,
    at: Annotated[
        str | None,
        _option("TIME", "Earliest start: a time such as 2026-11-30T18:00, or a duration from now such as 2h."),
    ] = None,
    after: Annotated[list[str] | None, _option("JOB", "Start after this job has ended; repeatable.")] = None,
    after_failed: Annotated[
        AfterFailed | None,
        typer.Option(help="What to do when that job did not succeed (default: cancel).", show_default=False),
    ] = None,
    key: Annotated[str | None, _option("KEY", "Idempotency key: submitting it again returns the same job.")] = None,
    app: Annotated[
        str | None, _option("APP", "App that declares the task: module:app or file.py (default: the app of `rota up`).")
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", "-w", help="Wait until the job has ended; the exit status says how.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would happen, and change nothing.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Submit a task, or a command after `--`: `rota submit --frames 1-100 -- render -f {frame} scene.usd`."""
    params = locals()  # parameters have the names of the fields of SubmitArgs
    from rota.cli.jobs import actions as jobs_actions
    from rota.cli.jobs.submit_args import SubmitArgs

    fields = {name: params[name] for name in SubmitArgs.__struct_fields__ if params.get(name) is not None}
    submit_args = SubmitArgs(argv=context.meta.get(ARGV_KEY, ()), **fields)
    sys.exit(
        jobs_actions.submit(
            load_settings(context, quietly=True).settings, submit_args, wait=wait, dry_run=dry_run, form=form
        )
    )


def jobs_list(
    context: typer.Context,
    show: Annotated[str | None, _option("SHOW", "Only jobs of this show.")] = None,
    state: Annotated[str | None, _option("STATE", "Only jobs in this state, such as RUNNING or FAILED.")] = None,
    topic: Annotated[str | None, _option("TOPIC", "Only jobs of this topic.")] = None,
    reason: Annotated[
        str | None, _option("REASON", "Only jobs that wait, or ended, for this reason, such as no_workers.")
    ] = None,
    label: Annotated[str, _option("KEY=VALUE", "Only jobs with this label.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number.")] = 50,
    after: Annotated[str | None, _option("JOB", "Start after this job (next page).")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List waiting, running and ended jobs, newest first."""
    from rota.cli.jobs import actions as jobs_actions

    job_filter = jobs_actions.make_job_filter(show, state, topic, reason, label)
    _print(context, form, lambda jobs: jobs_actions.list_jobs(jobs, job_filter, limit, after))


def explain(
    context: typer.Context,
    which: JobArg,
    layer: Annotated[str | None, _option("LAYER", "Only this layer, by name or id.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Explain why a job is not running, or what a workflow run waits for, and what would help."""
    from rota.cli.jobs import explain_view

    _print(context, form, lambda jobs: explain_view.explain_page(jobs, which, layer))


@job_app.command("show")
def job_show(context: typer.Context, which: JobArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Show a job: its layers, the states of its frames, and its history."""
    from rota.cli.jobs import actions as jobs_actions

    _print(context, form, lambda jobs: jobs_actions.show_job(jobs, which))


@job_app.command("wait")
def job_wait(
    context: typer.Context,
    which: JobArg,
    timeout: Annotated[str | None, _option("TIME", "Maximum wait, such as 10min.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Wait until a job has ended. The exit status says how it ended."""
    from rota.cli.jobs import actions as jobs_actions

    sys.exit(
        jobs_actions.wait_for_job(load_settings(context, quietly=True).settings, which, timeout, watch=False, form=form)
    )


@job_app.command("watch")
def job_watch(
    context: typer.Context,
    which: JobArg,
    timeout: Annotated[str | None, _option("TIME", "Maximum wait, such as 10min.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show the progress of each layer until the job has ended. The exit status says how; Ctrl-C only stops watching."""
    from rota.cli.jobs import actions as jobs_actions

    sys.exit(
        jobs_actions.wait_for_job(load_settings(context, quietly=True).settings, which, timeout, watch=True, form=form)
    )


@job_app.command("retry")
def job_retry(
    context: typer.Context,
    which: JobArg,
    everything: Annotated[bool, typer.Option("--all", help="Every frame, not only the failed ones.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Run the failed frames of a job again, as a new job that is linked to it."""
    from rota.cli.jobs import actions as jobs_actions

    settings = load_settings(context, quietly=True).settings
    jobs_actions.run(
        settings, lambda jobs: jobs_actions.retry_job(settings, jobs, which, every_frame=everything), form=form
    )


@job_app.command("remediate")
def job_remediate(
    context: typer.Context,
    which: JobArg,
    remediation: Annotated[
        str,
        typer.Option("--as", metavar="ID", help="Id of the remediation, when there are several.", show_default=False),
    ] = "",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Submit a denied job again with the remediation that its policy suggests, as a new job."""
    from rota.cli.jobs import actions as jobs_actions

    settings = load_settings(context, quietly=True).settings
    jobs_actions.run(settings, lambda jobs: jobs_actions.remediate_job(settings, jobs, which, remediation), form=form)


@job_app.command("cancel")
def job_cancel(
    context: typer.Context,
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB", help="Job ids, id prefixes, or names that exactly one live job has.", show_default=False
        ),
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Cancel jobs: waiting frames never start, running frames are asked to stop and then killed."""
    from rota.cli.jobs import actions as jobs_actions

    _print(context, form, lambda jobs: jobs_actions.cancel_jobs(jobs, which))


@job_app.command("logs")
def job_logs(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Frame (default: the first).")] = None,
    layer: Annotated[str | None, _option("LAYER", "Layer (default: the first).")] = None,
    attempt: Annotated[int | None, _option("N", "Attempt (default: the last one with output).")] = None,
    stream: Annotated[
        StreamName | None, typer.Option(help="Only this stream (default: all).", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print output as it arrives, until the job has ended.")
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show the output of a frame: its standard output, then its standard error, then the task's log."""
    from rota.cli.jobs import logs

    settings = load_settings(context, quietly=True).settings
    if follow:
        if attempt is not None:
            raise InvalidInput("--follow shows the last attempt only: omit --attempt.")
        logs.follow_logs(settings, which, frame=frame, layer=layer, stream=stream, form=form)
        return
    logs.show_logs(settings, which, frame=frame, layer=layer, attempt=attempt, stream=stream, form=form)


@job_app.command("results")
def job_results(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Only this frame.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="Maximum number.")] = 100,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Show return values and errors of frames. Frames that returned nothing are not listed."""
    from rota.cli.jobs import actions as jobs_actions

    settings = load_settings(context, quietly=True).settings
    jobs_actions.run(
        settings, lambda jobs: jobs_actions.show_results(jobs, which, settings, frame=frame, limit=limit), form=form
    )


@job_app.command("artifacts")
def job_artifacts(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Only this frame.")] = None,
    layer: Annotated[str | None, _option("LAYER", "Only this layer.")] = None,
    to: Annotated[Path | None, _option("DIR", "Fetch the files to this directory.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """List or fetch the files that a job's frames produced."""
    from rota.cli.jobs import artifacts as jobs_artifacts

    settings = load_settings(context, quietly=True).settings
    jobs_artifacts.show_artifacts(settings, which, frame=frame, layer=layer, to=to, form=form)


def _print(context: typer.Context, form: OutputFormat, work: Any) -> None:
    from rota.cli.jobs import actions as jobs_actions

    jobs_actions.run(load_settings(context, quietly=True).settings, work, form=form)
