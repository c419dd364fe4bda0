"""The queue and its dead letters as an operator types them."""

import asyncio
import json
import os
import pty
import pwd
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import asyncpg
import psycopg
import pytest

from rota.cli.dlq import actions as dlq_actions
from rota.cli.dlq import commands as dlq_commands
from rota.cli.queue import commands as queue_commands
from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.model.errors import PostgresUnavailable
from rota.queue import DeadLetter, FailedFilter, FrameFailure, Queue, storage_report
from tests.support.commands import Terminal, rows
from tests.support.queue import Dispatcher, agreed, entry, sql

ROTA = str(Path(sys.executable).with_name("rota"))
ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
TRAIL = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")
LETTERS = sql("SELECT array_agg(reason ORDER BY dlq_id) FROM rota.dlq_entries")


@pytest.fixture
def typed(monkeypatch, capsys, tmp_path, database_url):
    """Neither Redis nor NATS are known: these commands need none."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROTA_POSTGRES_URL", database_url)
    return Terminal(monkeypatch, capsys)


@pytest.fixture
def queue(database):
    return Queue(database)


@pytest.fixture
async def dispatcher(database):
    return await Dispatcher(database).enlisted()


@pytest.fixture
async def failed(queue, dispatcher):
    """Eight failed frames: tokens of five of `film` that ran out of memory, and of three of `short` that timed out."""
    await queue.enqueue([entry("film", frames=5, payload=b'{"scene": "pond"}'), entry("short", frames=3)])
    film, short = await dispatcher.tokens(5), await dispatcher.tokens(3)
    await queue.fail([FrameFailure(token, "oom", "killed\nby the kernel") for token in film])
    await queue.fail([FrameFailure(token, "timeout") for token in short])
    return film, short


@pytest.fixture
async def letters(queue, failed, database):
    """The eight as dead letters 1 to 8, and a message as number 9."""
    await database.run(sql("ALTER TABLE rota.dlq_entries ALTER COLUMN dlq_id RESTART"))
    await queue.failed.move_to_dead_letters(FailedFilter())
    await queue.dead_letters.add(
        [DeadLetter(kind="message", reason="undecodable", cause="m1", queue="inbox", payload=b"\xff\x00")]
    )


async def trail(database):
    return [(row["actor"], row["action"], row["target"]) for row in await database.rows(TRAIL)]


async def standing(database):
    """Everything an act could change."""
    return await agreed(database), await database.value(LETTERS), await trail(database)


async def test_counts_are_told_for_all_queues_and_together(typed, queue, dispatcher):
    await queue.enqueue([entry("film", frames=10), entry("short", frames=4), entry("film", run_at=datetime.now(UTC))])
    await queue.complete(await dispatcher.tokens(3))
    await dispatcher.tokens(2)
    assert rows(await typed.out("queue counts")) == [
        "queue waiting running deferred completed failed cancelled dead",
        "film 5 2 1 3 0 0 0",
        "short 4 0 0 0 0 0 0",
        "(all) 9 2 1 3 0 0 0",
    ]
    assert rows(await typed.out("queue counts short film"))[1:3] == ["short 4 0 0 0 0 0 0", "film 5 2 1 3 0 0 0"]
    assert rows(await typed.out("queue counts film --fast"))[1] == "film 0 0 0 0 0 0 0", "nothing was folded yet"
    [film] = json.loads(await typed.out("queue counts film --json"))
    assert film.items() >= {"queue": "film", "waiting": 5, "running": 2, "completed": 3, "terminal": 3}.items()


async def test_counts_that_have_to_be_read_from_rows_say_so(typed, queue, database):
    await queue.enqueue([entry(frames=7)])
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    for line in ("queue counts", "queue counts --fast"):
        told = rows(await typed.out(line))
        assert told[1] == "film 7 0 0 0 0 0 0"
        assert "this count read every row: `rota queue rebuild-counts`" in told[-1]


async def test_the_list_tells_what_waits_for_how_long_and_where_failures_go(typed, queue, database):
    await queue.enqueue([entry("film", frames=3), entry("short")])
    await queue.ensure_queue("short", shards=1, dlq_on_fail=True)
    await queue.pause("short")
    await database.run(sql("UPDATE rota.ready_entries SET enqueued_at = clock_timestamp() - interval '10 minutes'"))
    assert rows(await typed.out("queue list")) == [
        "queue state waiting oldest running shards failed frames go to",
        "film open 3 10 min 0 4 retention",
        "short paused 1 - 0 1 dead letters",
    ]
    film, short = json.loads(await typed.out("queue list --json"))
    assert (film["queue"], film["paused"], film["oldest_s"] > 599) == ("film", False, True)
    assert (short["paused"], short["dlq_on_fail"], short["oldest_s"]) == (True, True, None)


async def test_nothing_is_claimed_between_pause_and_resume(typed, queue, dispatcher, database):
    await queue.enqueue([entry(frames=5)])
    await dispatcher.tokens(2)
    began = len(await trail(database))
    assert await typed.out("queue pause film") == "Paused queue film: 3 wait until it is resumed, 2 continue to run.\n"
    assert await dispatcher.tokens() == []
    assert await typed.out("queue pause film") == "Nothing changed: queue film is already paused.\n"
    told = json.loads(await typed.out("queue resume film --json"))
    assert told == {"queue": "film", "paused": False, "changed": True, "waiting": 3, "running": 2}
    assert len(await dispatcher.tokens()) == 3
    assert (await trail(database))[began:] == [(ME, "queue.pause", "queue:film"), (ME, "queue.resume", "queue:film")]


async def test_rebuilding_counts_mends_a_drift_and_sets_the_mode(typed, queue, dispatcher, database, monkeypatch):
    await queue.enqueue([entry(frames=9)])
    await queue.complete(await dispatcher.tokens(4))
    await database.run(sql("UPDATE rota.queue_terminal_count_deltas SET completed = 999 WHERE completed > 0"))
    told = await typed.out("queue rebuild-counts")
    assert told.startswith("Rebuilt the counts of 1 queue in ")
    assert told.endswith("; the counter mode is ledger, and the counters are trusted.\n")
    assert (await agreed(database))["film"]["completed"] == 4
    monkeypatch.setenv("ROTA_QUEUE_COUNTER_MODE", "upsert")
    assert "queue.counter_mode is upsert: `rota queue rebuild-counts`" in await typed.out("queue storage")
    assert "the counter mode is upsert (was ledger)" in await typed.out("queue rebuild-counts")
    monkeypatch.setenv("ROTA_QUEUE_COUNTER_MODE", "scan")
    assert "Counters are off (was upsert)" in await typed.out("queue rebuild-counts")
    assert (await database.rows(TRAIL))[-1]["action"] == "queue.rebuild_counts"


async def test_rebuilding_counts_names_who_is_in_the_way(typed, queue, database_url, monkeypatch):
    await queue.ensure_queue("film")
    monkeypatch.setenv("ROTA_POSTGRES_LOCK_TIMEOUT", "50ms")
    connection = await asyncpg.connect(database_url, server_settings={"application_name": "import"})
    await connection.execute("BEGIN; LOCK rota.queue_terminal_live_counts IN ROW EXCLUSIVE MODE; SELECT txid_current()")
    said = await typed("queue rebuild-counts")
    assert (said.status, said.out) == (1, "")
    assert f"(session {connection.get_server_pid()} of import, " in said.err
    assert said.err.endswith("end it, or retry later. [refused]\n")
    await connection.close()


@pytest.mark.new_database
async def test_the_storage_is_shown_slot_by_slot(typed, queue, dispatcher, database):
    await queue.enqueue([entry(frames=600)])
    await queue.complete((await dispatcher.tokens(100))[:99])
    told = rows(await typed.out("queue storage"))
    assert told[0] == "slot generation state waiting running size held by"
    assert told[1].startswith("0 7 open 500 1 ")
    assert told[2].startswith("1 - empty 0 0 ")
    assert told[8].startswith("kept - empty 0 0 ")
    assert any(line.startswith("done_entries failed frames ") for line in told)
    assert "Counters (ledger) are trusted; 3 deltas to be compacted." in told
    assert any(line.startswith("No replica does maintenance") for line in told)
    found = json.loads(await typed.out("queue storage --json"))
    assert (found["generation"], found["keeper"], found["pending_deltas"]) == (7, None, 3)
    assert [(slot["state"], slot["waiting"]) for slot in found["slots"][:2]] == [("open", 500), ("empty", 0)]
    await Leases(database, "render1:77").acquire([storage_report.MAINTENANCE_LEASE], kind="leader", ttl_s=60.0)
    assert "Maintenance is done by render1:77." in await typed.out("queue storage")
    await queue.rebuild_counts("scan")
    told = rows(await typed.out("queue storage"))
    assert told[1].startswith("0 7 open 500 1 "), "counted from the rows"
    assert "Counters are off: every exact count reads all rows." in told


async def test_sessions_that_hold_the_storage_up_are_named(typed, queue, database_url, monkeypatch):
    await queue.enqueue([entry()])
    monkeypatch.setattr(storage_report.long_transactions, "__defaults__", (0.0,))
    reader = await asyncpg.connect(database_url, server_settings={"application_name": "report"})
    await reader.execute("BEGIN; SELECT count(*) FROM rota.ready_entries_3")
    pinning = await asyncpg.connect(database_url, server_settings={"application_name": "backup"})
    await pinning.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    said = await typed.out("queue storage")
    pid, other = reader.get_server_pid(), pinning.get_server_pid()
    assert rows(said)[4].endswith(f"kB {pid}")
    assert f"Session {pid} of report, " in said
    assert f"idle in transaction: slot 3 cannot be emptied until it ends; `SELECT pg_terminate_backend({pid})`" in said
    assert f"Session {other} of backup, " in said
    assert "idle in transaction: dead rows stay and counters are only compacted until it ends;" in said
    found = json.loads(await typed.out("queue storage --json"))["sessions"]
    assert [(each["pid"], each["slots"], each["pins"]) for each in found] == [(pid, [3], False), (other, [], True)]
    await reader.close()
    await pinning.close()


async def test_failed_frames_and_dead_letters_are_listed_page_by_page(typed, letters, queue, dispatcher):
    told = rows(await typed.out("dlq list --limit 2"))
    assert told[0] == "id kind reason queue job frame attempt since error"
    assert told[1].startswith("1 frame oom film ")
    assert told[1].endswith("Z killed"), "the first line of the error"
    assert told[-1] == "2 of 9 dead letters; `--after 2` shows the next, `--limit` more."
    rest = json.loads(await typed.out("dlq list --after 2 --json"))
    assert [each["id"] for each in rest] == [3, 4, 5, 6, 7, 8, 9]
    assert all("payload" not in each for each in rest)
    assert [each["id"] for each in json.loads(await typed.out("dlq list --kind message --json"))] == [9]
    assert [each["id"] for each in json.loads(await typed.out("dlq list --queue short --json"))] == [6, 7, 8]
    assert [each["id"] for each in json.loads(await typed.out("dlq list --queue inbox --json"))] == [9]
    assert await typed.out("dlq list --older-than 1h") == "No dead letter matches.\n"
    assert await typed.out("dlq list --failed") == "No failed frame matches.\n"
    job = entry(frame=7)
    await queue.enqueue([job])
    await queue.fail([FrameFailure(token, "oom") for token in await dispatcher.tokens()])
    [found] = json.loads(await typed.out(f"dlq list --failed --job {job.job} --json"))
    assert (found["frame"], found["reason"], found["job"]) == (7, "oom", str(job.job))


async def test_one_of_them_is_shown_whole(typed, failed, letters):
    told = rows(await typed.out("dlq show 1"))
    assert {"id 1", "kind frame", "reason oom", "queue film", "attempt 1", 'payload {"scene": "pond"}'} <= set(told)
    assert told[-2:] == ["error killed", "by the kernel"]
    assert "payload 2 bytes of binary data; --json shows them in base64" in rows(await typed.out("dlq show 9"))
    assert json.loads(await typed.out("dlq show 9 --json"))["payload"] == "/wA="


async def test_a_failed_frame_is_shown_by_its_token(typed, failed):
    [token, *_], _ = failed
    assert f"id {token}" in rows(await typed.out(f"dlq show --failed {token}"))


@pytest.mark.parametrize(
    ("line", "number", "told", "after"),
    [
        ("dlq retry --queue film", 5, "Retried 5 dead letters: queued again", {"film": 0, "short": 3}),
        ("dlq retry --all", 8, "Retried 8 dead letters", {"film": 0, "short": 0}),
        ("dlq retry --reason oom --limit 2", 2, "Retried 2 dead letters", {"film": 3, "short": 3}),
        ("dlq retry 1 7 --kind frame", 2, "Retried 2 dead letters", {"film": 4, "short": 2}),
        ("dlq purge --reason timeout", 3, "Purged 3 dead letters.", {"film": 5, "short": 0}),
        ("dlq purge --kind message", 1, "Purged 1 dead letter.", {"film": 5, "short": 3}),
        ("dlq purge 2 9", 2, "Purged 2 dead letters.", {"film": 4, "short": 3}),
        ("dlq purge --queue film --limit 4", 4, "Purged 4 dead letters.", {"film": 1, "short": 3}),
        ("dlq purge --older-than 1h", 0, "No dead letter matches.", {"film": 5, "short": 3}),
    ],
)
async def test_dead_letters_are_previewed_exactly_and_then_retried_or_purged(
    typed, letters, database, line, number, told, after
):
    before = await standing(database)
    preview = json.loads(await typed.out(f"{line} --dry-run --json"))
    assert (preview["chosen"], preview["done"]) == (number, 0)
    assert await standing(database) == before
    assert told in await typed.out(f"{line} --yes")
    counts = await agreed(database)
    assert {queue: counts.get(queue, {}).get("dead", 0) for queue in after} == after
    retried = sum(each["deferred"] for each in counts.values())
    assert retried == (number if "retry" in line else 0)
    assert len(await trail(database)) - len(before[2]) == (number > 0)


async def test_the_trail_says_which_went_and_by_what_filter(typed, letters, database):
    await typed.out("dlq purge --queue film --reason oom --limit 2 --yes")
    entry = (await database.rows(TRAIL))[-1]
    assert (entry["actor"], entry["action"], entry["target"]) == (ME, "dlq.purge", "dead_letters")
    expected = {"given": {"queue": "film", "reason": "oom"}, "number": 2, "first_ids": [1, 2]}
    assert json.loads(entry["detail"]) == expected


@pytest.mark.parametrize(
    ("line", "number", "told", "field"),
    [
        ("dlq retry --failed --queue film", 5, "Retried 5 failed frames: queued again", "deferred"),
        ("dlq move --reason timeout", 3, "Moved 3 failed frames to the dead letters.", "dead"),
        ("dlq move --all", 8, "Moved 8 failed frames", "dead"),
        ("dlq discard --reason oom", 5, "Discarded 5 failed frames: no longer counted.", None),
        ("dlq discard --queue film --limit 1", 1, "Discarded 1 failed frame: no longer counted.", None),
    ],
)
async def test_failed_frames_are_previewed_exactly_and_then_retried_moved_or_discarded(
    typed, failed, database, line, number, told, field
):
    before = await standing(database)
    shown = await typed.out(f"{line} --dry-run")
    assert shown.startswith(f"{number} ")
    assert "would be" in shown
    assert await standing(database) == before
    assert told in await typed.out(f"{line} -y")
    counts = (await agreed(database)).values()
    assert sum(each["failed"] for each in counts) == 8 - number
    assert sum(each[field] for each in counts if field) == (number if field else 0)


async def test_ids_that_are_named_are_done_together_or_not_at_all(typed, letters, failed, queue, dispatcher, database):
    await queue.enqueue([entry(frames=2)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(tokens[0], "oom")])
    before = await standing(database)
    for line, why in (
        ("dlq retry 1 99", "There is no dead letter 99"),
        ("dlq retry 1 9", "Dead letter 9 is of kind message, and only frames can be retried here"),
        ("dlq retry 1 6 --queue film", "Dead letter 6 does not match the other filters"),
        ("dlq purge 1 99", "There is no dead letter 99"),
        (f"dlq retry --failed {tokens[0]} {tokens[1]}", f"{tokens[1]} is not a failed frame"),
        (f"dlq move {tokens[0]} {tokens[1]}", f"{tokens[1]} is not a failed frame"),
        (f"dlq discard {tokens[0]} --reason timeout", f"Failed frame {tokens[0]} does not match the other"),
        (f"dlq show --failed {tokens[1]}", f"{tokens[1]} is not a failed frame"),
    ):
        said = await typed(f"{line} --yes" if "show" not in line else line)
        assert (said.status, said.out, why in said.err) == (2, "", True), said.err
    assert await standing(database) == before


async def test_what_came_after_the_count_stays_and_what_left_is_told(typed, queue, database, database_url, monkeypatch):
    lost = [DeadLetter(kind="message", reason="lost", cause=cause) for cause in ("m1", "m2", "m3")]
    await queue.dead_letters.add(lost)

    def meanwhile(question):
        assert question == "Purge 3 dead letters?"
        with psycopg.connect(database_url) as connection:
            connection.execute("DELETE FROM rota.dlq_entries WHERE cause = 'm2'")
            connection.execute("INSERT INTO rota.dlq_entries (kind, reason, cause) VALUES ('message', 'lost', 'm4')")
        return True

    monkeypatch.setattr(dlq_actions, "_confirm", meanwhile)
    assert (
        await typed.out("dlq purge --reason lost")
        == "Purged 2 dead letters. 1 were removed by another process in the meantime.\n"
    )
    assert await database.value(sql("SELECT array_agg(cause) FROM rota.dlq_entries")) == ["m4"]


async def test_many_go_in_batches_and_an_end_between_two_leaves_the_rest(typed, letters, database, monkeypatch):
    monkeypatch.setattr(dlq_actions, "REMOVE_MAX", 3)
    batches = iter(range(10))

    def fail_in_the_second(place):
        if place == "dlq.after_batch_before_commit" and next(batches) == 1:
            raise PostgresUnavailable("PostgreSQL is gone.")

    began = len(await trail(database))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", fail_in_the_second)
        assert (await typed("dlq retry --all --yes")).status == 1
    assert (len(await database.value(LETTERS)), len(await trail(database)) - began) == (6, 1)
    assert "Retried 5 dead letters" in await typed.out("dlq retry --all --yes")
    assert (await agreed(database))["film"]["deferred"] == 5
    assert (await trail(database))[began:] == [(ME, "dlq.retry", "dead_letters")] * 3


async def test_a_kill_before_the_commit_changes_nothing(letters, database, database_url, spawn):
    before = await standing(database)
    environment = {"ROTA_POSTGRES_URL": database_url, "CRASH_AT": "dlq.after_batch_before_commit"}
    process = await spawn(None, argv=[ROTA, "dlq", "purge", "--queue", "film", "--yes"], env=environment)
    assert await process.wait() == failpoints.CRASH_EXIT_STATUS
    assert await standing(database) == before


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 6), ("n", 1, 9), ("", 1, 9)])
async def test_a_person_is_asked_first(letters, database, database_url, tmp_path, answer, status, left):
    """At a terminal, with the answer on its keyboard."""
    person, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(ROTA, "dlq", "purge", "--reason", "timeout", "--json"),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "ROTA_POSTGRES_URL": database_url},
    )
    os.write(person, f"{answer}\n".encode())
    out, errors = [said.decode() for said in await process.communicate()]
    os.close(person)
    os.close(terminal)
    assert process.returncode == status
    assert "Purge 3 dead letters? [y/N]" in errors
    assert len(await database.value(LETTERS)) == left
    if status == 0:
        assert json.loads(out)["done"] == 3
    else:
        assert (out, "Nothing was changed." in errors) == ("", True)


ID = "8e1c1109-56ac-4a88-b71c-5aae3ffb0708"


REFUSED = [
    ("queue counts flim", "There is no queue 'flim': did you mean film?"),
    ("queue counts film flim", "did you mean film?"),
    ("queue pause flim", "did you mean film?"),
    ("queue resume zzz", "There is no queue 'zzz': there are film, short."),
    ("dlq list --queue flim", "did you mean film?"),
    ("dlq retry --queue flim -y", "did you mean film?"),
    ("dlq retry --failed --queue shrot -y", "did you mean short?"),
    ("dlq move --queue flim -y", "did you mean film?"),
    ("dlq discard --queue flim -y", "did you mean film?"),
    ("dlq purge --queue flim -y", "did you mean film?"),
    ("dlq purge -y", "No dead letters are selected to purge: name ids, or filter by --kind, --queue,"),
    ("dlq purge --limit 5 -y", "No dead letters are selected to purge"),
    ("dlq discard -y", "No failed frames are selected to discard: name ids, or filter by --queue,"),
    ("dlq retry -y", "No dead letters are selected to retry: name ids, or filter by --queue, --reason, --job"),
    ("dlq move -y", "or use --all."),
    ("dlq purge --all -y", "has no option --all"),
    ("dlq retry --kind message -y", "Dead letters of kind message cannot be retried here"),
    ("dlq retry --failed --kind job -y", "--failed selects frames only"),
    ("dlq list --failed --kind saga", "--failed selects frames only"),
    ("dlq purge --kind frames -y", "did you mean frame?"),
    ("dlq retry 99 -y", "There is no dead letter 99: see `rota dlq list`"),
    ("dlq retry 0 -y", "'0' is not a valid id: use a whole number from 1"),
    ("dlq retry 1.5 -y", "'1.5' is not a valid id"),
    ("dlq retry -y -- -1", "'-1' is not a valid id"),
    ("dlq purge 99999999999999999999 -y", "is not a valid id"),
    ("dlq purge 9223372036854775808 -y", "is not a valid id"),
    ("dlq show x", "'x' is not a valid id"),
    ("dlq show 99", "There is no dead letter 99"),
    ("dlq retry 1 --limit 1 -y", "--limit applies to filters only"),
    ("dlq list --limit 0", "0 is not a valid number of entries to list: give a whole number from 1 to 10000."),
    ("dlq list --limit -3", "-3 is not a valid number of entries to list"),
    ("dlq list --limit 10001", "10001 is not a valid number of entries to list"),
    ("dlq list --after 0", "'0' is not a valid id"),
    ("dlq retry --all --limit 0 -y", "0 is not a valid number of dead letters"),
    ("dlq move --all --limit -1 -y", "-1 is not a valid number of failed frames"),
    ("dlq purge --older-than 0s -y", "'0s' is not a valid age: use a duration above 0, such as 30min, 12h or 7d."),
    ("dlq purge --older-than -1h -y", "'-1h' is not a valid duration: use a number with a unit"),
    ("dlq purge --older-than 7 -y", "'7' is not a valid duration: use a number with a unit"),
    ("dlq purge --older-than 999999999d -y", "is not a valid age"),
    ("dlq retry --job nope -y", "There is no job with the id or name 'nope'"),
    (f"dlq retry --job {ID} --reason {'x' * 101} -y", "use a code of 1 to 100 characters"),
    ("dlq retry --all", "Cannot ask whether to retry 8 dead letters without a terminal: use --yes, or --dry-run"),
    ("dlq purge --kind message --json", "Cannot ask whether to purge 1 dead letter"),
]


async def test_what_makes_no_sense_is_refused_in_a_sentence_and_changes_nothing(typed, letters, database):
    """One by one against the same letters: each of these costs a connection, and none leaves a trace."""
    before = await standing(database)
    for line, sentence in REFUSED:
        said = await typed(line)
        assert (line, said.status, said.out) == (line, 2, "")
        assert sentence in said.err
    assert await standing(database) == before


async def test_control_characters_do_not_reach_the_terminal(typed, queue, dispatcher):
    await queue.enqueue([entry()])
    await queue.fail([FrameFailure(token, "oom", "\x1b[2Jgone\a") for token in await dispatcher.tokens()])
    for line in ("dlq list --failed", "dlq list --queue \x1b[2J", "queue counts \x1b[2J"):
        said = await typed(line)
        assert "\x1b" not in said.out + said.err


async def test_what_is_empty_says_so(typed):
    assert "There is no queue yet" in await typed.out("queue counts")
    assert "There is no queue yet" in await typed.out("queue list")
    assert await typed.out("queue counts --json") == "[]\n"
    assert await typed.out("dlq list") == "No dead letter matches.\n"
    assert await typed.out("dlq list --json") == "[]\n"


async def test_without_a_server_or_a_schema_it_says_what_to_do(typed, monkeypatch, empty_database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", empty_database_url)
    said = await typed("queue counts")
    assert (said.status, "run `rota db migrate`" in said.err) == (1, True)
    monkeypatch.delenv("ROTA_POSTGRES_URL")
    said = await typed("dlq list")
    assert (said.status, "PostgreSQL is not configured: set postgres.url" in said.err) == (2, True)


def test_help_answers_before_anything_heavy_is_imported():
    script = (
        "import sys; from rota.cli.main import app; from typer.main import get_command; get_command(app);"
        "print(*{'asyncpg', 'prometheus_client', 'redis', 'nats', 'rich', 'rota.queue'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout == "\n"


@pytest.mark.parametrize("group", [queue_commands.queue_app, dlq_commands.dlq_app])
def test_every_command_says_what_it_is_for_and_can_print_json(group):
    for command in group.registered_commands:
        assert len(command.callback.__doc__) > 20, command.name
        assert "form" in command.callback.__annotations__, command.name
