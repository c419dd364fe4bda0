"""Renders `rota top` for terminals of 60 columns or more. No I/O.

Bars differ in their characters as well as in colour, so NO_COLOR loses no information.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rota.cli.core.output import printable
from rota.cli.core.tables import cores_text
from rota.model.units import humanize_duration

if TYPE_CHECKING:
    from rota.cli.top.data import LiveJob, PoolUsage, SubscriptionUsage, TopSnapshot
    from rota.engine.queries.workers import WorkerRecord

PIPE_WIDTH: Final = 100
"""Width in a pipe."""
Column = tuple[str, int, Literal["left", "right"]]
"""Heading, width and alignment."""
_SPARK_CHARS: Final = "▁▂▃▄▅▆▇█"
_STATE_STYLES: Final = {"RUNNING": "green", "DISPATCHED": "cyan", "SCHEDULED": "blue", "PENDING": "yellow"}


def render(snapshot: TopSnapshot, width: int, height: int | None) -> Group:
    """`height` None means unlimited."""
    counts = {
        "shows": len(snapshot.shares),
        "pools": len(snapshot.pools),
        "workers": len(snapshot.workers),
        "jobs": len(snapshot.jobs),
    }
    rows = allocate_rows(counts, height)
    busiest = sorted(snapshot.workers, key=lambda worker: (-worker.frames, worker.pool, worker.name))
    sections = {
        "shows": _subscriptions_section(snapshot.shares[: rows["shows"]], counts["shows"], width),
        "pools": _pools_section(snapshot.pools[: rows["pools"]], counts["pools"], width),
        "workers": _workers_section(busiest[: rows["workers"]], counts["workers"], width),
        "jobs": _jobs_section(snapshot.jobs[: rows["jobs"]], counts["jobs"], width),
    }
    lines: list[Text | Table] = [
        _header_line(snapshot, width, is_live=height is not None),
        _counts_line(snapshot, width),
    ]
    for name, section in sections.items():
        if rows[name] or not counts[name]:
            lines += [Text(""), section]
    return Group(*lines)


def allocate_rows(counts: dict[str, int], height: int | None) -> dict[str, int]:
    """Rows for each section: all of them if they fit, otherwise shared evenly."""
    if height is None:
        return counts
    # Each section needs a blank line and a heading; an empty one needs one line for its message.
    left = max(0, height - 2 - 2 * len(counts) - sum(not n for n in counts.values()))
    rows = dict.fromkeys(counts, 0)
    while left and (unfilled := [name for name, n in counts.items() if rows[name] < n]):
        for name in unfilled[:left]:
            rows[name] += 1
        left -= min(left, len(unfilled))
    return rows


def _header_line(snapshot: TopSnapshot, width: int, *, is_live: bool) -> Text:
    text = Text.assemble(("rota top", "bold"), f"  {snapshot.at:%H:%M:%S}")
    if snapshot.problem:
        text.append(f"  {printable(snapshot.problem)}", "bold red")
    else:
        text.append(f"  read in {snapshot.took_ms:.0f} ms", "dim")
    hint = "q quits"
    if is_live and len(text) + len(hint) + 2 <= width:
        text.append(" " * (width - len(text) - len(hint))).append(hint, "dim")
    text.truncate(width, overflow="ellipsis")
    return text


def _counts_line(snapshot: TopSnapshot, width: int) -> Text:
    waiting = (f"{snapshot.waiting:,}", "yellow" if snapshot.waiting else "")
    running = (f"{snapshot.running:,}", "green" if snapshot.running else "")
    more = "+" if snapshot.live > 100_000 else ""
    text = Text.assemble("frames  ", waiting, " waiting  ", running, " on workers  ", f"{snapshot.ended:,} ended")
    text.append(f"   jobs  {min(snapshot.live, 100_000):,}{more} live")
    if snapshot.per_s is not None:
        text.append(f"   {snapshot.per_s:,.1f} frames/s ").append(
            _sparkline(snapshot.paces, max(0, width - len(text) - 1)), "cyan"
        )
    text.truncate(width, overflow="ellipsis")
    return text


def _sparkline(paces: Sequence[float], cells: int) -> str:
    shown = list(paces)[-min(cells, 30) :] if cells else []
    most = max(shown, default=0.0)
    if not most:
        return ""
    return "".join(_SPARK_CHARS[min(7, int(pace / most * 7.999))] for pace in shown)


def gauge(used: int, most: int, size: int, cells: int) -> Text:
    """A bar of `used` in `most`: green up to `size`, yellow beyond, red when full, with a divider at `size`."""
    if cells < 4:
        return Text("")
    if most <= 0:
        return Text("nothing may run".ljust(cells)[:cells], "dim")
    has_divider = 0 < size < most
    inner = cells - has_divider
    filled = min(inner, max(used * inner // most, int(used > 0)))
    end = size * inner // most if has_divider else inner
    colour = "red" if used >= most else "yellow" if has_divider and used > size else "green"
    text = Text()
    for first, last in ((0, end), (end, inner)):
        full = max(0, min(filled, last) - first)
        text.append("█" * full, colour).append("░" * (last - first - full), "dim")
        if has_divider and last == end:
            text.append("│", "bold")
    return text


def _section_table(columns: Sequence[Column], rows: Sequence[Sequence[Text | str]], width: int) -> Table:
    """Columns of width 0 are omitted."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), width=width, header_style="bold dim", show_edge=False)
    kept = [at for at, (_, cells, _) in enumerate(columns) if cells]
    for at in kept:
        heading, cells, justify = columns[at]
        table.add_column(heading, width=cells, justify=justify, no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[at] for at in kept))
    table.expand = True
    return table


