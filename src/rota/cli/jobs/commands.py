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
    str, typer.Argument(metavar="JOB", help="Its id, the beginning of it, or its name: the newest.", show_default=False)
]

JobArgs = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB", help="Ids, beginnings of them, or names that a single live job has.", show_default=False
    ),
]
SubmissionFileOption = Annotated[
    Path | None, _option("FILE", "Instead of all the others: a whole submission as YAML or JSON, such as a map.")
]
LabelsOption = Annotated[list[str] | None, _option("KEY=VALUE", "A label; repeat it.", "--label")]
ArtifactsOption = Annotated[
    list[str] | None,
    _option("GLOB", "A file each frame leaves in its directory, such as out/*.png; repeat it.", "--artifact"),
]
LimitsOption = Annotated[
    list[str] | None,
    _option(
        "NAME=VALUE", "Of a command's processes: cpu=10min, address=4GiB, open-files=64, file-size=1GiB.", "--limit"
    ),
]


def submit(
    context: typer.Context,
    task: Annotated[str | None, typer.Argument(metavar="TASK", help="Name of a task.", show_default=False)] = None,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="What it is called with: JSON, name=JSON, or text.", show_default=False),
    ] = None,
    file: SubmissionFileOption = None,
    show: Annotated[str, _option("SHOW", "Whose quota it uses; the show that `rota up` makes.")] = "default",
    folder: Annotated[str | None, _option("FOLDER", "Folder of the show.")] = None,
    dept: Annotated[str | None, _option("DEPT", "Department.")] = None,
    topic: Annotated[str | None, _option("TOPIC", "Decides which pools run it; the name of the task.")] = None,
    name: Annotated[str | None, _option("NAME", "What it is called in lists.")] = None,
    frames: Annotated[str | None, _option("SPEC", "Such as 1-100, 1-100x2 or 1,5,9-20; one frame without it.")] = None,
    cores: Annotated[str | None, _option("CORES", "Per frame, such as 4 or 0.5.")] = None,
    gpus: Annotated[int | None, _option("N", "Per frame.")] = None,
    memory: Annotated[str | None, _option("SIZE", "Per frame, such as 512MiB or 4GiB.")] = None,
    max_cores: Annotated[str | None, _option("CORES", "Never more at once, all frames together.")] = None,
    priority: Annotated[str | None, _option("PRIORITY", "1 to 9, or BATCH, INTERACTIVE, CRITICAL.")] = None,
    labels: LabelsOption = None,
    requires: Annotated[list[str] | None, _option("WORD", "What its pool must provide; repeat it.")] = None,
    retries: Annotated[int | None, _option("N", "Attempts after the first one that failed.")] = None,
    timeout: Annotated[str | None, _option("TIME", "Of one attempt, such as 10min.")] = None,
    artifacts: ArtifactsOption = None,
    limits: LimitsOption = None,
    deadline: Annotated[str | None, _option("TIME", "Of the whole job from now on, such as 2h.")] = None,
    max_wait: Annotated[str | None, _option("TIME", "It fails when nothing of it was started by then.")] = None,
    at: Annotated[str | None, _option("TIME", "Not before: 2026-11-30T18:00, or from now on such as 2h.")] = None,
    after: Annotated[list[str] | None, _option("JOB", "Not before this job has ended; repeat it.")] = None,
    after_failed: Annotated[
        AfterFailed | None,
        typer.Option(help="What becomes of it when that did not succeed; cancel.", show_default=False),
    ] = None,
    key: Annotated[str | None, _option("KEY", "The same key again finds the same job.")] = None,
    app: Annotated[
        str | None, _option("APP", "Declares what the task needs: module:app or file.py; that of `rota up`.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Until it has ended; the exit status says how.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would become of it, and change nothing.")
    ] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Submit a task, or after `--` a command: `rota submit --frames 1-100 -- render -f {frame} scene.usd`."""
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
    show: Annotated[str | None, _option("SHOW", "Those of this show.")] = None,
    state: Annotated[str | None, _option("STATE", "Those in this state, such as RUNNING or FAILED.")] = None,
    topic: Annotated[str | None, _option("TOPIC", "Those of this topic.")] = None,
    reason: Annotated[str | None, _option("REASON", "Those that wait, or ended, for this, such as no_workers.")] = None,
    label: Annotated[str, _option("KEY=VALUE", "Those with this label.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many.")] = 50,
    after: Annotated[str | None, _option("JOB", "From the one after this on.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Jobs that wait, run and have ended, the newest first."""
    from rota.cli.jobs import actions as jobs_actions

    job_filter = jobs_actions.make_job_filter(show, state, topic, reason, label)
    _print(context, form, lambda jobs: jobs_actions.list_jobs(jobs, job_filter, limit, after))


