"""`rota submit`, `rota jobs`, `rota explain`, and what `rota job` does besides caps."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from rota.cli.books_caps_app import job_app
from rota.cli.form import Form
from rota.cli.options import Output, load
from rota.model.errors import InvalidInput

ARGV = "rota.argv"
AfterFailed = Literal["cancel", "fail", "run"]
StreamName = Literal["stdout", "stderr", "log"]


class TaskOrCommand(TyperCommand):
    """Whatever follows `--` is a command as it stands, and never taken for options or arguments of ours."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            args, ctx.meta[ARGV] = args[:at], tuple(args[at + 1 :])
        return super().parse_args(ctx, args)


def _option(metavar: str, text: str, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, show_default=False)


Which = Annotated[
    str, typer.Argument(metavar="JOB", help="Its id, the beginning of it, or its name: the newest.", show_default=False)
]

Whiches = Annotated[
    list[str],
    typer.Argument(
        metavar="JOB", help="Ids, beginnings of them, or names that a single live job has.", show_default=False
    ),
]
File = Annotated[
    Path | None, _option("FILE", "Instead of all the others: a whole submission as YAML or JSON, such as a map.")
]
Labels = Annotated[list[str] | None, _option("KEY=VALUE", "A label; repeat it.", "--label")]
Artifacts = Annotated[
    list[str] | None,
    _option("GLOB", "A file each frame leaves in its directory, such as out/*.png; repeat it.", "--artifact"),
]
Limits = Annotated[
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
    file: File = None,
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
    labels: Labels = None,
    requires: Annotated[list[str] | None, _option("WORD", "What its pool must provide; repeat it.")] = None,
    retries: Annotated[int | None, _option("N", "Attempts after the first one that failed.")] = None,
    timeout: Annotated[str | None, _option("TIME", "Of one attempt, such as 10min.")] = None,
    artifacts: Artifacts = None,
    limits: Limits = None,
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
    form: Output = Form.TEXT,
) -> None:
    """Submit a task, or after `--` a command: `rota submit --frames 1-100 -- render -f {frame} scene.usd`."""
    said = locals()  # each parameter that `Wanted` knows has its name there
    from rota.cli import jobs
    from rota.cli.jobs_wanted import Wanted

    given = {name: said[name] for name in Wanted.__struct_fields__ if said.get(name) is not None}
    wanted = Wanted(argv=context.meta.get(ARGV, ()), **given)
    sys.exit(jobs.submit(load(context, quietly=True).settings, wanted, wait=wait, dry_run=dry_run, form=form))