def _subscriptions_section(shares: Sequence[SubscriptionUsage], of: int, width: int) -> Table | Text:
    if not of:
        return Text("There is no show yet: `rota show create NAME` creates one.", "dim")
    name = max(8, min(16, width // 6))
    gpus = 6 if any(share.gpus for share in shares) else 0
    cells = max(4, width - 2 * name - 12 - gpus - 8 - 9 - 5 - bool(gpus))
    columns: list[Column] = [
        (_heading("SHOW", len(shares), of), name, "left"),
        ("pool", name, "left"),
        ("share in use", cells, "left"),
        ("cores", 12, "right"),
        ("GPUs", gpus, "right"),
        ("frames", 8, "right"),
        ("waiting", 9, "right"),
    ]
    rows: list[list[Text | str]] = []
    seen_shows: set[str] = set()
    for share in shares:
        first = share.show not in seen_shows
        seen_shows.add(share.show)
        rows.append(
            [
                Text(printable(share.show), "" if first else "dim"),
                Text(printable(share.pool or "no share"), "" if share.pool else "dim"),
                gauge(share.cores, share.burst, share.size, cells) if share.pool else Text(""),
                f"{cores_text(share.cores)}/{cores_text(share.burst)}" if share.pool else "",
                str(share.gpus) if share.gpus else "",
                f"{share.frames:,}" if share.frames else "",
                Text(f"{share.waiting:,}", "yellow") if first and share.waiting else "",
            ]
        )
    return _section_table(columns, rows, width)


def _pools_section(pools: Sequence[PoolUsage], of: int, width: int) -> Table | Text:
    if not of:
        return Text("There is no pool yet: `rota pool create NAME` creates one.", "dim")
    name = max(8, min(16, width // 6))
    gpus = 8 if any(pool.gpus for pool in pools) else 0
    cells = max(4, width - 2 * name - 12 - gpus - 9 - 4 - bool(gpus))
    columns: list[Column] = [
        (_heading("POOL", len(pools), of), name, "left"),
        ("workers", name, "left"),
        ("cores in use", cells, "left"),
        ("cores", 12, "right"),
        ("GPUs", gpus, "right"),
        ("frames", 9, "right"),
    ]
    rows: list[list[Text | str]] = []
    for pool in pools:
        up = f"{pool.workers} up" if pool.workers else "none up"
        rows.append(
            [
                Text(printable(pool.name)),
                Text(up if pool.status == "active" else f"{up}, {pool.status}", "" if pool.workers else "red"),
                gauge(pool.cores_used, pool.cores, 0, cells) if pool.cores else Text(""),
                f"{cores_text(pool.cores_used)}/{cores_text(pool.cores)}" if pool.cores else "",
                f"{pool.gpus_used}/{pool.gpus}" if pool.gpus else "",
                f"{pool.frames:,}" if pool.frames else "",
            ]
        )
    return _section_table(columns, rows, width)


def _workers_section(workers: Sequence[WorkerRecord], of: int, width: int) -> Table | Text:
    if not of:
        return Text("No worker is up: `rota worker` starts one.", "dim")
    name = max(8, min(16, width // 6))
    gpus = 8 if any(worker.hello.gpus for worker in workers) else 0
    cells = max(4, width - 2 * name - 12 - gpus - 9 - 4 - bool(gpus))
    columns: list[Column] = [
        (_heading("WORKER", len(workers), of), name, "left"),
        ("pool", name, "left"),
        ("cores in use", cells, "left"),
        ("cores", 12, "right"),
        ("GPUs", gpus, "right"),
        ("frames", 9, "right"),
    ]
    rows: list[list[Text | str]] = []
    for worker in workers:
        registration = worker.hello
        rows.append(
            [
                Text(printable(worker.name)),
                Text(printable(worker.pool)),
                gauge(worker.cores, registration.cores, 0, cells),
                f"{cores_text(worker.cores)}/{cores_text(registration.cores)}",
                f"{worker.gpus}/{registration.gpus}" if registration.gpus else "",
                f"{worker.frames}/{registration.slots}" if registration.slots else str(worker.frames),
            ]
        )
    return _section_table(columns, rows, width)


def _jobs_section(jobs: Sequence[LiveJob], of: int, width: int) -> Table | Text:
    if not of:
        return Text("No job is live: `rota submit` creates one.", "dim")
    name = max(10, min(24, width // 5))
    show = max(8, min(14, width // 8))
    cells = max(4, width - name - show - 11 - 13 - 7 - 8 - 6)
    columns: list[Column] = [
        (_heading("JOB", len(jobs), of), name, "left"),
        ("show", show, "left"),
        ("state", 11, "left"),
        ("frames", cells, "left"),
        ("ended", 13, "right"),
        ("on", 7, "right"),
        ("for", 8, "right"),
    ]
    rows: list[list[Text | str]] = []
    now = datetime.now(UTC)
    for job in jobs:
        state = job.state.lower() if job.running or not job.reason else job.reason
        rows.append(
            [
                Text(printable(job.name)),
                Text(printable(job.show), "dim"),
                Text(printable(state), _STATE_STYLES.get(job.state, "")),
                _progress_bar(job, cells),
                f"{job.ended:,}/{job.frames:,}",
                f"{job.running:,}" if job.running else "",
                humanize_duration(max(0.0, (now - job.submitted_at).total_seconds())),
            ]
        )
    return _section_table(columns, rows, width)


def _progress_bar(job: LiveJob, cells: int) -> Text:
    """Green: succeeded. Red: ended otherwise. Cyan: running."""
    total, text, filled, so_far = max(1, job.frames), Text(), 0, 0
    for n, colour, char in (
        (job.succeeded, "green", "█"),
        (job.ended - job.succeeded, "red", "▓"),
        (job.running, "cyan", "▒"),
    ):
        so_far += n
        upto = min(cells, so_far * cells // total)
        text.append(char * (upto - filled), colour)
        filled = upto
    return text.append("░" * (cells - filled), "dim")


def _heading(title: str, shown: int, of: int) -> str:
    return title if shown == of else f"{title} {shown} of {of}"