def explain(
    context: typer.Context,
    which: JobArg,
    layer: Annotated[str | None, _option("LAYER", "Only this layer of it, by name or id.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Why a job is not running, or what a run of a workflow waits for, and what would help."""
    from rota.cli.jobs import explain_view

    _print(context, form, lambda jobs: explain_view.explain_page(jobs, which, layer))


@job_app.command("show")
def job_show(context: typer.Context, which: JobArg, form: OutputOption = OutputFormat.TEXT) -> None:
    """Everything about a job: its layers, how many of its frames are in which state, and its history."""
    from rota.cli.jobs import actions as jobs_actions

    _print(context, form, lambda jobs: jobs_actions.show_job(jobs, which))


@job_app.command("wait")
def job_wait(
    context: typer.Context,
    which: JobArg,
    timeout: Annotated[str | None, _option("TIME", "Not longer than this, such as 10min.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Wait until a job has ended. The exit status tells how it did."""
    from rota.cli.jobs import actions as jobs_actions

    sys.exit(
        jobs_actions.wait_for_job(load_settings(context, quietly=True).settings, which, timeout, watch=False, form=form)
    )


@job_app.command("watch")
def job_watch(
    context: typer.Context,
    which: JobArg,
    timeout: Annotated[str | None, _option("TIME", "Not longer than this, such as 10min.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """See every layer of a job go on until it has ended. The exit status tells how it did; Ctrl-C stops nothing."""
    from rota.cli.jobs import actions as jobs_actions

    sys.exit(
        jobs_actions.wait_for_job(load_settings(context, quietly=True).settings, which, timeout, watch=True, form=form)
    )


@job_app.command("retry")
def job_retry(
    context: typer.Context,
    which: JobArg,
    everything: Annotated[bool, typer.Option("--all", help="Every frame, not only those that failed.")] = False,
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
        str, typer.Option("--as", metavar="ID", help="Which of several remedies.", show_default=False)
    ] = "",
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Submit a denied job in the way its policy suggests, as a new job."""
    from rota.cli.jobs import actions as jobs_actions

    settings = load_settings(context, quietly=True).settings
    jobs_actions.run(settings, lambda jobs: jobs_actions.remediate_job(settings, jobs, which, remediation), form=form)


@job_app.command("cancel")
def job_cancel(
    context: typer.Context,
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB", help="Ids, beginnings of them, or names that no other live job has.", show_default=False
        ),
    ],
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Stop jobs: what waits never starts, what runs is asked to stop and then killed."""
    from rota.cli.jobs import actions as jobs_actions

    _print(context, form, lambda jobs: jobs_actions.cancel_jobs(jobs, which))


@job_app.command("logs")
def job_logs(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Of this frame; the first.")] = None,
    layer: Annotated[str | None, _option("LAYER", "Of this layer; the first.")] = None,
    attempt: Annotated[int | None, _option("N", "Of this attempt; the last that wrote anything.")] = None,
    stream: Annotated[StreamName | None, typer.Option(help="Of this alone; all of them.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="As it comes, until the job has ended.")] = False,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """What a frame wrote: its standard output, then its errors, then what the task logged."""
    from rota.cli.jobs import logs

    settings = load_settings(context, quietly=True).settings
    if follow:
        if attempt is not None:
            raise InvalidInput("--follow goes with the last attempt: leave --attempt out.")
        logs.follow_logs(settings, which, frame=frame, layer=layer, stream=stream, form=form)
        return
    logs.show_logs(settings, which, frame=frame, layer=layer, attempt=attempt, stream=stream, form=form)


@job_app.command("results")
def job_results(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Of this frame alone.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many.")] = 100,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """What frames returned, and why they failed. Frames that returned nothing are not listed."""
    from rota.cli.jobs import actions as jobs_actions

    settings = load_settings(context, quietly=True).settings
    jobs_actions.run(
        settings, lambda jobs: jobs_actions.show_results(jobs, which, settings, frame=frame, limit=limit), form=form
    )


@job_app.command("artifacts")
def job_artifacts(
    context: typer.Context,
    which: JobArg,
    frame: Annotated[int | None, _option("N", "Of this frame alone.")] = None,
    layer: Annotated[str | None, _option("LAYER", "Of this layer alone.")] = None,
    to: Annotated[Path | None, _option("DIR", "Fetch them to this directory.")] = None,
    form: OutputOption = OutputFormat.TEXT,
) -> None:
    """Files that its frames have left."""
    from rota.cli.jobs import artifacts as jobs_artifacts

    settings = load_settings(context, quietly=True).settings
    jobs_artifacts.show_artifacts(settings, which, frame=frame, layer=layer, to=to, form=form)


def _print(context: typer.Context, form: OutputFormat, work: Any) -> None:
    from rota.cli.jobs import actions as jobs_actions

    jobs_actions.run(load_settings(context, quietly=True).settings, work, form=form)