def jobs_list(
    context: typer.Context,
    show: Annotated[str | None, _option("SHOW", "Those of this show.")] = None,
    state: Annotated[str | None, _option("STATE", "Those in this state, such as RUNNING or FAILED.")] = None,
    topic: Annotated[str | None, _option("TOPIC", "Those of this topic.")] = None,
    reason: Annotated[str | None, _option("REASON", "Those that wait, or ended, for this, such as no_workers.")] = None,
    label: Annotated[str, _option("KEY=VALUE", "Those with this label.")] = "",
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many.")] = 50,
    after: Annotated[str | None, _option("JOB", "From the one after this on.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """Jobs that wait, run and have ended, the newest first."""
    from rota.cli import jobs

    wanted = jobs.wanted_jobs(show, state, topic, reason, label)
    _print(context, form, lambda found: jobs.listed(found, wanted, limit, after))


def explain(
    context: typer.Context,
    which: Which,
    layer: Annotated[str | None, _option("LAYER", "Only this layer of it, by name or id.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """Why a job is not running, or what a run of a workflow waits for, and what would help."""
    from rota.cli import explain as explaining

    _print(context, form, lambda found: explaining.explained(found, which, layer))


@job_app.command("show")
def job_show(context: typer.Context, which: Which, form: Output = Form.TEXT) -> None:
    """Everything about a job: its layers, how many of its frames are in which state, and its history."""
    from rota.cli import jobs

    _print(context, form, lambda found: jobs.shown(found, which))


@job_app.command("wait")
def job_wait(
    context: typer.Context,
    which: Which,
    timeout: Annotated[str | None, _option("TIME", "Not longer than this, such as 10min.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """Wait until a job has ended. The exit status tells how it did."""
    from rota.cli import jobs

    sys.exit(jobs.wait(load(context, quietly=True).settings, which, timeout, watch=False, form=form))


@job_app.command("watch")
def job_watch(
    context: typer.Context,
    which: Which,
    timeout: Annotated[str | None, _option("TIME", "Not longer than this, such as 10min.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """See every layer of a job go on until it has ended. The exit status tells how it did; Ctrl-C stops nothing."""
    from rota.cli import jobs

    sys.exit(jobs.wait(load(context, quietly=True).settings, which, timeout, watch=True, form=form))


@job_app.command("retry")
def job_retry(
    context: typer.Context,
    which: Which,
    everything: Annotated[bool, typer.Option("--all", help="Every frame, not only those that failed.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """Run the failed frames of a job again, as a new job that is linked to it."""
    from rota.cli import jobs

    settings = load(context, quietly=True).settings
    jobs.run(settings, lambda found: jobs.retry(settings, found, which, every_frame=everything), form=form)


@job_app.command("remediate")
def job_remediate(
    context: typer.Context,
    which: Which,
    remediation: Annotated[
        str, typer.Option("--as", metavar="ID", help="Which of several remedies.", show_default=False)
    ] = "",
    form: Output = Form.TEXT,
) -> None:
    """Submit a denied job in the way its policy suggests, as a new job."""
    from rota.cli import jobs

    settings = load(context, quietly=True).settings
    jobs.run(settings, lambda found: jobs.remediate(settings, found, which, remediation), form=form)


@job_app.command("cancel")
def job_cancel(
    context: typer.Context,
    which: Annotated[
        list[str],
        typer.Argument(
            metavar="JOB", help="Ids, beginnings of them, or names that no other live job has.", show_default=False
        ),
    ],
    form: Output = Form.TEXT,
) -> None:
    """Stop jobs: what waits never starts, what runs is asked to stop and then killed."""
    from rota.cli import jobs

    _print(context, form, lambda found: jobs.cancel(found, which))


@job_app.command("logs")
def job_logs(
    context: typer.Context,
    which: Which,
    frame: Annotated[int | None, _option("N", "Of this frame; the first.")] = None,
    layer: Annotated[str | None, _option("LAYER", "Of this layer; the first.")] = None,
    attempt: Annotated[int | None, _option("N", "Of this attempt; the last that wrote anything.")] = None,
    stream: Annotated[StreamName | None, typer.Option(help="Of this alone; all of them.", show_default=False)] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="As it comes, until the job has ended.")] = False,
    form: Output = Form.TEXT,
) -> None:
    """What a frame wrote: its standard output, then its errors, then what the task logged."""
    from rota.cli import jobs_logs

    settings = load(context, quietly=True).settings
    if follow:
        if attempt is not None:
            raise InvalidInput("--follow goes with the last attempt: leave --attempt out.")
        jobs_logs.follow(settings, which, frame=frame, layer=layer, stream=stream, form=form)
        return
    jobs_logs.show(settings, which, frame=frame, layer=layer, attempt=attempt, stream=stream, form=form)


@job_app.command("results")
def job_results(
    context: typer.Context,
    which: Which,
    frame: Annotated[int | None, _option("N", "Of this frame alone.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", help="At most so many.")] = 100,
    form: Output = Form.TEXT,
) -> None:
    """What frames returned, and why they failed. Frames that returned nothing are not listed."""
    from rota.cli import jobs

    settings = load(context, quietly=True).settings
    jobs.run(settings, lambda found: jobs.results(found, which, settings, frame=frame, limit=limit), form=form)


@job_app.command("artifacts")
def job_artifacts(
    context: typer.Context,
    which: Which,
    frame: Annotated[int | None, _option("N", "Of this frame alone.")] = None,
    layer: Annotated[str | None, _option("LAYER", "Of this layer alone.")] = None,
    to: Annotated[Path | None, _option("DIR", "Fetch them to this directory.")] = None,
    form: Output = Form.TEXT,
) -> None:
    """Files that its frames have left."""
    from rota.cli import jobs_artifacts

    settings = load(context, quietly=True).settings
    jobs_artifacts.show(settings, which, frame=frame, layer=layer, to=to, form=form)


def _print(context: typer.Context, form: Form, work: Any) -> None:
    from rota.cli import jobs

    jobs.run(load(context, quietly=True).settings, work, form=form)
