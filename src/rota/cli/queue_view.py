"""How the queue looks: tables and sentences for people, plain values for JSON. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from rota.cli.books_view import Page, Table
from rota.cli.dlq_view import several
from rota.model.units import span
from rota.queue import CounterMode, Counts, QueueInfo
from rota.queue.report import BESIDE_THE_RING, Session, SlotState, State, TableSize
from rota.queue.storage import RING

COUNTED: Final = Counts.__struct_fields__
NO_QUEUE: Final = "There is no queue yet: the first frame that is queued makes one."
SCANNED: Final = "Counters are not in use, so every row was read for this: `rota queue rebuild-counts` makes them anew."
MEGABYTE: Final = 1024 * 1024


def counts_page(counts: Mapping[str, Counts], *, trusted: bool) -> Page:
    data = [{"queue": name, **msgspec.structs.asdict(each), "terminal": each.terminal} for name, each in counts.items()]
    rows = [(name, *msgspec.structs.astuple(each)) for name, each in counts.items()]
    if len(rows) > 1:
        rows.append(("(all)", *(sum(getattr(each, field) for each in counts.values()) for field in COUNTED)))
    parts: list[str | Table] = [Table(("queue", *COUNTED), rows) if rows else NO_QUEUE]
    if rows and not trusted:
        parts.append(SCANNED)
    return Page(data, parts)


def queues_page(queues: Sequence[QueueInfo], counts: Mapping[str, Counts], ages_s: Mapping[str, float]) -> Page:
    rows, data = [], []
    for info in queues:
        counted, age_s = counts.get(info.queue, Counts()), ages_s.get(info.queue)
        oldest = "-" if age_s is None else span(age_s)
        kept = "dead letters" if info.dlq_on_fail else "retention"
        rows.append((info.queue, _word(info), counted.waiting, oldest, counted.running, info.shards, kept))
        told = {"waiting": counted.waiting, "running": counted.running, "oldest_s": age_s}
        data.append(msgspec.structs.asdict(info) | told)
    columns = ("queue", "state", "waiting", "oldest", "running", "shards", "failed frames go to")
    return Page(data, [Table(columns, rows) if rows else NO_QUEUE])


def _word(info: QueueInfo) -> str:
    return "paused" if info.paused else "open"


def paused_page(name: str, counts: Counts, *, paused: bool, changed: bool) -> Page:
    data = {"queue": name, "paused": paused, "changed": changed, "waiting": counts.waiting, "running": counts.running}
    if not changed:
        return Page(data, [f"Nothing changed: queue {name} {'is paused' if paused else 'is not paused'} already."])
    if paused:
        return Page(data, [f"Paused queue {name}: {counts.waiting} wait until it is resumed, {counts.running} run on."])
    return Page(data, [f"Resumed queue {name}: {counts.waiting} may be claimed."])


def rebuilt_page(counts: Mapping[str, Counts], before: State, mode: CounterMode, *, took_s: float) -> Page:
    data = {"queues": len(counts), "counter_mode": mode, "was": before.counter_mode, "took_s": round(took_s, 4)}
    changed = f" (was {before.counter_mode})" if before.counter_mode != mode else ""
    if mode == "scan":
        return Page(data, [f"Counters are off{changed}: every exact count reads all rows from now on."])
    anew = f"Counted {several(len(counts), 'queue')} anew in {span(took_s)}"
    return Page(data, [f"{anew}; the counters are kept as {mode}{changed} and are trusted."])


def in_the_way(held: Sequence[Session]) -> str:
    who = f" ({_session(held[0])})" if held else ""
    return f"Counts cannot be rebuilt while a transaction that changed them is open{who}: end it, or try again later."


def storage_page(
    state: State, slots: Sequence[SlotState], tables: Sequence[TableSize], held: Sequence[Session], wanted: CounterMode
) -> Page:
    data = {
        **msgspec.structs.asdict(state),
        "slots": [msgspec.structs.asdict(slot) | {"state": slot_word(slot)} for slot in slots],
        "tables": tables,
        "sessions": held,
    }
    columns = ("slot", "generation", "state", "waiting", "running", "size", "held by")
    ring = Table(columns, [_slot_row(slot, held) for slot in slots])
    rows = [(t.name, BESIDE_THE_RING[t.name], t.rows, t.dead_rows, size(t.bytes)) for t in tables]
    beside = Table(("table", "holds", "rows about", "dead about", "size"), rows)
    return Page(data, [ring, "", beside, "", *_standing(state, wanted), *map(_pinned, held)])


def _slot_row(slot: SlotState, held: Iterable[Session]) -> tuple[object, ...]:
    holders = [str(session.pid) for session in held if slot.number in session.slots]
    word = slot_word(slot)
    name = "kept" if slot.number == RING else slot.number
    generation = "-" if slot.generation is None or word == "empty" else slot.generation
    return (name, generation, word, slot.waiting, slot.running, size(slot.bytes), ", ".join(holders))


def slot_word(slot: SlotState) -> str:
    """Open: new frames go here. Live: something has not ended. Ended: pruned next. Empty: free for its next turn."""
    if slot.is_open:
        return "open"
    if slot.waiting or slot.running:
        return "live"
    return "ended" if slot.holds and slot.number < RING else "empty"


def _standing(state: State, wanted: CounterMode) -> Iterator[str]:
    yield f"The open slot has been in use for {span(state.open_s)}."
    if state.counter_mode == "scan":
        yield "Counters are off: every exact count reads all rows."
    else:
        trust = "are trusted" if state.counters_trusted else "are NOT trusted, so exact counts read all rows"
        deltas = f"{several(state.pending_deltas, 'delta')} to be folded"
        yield f"Counters ({state.counter_mode}) {trust}; {deltas}."
    if state.counter_mode != wanted:
        yield f"queue.counter_mode says {wanted}: `rota queue rebuild-counts` changes to that."
    elif not state.counters_trusted and wanted != "scan":
        yield "`rota queue rebuild-counts` counts anew."
    if state.keeper:
        yield f"Upkeep is done by {state.keeper.partition('/')[0]}."
    else:
        yield "Nobody does upkeep: nothing is folded, promoted or pruned until a replica runs; `rota up` starts one."


def _pinned(session: Session) -> str:
    effects = []
    if session.pins:
        effects.append("dead rows stay and counts are only compacted")
    if session.slots:
        numbers = ", ".join(str(slot) for slot in session.slots)
        effects.append(f"{'slot' if len(session.slots) == 1 else 'slots'} {numbers} cannot be emptied")
    remedy = f"`SELECT pg_terminate_backend({session.pid})` ends it"
    return f"S{_session(session)[1:]}: {', and '.join(effects)} while it lasts; {remedy}."


def _session(session: Session) -> str:
    doing = f", {session.state}" if session.state else ""
    return (
        f"session {session.pid} of {session.application or 'somebody'}, {span(session.age_s)} in a transaction{doing}"
    )


def size(number: int) -> str:
    return f"{number / MEGABYTE:.1f} MB" if number >= MEGABYTE else f"{number // 1024} kB"
