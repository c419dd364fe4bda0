"""Formats queues: tables and sentences for people, plain values for JSON. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from rota.cli.core.tables import CliPage, Table
from rota.cli.dlq.view import pluralize
from rota.model.units import humanize_duration
from rota.queue import CounterMode, QueueCounts, QueueInfo
from rota.queue.storage import RING_SLOTS
from rota.queue.storage_report import SIDE_TABLES, LongTransaction, SlotState, StorageState, TableSize

COUNT_FIELDS: Final = QueueCounts.__struct_fields__
NO_QUEUE: Final = "There is no queue yet: queueing the first frame creates one."
COUNTERS_OFF_NOTE: Final = (
    "Counters are not in use, so this count read every row: `rota queue rebuild-counts` rebuilds them."
)
MEGABYTE: Final = 1024 * 1024


def counts_page(counts: Mapping[str, QueueCounts], *, trusted: bool) -> CliPage:
    data = [{"queue": name, **msgspec.structs.asdict(each), "terminal": each.terminal} for name, each in counts.items()]
    rows = [(name, *msgspec.structs.astuple(each)) for name, each in counts.items()]
    if len(rows) > 1:
        rows.append(("(all)", *(sum(getattr(each, field) for each in counts.values()) for field in COUNT_FIELDS)))
    parts: list[str | Table] = [Table(("queue", *COUNT_FIELDS), rows) if rows else NO_QUEUE]
    if rows and not trusted:
        parts.append(COUNTERS_OFF_NOTE)
    return CliPage(data, parts)


def queues_page(queues: Sequence[QueueInfo], counts: Mapping[str, QueueCounts], ages_s: Mapping[str, float]) -> CliPage:
    rows, data = [], []
    for info in queues:
        counted, age_s = counts.get(info.queue, QueueCounts()), ages_s.get(info.queue)
        oldest = "-" if age_s is None else humanize_duration(age_s)
        kept = "dead letters" if info.dlq_on_fail else "retention"
        rows.append((info.queue, _state_text(info), counted.waiting, oldest, counted.running, info.shards, kept))
        fields = {"waiting": counted.waiting, "running": counted.running, "oldest_s": age_s}
        data.append(msgspec.structs.asdict(info) | fields)
    columns = ("queue", "state", "waiting", "oldest", "running", "shards", "failed frames go to")
    return CliPage(data, [Table(columns, rows) if rows else NO_QUEUE])


def _state_text(info: QueueInfo) -> str:
    return "paused" if info.paused else "open"


def paused_page(name: str, counts: QueueCounts, *, paused: bool, changed: bool) -> CliPage:
    data = {"queue": name, "paused": paused, "changed": changed, "waiting": counts.waiting, "running": counts.running}
    if not changed:
        return CliPage(data, [f"Nothing changed: queue {name} {'is already paused' if paused else 'is not paused'}."])
    if paused:
        return CliPage(
            data, [f"Paused queue {name}: {counts.waiting} wait until it is resumed, {counts.running} continue to run."]
        )
    return CliPage(data, [f"Resumed queue {name}: {counts.waiting} can be claimed."])


def rebuilt_page(
    counts: Mapping[str, QueueCounts], before: StorageState, mode: CounterMode, *, took_s: float
) -> CliPage:
    data = {"queues": len(counts), "counter_mode": mode, "was": before.counter_mode, "took_s": round(took_s, 4)}
    changed = f" (was {before.counter_mode})" if before.counter_mode != mode else ""
    if mode == "scan":
        return CliPage(data, [f"Counters are off{changed}: from now on every exact count reads all rows."])
    rebuilt = f"Rebuilt the counts of {pluralize(len(counts), 'queue')} in {humanize_duration(took_s)}"
    return CliPage(data, [f"{rebuilt}; the counter mode is {mode}{changed}, and the counters are trusted."])


def blocked_message(transactions: Sequence[LongTransaction]) -> str:
    session = f" ({_session_text(transactions[0])})" if transactions else ""
    return f"Counts cannot be rebuilt while a transaction that changed them is open{session}: end it, or retry later."


def storage_page(
    state: StorageState,
    slots: Sequence[SlotState],
    tables: Sequence[TableSize],
    transactions: Sequence[LongTransaction],
    configured_mode: CounterMode,
) -> CliPage:
    data = {
        **msgspec.structs.asdict(state),
        "slots": [msgspec.structs.asdict(slot) | {"state": slot_state_text(slot)} for slot in slots],
        "tables": tables,
        "sessions": transactions,
    }
    columns = ("slot", "generation", "state", "waiting", "running", "size", "held by")
    ring = Table(columns, [_slot_row(slot, transactions) for slot in slots])
    rows = [(t.name, SIDE_TABLES[t.name], t.rows, t.dead_rows, format_size(t.bytes)) for t in tables]
    side_tables = Table(("table", "holds", "rows about", "dead about", "size"), rows)
    return CliPage(
        data, [ring, "", side_tables, "", *_status_lines(state, configured_mode), *map(_session_effects, transactions)]
    )


def _slot_row(slot: SlotState, transactions: Iterable[LongTransaction]) -> tuple[object, ...]:
    holders = [str(session.pid) for session in transactions if slot.number in session.slots]
    state = slot_state_text(slot)
    name = "kept" if slot.number == RING_SLOTS else slot.number
    generation = "-" if slot.generation is None or state == "empty" else slot.generation
    return (name, generation, state, slot.waiting, slot.running, format_size(slot.bytes), ", ".join(holders))


def slot_state_text(slot: SlotState) -> str:
    """Open: new frames go here. Live: not all frames have ended. Ended: pruned next. Empty: free for reuse."""
    if slot.is_open:
        return "open"
    if slot.waiting or slot.running:
        return "live"
    return "ended" if slot.holds and slot.number < RING_SLOTS else "empty"


def _status_lines(state: StorageState, configured_mode: CounterMode) -> Iterator[str]:
    yield f"The open slot has been in use for {humanize_duration(state.open_s)}."
    if state.counter_mode == "scan":
        yield "Counters are off: every exact count reads all rows."
    else:
        trust = "are trusted" if state.counters_trusted else "are NOT trusted, so exact counts read all rows"
        deltas = f"{pluralize(state.pending_deltas, 'delta')} to be compacted"
        yield f"Counters ({state.counter_mode}) {trust}; {deltas}."
    if state.counter_mode != configured_mode:
        yield f"queue.counter_mode is {configured_mode}: `rota queue rebuild-counts` switches to it."
    elif not state.counters_trusted and configured_mode != "scan":
        yield "`rota queue rebuild-counts` rebuilds them."
    if state.keeper:
        yield f"Maintenance is done by {state.keeper.partition('/')[0]}."
    else:
        yield "No replica does maintenance (compaction, promotion, pruning): `rota up` starts one."


def _session_effects(session: LongTransaction) -> str:
    effects = []
    if session.pins:
        effects.append("dead rows stay and counters are only compacted")
    if session.slots:
        numbers = ", ".join(str(slot) for slot in session.slots)
        effects.append(f"{'slot' if len(session.slots) == 1 else 'slots'} {numbers} cannot be emptied")
    remedy = f"`SELECT pg_terminate_backend({session.pid})` ends it"
    return f"S{_session_text(session)[1:]}: {', and '.join(effects)} until it ends; {remedy}."


def _session_text(session: LongTransaction) -> str:
    doing = f", {session.state}" if session.state else ""
    age = humanize_duration(session.age_s)
    return f"session {session.pid} of {session.application or 'unknown'}, {age} in a transaction{doing}"


def format_size(number: int) -> str:
    return f"{number / MEGABYTE:.1f} MB" if number >= MEGABYTE else f"{number // 1024} kB"
