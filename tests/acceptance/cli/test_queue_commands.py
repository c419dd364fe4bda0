"""Queue and dead letter commands of operators."""

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

from rota.api.admin import DeadLetter
from rota.cli.dlq import actions as dlq_actions
from rota.cli.dlq import commands as dlq_commands
from rota.cli.queue import commands as queue_commands
from rota.infra import failpoints
from rota.infra.lease import Leases
from rota.model.errors import PostgresUnavailable
from rota.queue import FailedFilter, FrameFailure, Queue, storage_report
from tests.support.commands import Terminal, rows
from tests.support.queue import Dispatcher, agreed, entry, sql

ROTA = str(Path(sys.executable).with_name("rota"))
ME = f"cli:{pwd.getpwuid(os.getuid()).pw_name}"
AUDIT = sql("SELECT actor, action, target, detail FROM rota.audit ORDER BY seq")
DEAD_LETTERS = sql("SELECT array_agg(reason ORDER BY dlq_id) FROM rota.dlq_entries")


@pytest.fixture
def cli(monkeypatch, capsys, tmp_path, database_url):
    """Without Redis and NATS URLs: these commands need neither."""
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
    """Tokens of eight failed frames: five of `film` (out of memory) and three of `short` (timeout)."""
    await queue.enqueue([entry("film", frames=5, payload=b'{"scene": "pond"}'), entry("short", frames=3)])
    film, short = await dispatcher.tokens(5), await dispatcher.tokens(3)
    await queue.fail([FrameFailure(token, "signal", "killed\nby the kernel") for token in film])
    await queue.fail([FrameFailure(token, "timeout") for token in short])
    return film, short


@pytest.fixture
async def dead_letters(queue, failed, database):
    """The eight failed frames as dead letters 1 to 8, and a message as number 9."""
    await database.run(sql("ALTER TABLE rota.dlq_entries ALTER COLUMN dlq_id RESTART"))
    await queue.failed.move_to_dead_letters(FailedFilter())
    await queue.dead_letters.add(
        [DeadLetter(kind="message", reason="unreadable_message", cause="m1", queue="inbox", payload=b"\xff\x00")]
    )


async def audit_entries(database):
    return [(row["actor"], row["action"], row["target"]) for row in await database.rows(AUDIT)]


async def snapshot(database):
    """All state that a command could change."""
    return await agreed(database), await database.value(DEAD_LETTERS), await audit_entries(database)


async def test_queue_counts_prints_each_queue_and_the_total(cli, queue, dispatcher):
    await queue.enqueue([entry("film", frames=10), entry("short", frames=4), entry("film", run_at=datetime.now(UTC))])
    await queue.complete(await dispatcher.tokens(3))
    await dispatcher.tokens(2)
    assert rows(await cli.out("queue counts")) == [
        "queue waiting running deferred completed failed cancelled dead",
        "film 5 2 1 3 0 0 0",
        "short 4 0 0 0 0 0 0",
        "(all) 9 2 1 3 0 0 0",
    ]
    assert rows(await cli.out("queue counts short film"))[1:3] == ["short 4 0 0 0 0 0 0", "film 5 2 1 3 0 0 0"]
    assert rows(await cli.out("queue counts film --fast"))[1] == "film 0 0 0 0 0 0 0", "no delta was compacted yet"
    [film] = json.loads(await cli.out("queue counts film --json"))
    assert film.items() >= {"queue": "film", "waiting": 5, "running": 2, "completed": 3, "terminal": 3}.items()


async def test_queue_counts_with_untrusted_counters_says_it_read_rows(cli, queue, database):
    await queue.enqueue([entry(frames=7)])
    await database.run(sql("UPDATE rota.queue_storage SET counters_trusted = false"))
    for line in ("queue counts", "queue counts --fast"):
        printed = rows(await cli.out(line))
        assert printed[1] == "film 7 0 0 0 0 0 0"
        assert "this count read every row: `rota queue rebuild-counts`" in printed[-1]


async def test_queue_list_shows_waiting_age_and_failure_destination(cli, queue, database):
    await queue.enqueue([entry("film", frames=3), entry("short")])
    await queue.ensure_queue("short", shards=1, dlq_on_fail=True)
    await queue.pause("short")
    await database.run(sql("UPDATE rota.ready_entries SET enqueued_at = clock_timestamp() - interval '10 minutes'"))
    assert rows(await cli.out("queue list")) == [
        "queue state waiting oldest running shards failed frames go to",
        "film open 3 10 min 0 4 retention",
        "short paused 1 - 0 1 dead letters",
    ]
    film, short = json.loads(await cli.out("queue list --json"))
    assert (film["queue"], film["paused"], film["oldest_s"] > 599) == ("film", False, True)
    assert (short["paused"], short["dlq_on_fail"], short["oldest_s"]) == (True, True, None)


async def test_paused_queue_is_not_claimed_until_resumed(cli, queue, dispatcher, database):
    await queue.enqueue([entry(frames=5)])
    await dispatcher.tokens(2)
    began = len(await audit_entries(database))
    assert await cli.out("queue pause film") == "Paused queue film: 3 wait until it is resumed, 2 continue to run.\n"
    assert await dispatcher.tokens() == []
    assert await cli.out("queue pause film") == "Nothing changed: queue film is already paused.\n"
    printed = json.loads(await cli.out("queue resume film --json"))
    assert printed == {"queue": "film", "paused": False, "changed": True, "waiting": 3, "running": 2}
    assert len(await dispatcher.tokens()) == 3
    assert (await audit_entries(database))[began:] == [
        (ME, "queue.pause", "queue:film"),
        (ME, "queue.resume", "queue:film"),
    ]


async def test_rebuild_counts_repairs_drift_and_sets_the_mode(cli, queue, dispatcher, database, monkeypatch):
    await queue.enqueue([entry(frames=9)])
    await queue.complete(await dispatcher.tokens(4))
    await database.run(sql("UPDATE rota.queue_terminal_count_deltas SET completed = 999 WHERE completed > 0"))
    printed = await cli.out("queue rebuild-counts")
    assert printed.startswith("Rebuilt the counts of 1 queue in ")
    assert printed.endswith("; the counter mode is ledger, and the counters are trusted.\n")
    assert (await agreed(database))["film"]["completed"] == 4
    monkeypatch.setenv("ROTA_QUEUE_COUNTER_MODE", "scan")
    assert "queue.counter_mode is scan: `rota queue rebuild-counts`" in await cli.out("queue storage")
    assert "Counters are off (was ledger)" in await cli.out("queue rebuild-counts")
    monkeypatch.setenv("ROTA_QUEUE_COUNTER_MODE", "ledger")
    assert "the counter mode is ledger (was scan)" in await cli.out("queue rebuild-counts")
    assert (await database.rows(AUDIT))[-1]["action"] == "queue.rebuild_counts"


async def test_rebuild_counts_names_the_blocking_session(cli, queue, database_url, monkeypatch):
    await queue.ensure_queue("film")
    monkeypatch.setenv("ROTA_POSTGRES_LOCK_TIMEOUT", "50ms")
    connection = await asyncpg.connect(database_url, server_settings={"application_name": "import"})
    await connection.execute("BEGIN; LOCK rota.queue_terminal_live_counts IN ROW EXCLUSIVE MODE; SELECT txid_current()")
    result = await cli("queue rebuild-counts")
    assert (result.status, result.out) == (1, "")
    assert f"(session {connection.get_server_pid()} of import, " in result.err
    assert result.err.endswith("end it, or retry later. [refused]\n")
    await connection.close()


@pytest.mark.new_database
async def test_queue_storage_shows_each_slot(cli, queue, dispatcher, database):
    await queue.enqueue([entry(frames=600)])
    await queue.complete((await dispatcher.tokens(100))[:99])
    printed = rows(await cli.out("queue storage"))
    assert printed[0] == "slot generation state waiting running size held by"
    assert printed[1].startswith("0 7 open 500 1 ")
    assert printed[2].startswith("1 - empty 0 0 ")
    assert printed[8].startswith("kept - empty 0 0 ")
    assert any(line.startswith("done_entries failed frames ") for line in printed)
    assert "Counters (ledger) are trusted; 3 deltas to be compacted." in printed
    assert any(line.startswith("No replica does maintenance") for line in printed)
    found = json.loads(await cli.out("queue storage --json"))
    assert (found["generation"], found["keeper"], found["pending_deltas"]) == (7, None, 3)
    assert [(slot["state"], slot["waiting"]) for slot in found["slots"][:2]] == [("open", 500), ("empty", 0)]
    await Leases(database, "render1:77").acquire([storage_report.MAINTENANCE_LEASE], kind="leader", ttl_s=60.0)
    assert "Maintenance is done by render1:77." in await cli.out("queue storage")
    await queue.rebuild_counts("scan")
    printed = rows(await cli.out("queue storage"))
    assert printed[1].startswith("0 7 open 500 1 "), "the counts must be read from the rows"
    assert "Counters are off: every exact count reads all rows." in printed


async def test_queue_storage_names_blocking_sessions(cli, queue, database_url, monkeypatch):
    await queue.enqueue([entry()])
    monkeypatch.setattr(storage_report.long_transactions, "__defaults__", (0.0,))
    reader = await asyncpg.connect(database_url, server_settings={"application_name": "report"})
    await reader.execute("BEGIN; SELECT count(*) FROM rota.ready_entries_3")
    pinning = await asyncpg.connect(database_url, server_settings={"application_name": "backup"})
    await pinning.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1")
    result = await cli.out("queue storage")
    pid, other = reader.get_server_pid(), pinning.get_server_pid()
    assert rows(result)[4].endswith(f"kB {pid}")
    assert f"Session {pid} of report, " in result
    assert (
        f"idle in transaction: slot 3 cannot be emptied until it ends; `SELECT pg_terminate_backend({pid})`" in result
    )
    assert f"Session {other} of backup, " in result
    assert "idle in transaction: dead rows stay and counters are only compacted until it ends;" in result
    found = json.loads(await cli.out("queue storage --json"))["sessions"]
    assert [(each["pid"], each["slots"], each["pins"]) for each in found] == [(pid, [3], False), (other, [], True)]
    await reader.close()
    await pinning.close()


async def test_dlq_list_pages_failed_frames_and_dead_letters(cli, dead_letters, queue, dispatcher):
    printed = rows(await cli.out("dlq list --limit 2"))
    assert printed[0] == "id kind reason queue job frame attempt since error"
    assert printed[1].startswith("1 frame signal film ")
    assert printed[1].endswith("Z killed"), "only the first line of the error is shown"
    assert printed[-1] == "2 of 9 dead letters; `--after 2` shows the next, `--limit` more."
    rest = json.loads(await cli.out("dlq list --after 2 --json"))
    assert [each["id"] for each in rest] == [3, 4, 5, 6, 7, 8, 9]
    assert all("payload" not in each for each in rest)
    assert [each["id"] for each in json.loads(await cli.out("dlq list --kind message --json"))] == [9]
    assert [each["id"] for each in json.loads(await cli.out("dlq list --queue short --json"))] == [6, 7, 8]
    assert [each["id"] for each in json.loads(await cli.out("dlq list --queue inbox --json"))] == [9]
    assert await cli.out("dlq list --older-than 1h") == "No dead letter matches.\n"
    assert await cli.out("dlq list --failed") == "No failed frame matches.\n"
    job = entry(frame=7)
    await queue.enqueue([job])
    await queue.fail([FrameFailure(token, "signal") for token in await dispatcher.tokens()])
    [found] = json.loads(await cli.out(f"dlq list --failed --job {job.job} --json"))
    assert (found["frame"], found["reason"], found["job"]) == (7, "signal", str(job.job))


async def test_dlq_show_prints_all_fields(cli, failed, dead_letters):
    printed = rows(await cli.out("dlq show 1"))
    assert {"id 1", "kind frame", "reason signal", "queue film", "attempt 1", 'payload {"scene": "pond"}'} <= set(
        printed
    )
    assert printed[-2:] == ["error killed", "by the kernel"]
    assert "payload 2 bytes of binary data; --json shows them in base64" in rows(await cli.out("dlq show 9"))
    assert json.loads(await cli.out("dlq show 9 --json"))["payload"] == "/wA="


async def test_dlq_show_failed_accepts_a_token(cli, failed):
    [token, *_], _ = failed
    assert f"id {token}" in rows(await cli.out(f"dlq show --failed {token}"))


@pytest.mark.parametrize(
    ("line", "number", "printed", "after"),
    [
        ("dlq retry --queue film", 5, "Retried 5 dead letters: queued again", {"film": 0, "short": 3}),
        ("dlq retry --all", 8, "Retried 8 dead letters", {"film": 0, "short": 0}),
        ("dlq retry --reason signal --limit 2", 2, "Retried 2 dead letters", {"film": 3, "short": 3}),
        ("dlq retry 1 7 --kind frame", 2, "Retried 2 dead letters", {"film": 4, "short": 2}),
        ("dlq purge --reason timeout", 3, "Purged 3 dead letters.", {"film": 5, "short": 0}),
        ("dlq purge --kind message", 1, "Purged 1 dead letter.", {"film": 5, "short": 3}),
        ("dlq purge 2 9", 2, "Purged 2 dead letters.", {"film": 4, "short": 3}),
        ("dlq purge --queue film --limit 4", 4, "Purged 4 dead letters.", {"film": 1, "short": 3}),
        ("dlq purge --older-than 1h", 0, "No dead letter matches.", {"film": 5, "short": 3}),
    ],
)
async def test_dead_letter_dry_run_matches_the_actual_retry_or_purge(
    cli, dead_letters, database, line, number, printed, after
):
    before = await snapshot(database)
    preview = json.loads(await cli.out(f"{line} --dry-run --json"))
    assert (preview["chosen"], preview["done"]) == (number, 0)
    assert await snapshot(database) == before
    assert printed in await cli.out(f"{line} --yes")
    counts = await agreed(database)
    assert {queue: counts.get(queue, {}).get("dead", 0) for queue in after} == after
    retried = sum(each["deferred"] for each in counts.values())
    assert retried == (number if "retry" in line else 0)
    assert len(await audit_entries(database)) - len(before[2]) == (number > 0)


async def test_dlq_purge_audit_entry_has_filter_and_ids(cli, dead_letters, database):
    await cli.out("dlq purge --queue film --reason signal --limit 2 --yes")
    entry = (await database.rows(AUDIT))[-1]
    assert (entry["actor"], entry["action"], entry["target"]) == (ME, "dlq.purge", "dead_letters")
    expected = {"given": {"queue": "film", "reason": "signal"}, "number": 2, "first_ids": [1, 2]}
    assert json.loads(entry["detail"]) == expected


@pytest.mark.parametrize(
    ("line", "number", "printed", "field"),
    [
        ("dlq retry --failed --queue film", 5, "Retried 5 failed frames: queued again", "deferred"),
        ("dlq move --reason timeout", 3, "Moved 3 failed frames to the dead letters.", "dead"),
        ("dlq move --all", 8, "Moved 8 failed frames", "dead"),
        ("dlq discard --reason signal", 5, "Discarded 5 failed frames: no longer counted.", None),
        ("dlq discard --queue film --limit 1", 1, "Discarded 1 failed frame: no longer counted.", None),
    ],
)
async def test_failed_frame_dry_run_matches_the_actual_retry_move_or_discard(
    cli, failed, database, line, number, printed, field
):
    before = await snapshot(database)
    shown = await cli.out(f"{line} --dry-run")
    assert shown.startswith(f"{number} ")
    assert "would be" in shown
    assert await snapshot(database) == before
    assert printed in await cli.out(f"{line} -y")
    counts = (await agreed(database)).values()
    assert sum(each["failed"] for each in counts) == 8 - number
    assert sum(each[field] for each in counts if field) == (number if field else 0)


async def test_named_ids_are_processed_all_or_nothing(cli, dead_letters, failed, queue, dispatcher, database):
    await queue.enqueue([entry(frames=2)])
    tokens = await dispatcher.tokens()
    await queue.fail([FrameFailure(tokens[0], "signal")])
    before = await snapshot(database)
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
        result = await cli(f"{line} --yes" if "show" not in line else line)
        assert (result.status, result.out, why in result.err) == (2, "", True), result.err
    assert await snapshot(database) == before


async def test_dlq_purge_ignores_later_entries_and_reports_removed_ones(
    cli, queue, database, database_url, monkeypatch
):
    lost = [DeadLetter(kind="message", reason="deliveries_exhausted", cause=cause) for cause in ("m1", "m2", "m3")]
    await queue.dead_letters.add(lost)

    def meanwhile(question):
        assert question == "Purge 3 dead letters?"
        with psycopg.connect(database_url) as connection:
            connection.execute("DELETE FROM rota.dlq_entries WHERE cause = 'm2'")
            connection.execute(
                "INSERT INTO rota.dlq_entries (kind, reason, cause) VALUES ('message', 'deliveries_exhausted', 'm4')"
            )
        return True

    monkeypatch.setattr(dlq_actions, "_confirm", meanwhile)
    assert (
        await cli.out("dlq purge --reason deliveries_exhausted")
        == "Purged 2 dead letters. 1 were removed by another process in the meantime.\n"
    )
    assert await database.value(sql("SELECT array_agg(cause) FROM rota.dlq_entries")) == ["m4"]


async def test_dlq_retry_in_batches_keeps_the_rest_after_a_failure(cli, dead_letters, database, monkeypatch):
    monkeypatch.setattr(dlq_actions, "REMOVE_MAX", 3)
    batches = iter(range(10))

    def fail_in_second_batch(failpoint):
        if failpoint == "dlq.after_batch_before_commit" and next(batches) == 1:
            raise PostgresUnavailable("PostgreSQL is gone.")

    began = len(await audit_entries(database))
    with monkeypatch.context() as patch:
        patch.setattr(failpoints, "hit", fail_in_second_batch)
        assert (await cli("dlq retry --all --yes")).status == 1
    assert (len(await database.value(DEAD_LETTERS)), len(await audit_entries(database)) - began) == (6, 1)
    assert "Retried 5 dead letters" in await cli.out("dlq retry --all --yes")
    assert (await agreed(database))["film"]["deferred"] == 5
    assert (await audit_entries(database))[began:] == [(ME, "dlq.retry", "dead_letters")] * 3


async def test_dlq_purge_killed_before_commit_changes_nothing(dead_letters, database, database_url, spawn):
    before = await snapshot(database)
    environment = {"ROTA_POSTGRES_URL": database_url, "CRASH_AT": "dlq.after_batch_before_commit"}
    process = await spawn(None, argv=[ROTA, "dlq", "purge", "--queue", "film", "--yes"], env=environment)
    assert await process.wait() == failpoints.CRASH_EXIT_STATUS
    assert await snapshot(database) == before


@pytest.mark.parametrize(("answer", "status", "left"), [("y", 0, 6), ("n", 1, 9), ("", 1, 9)])
async def test_dlq_purge_asks_for_confirmation_in_a_terminal(
    dead_letters, database, database_url, tmp_path, answer, status, left
):
    """Runs in a pseudo-terminal and types the answer."""
    keyboard, terminal = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(ROTA, "dlq", "purge", "--reason", "timeout", "--json"),
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "ROTA_POSTGRES_URL": database_url},
    )
    os.write(keyboard, f"{answer}\n".encode())
    out, errors = [result.decode() for result in await process.communicate()]
    os.close(keyboard)
    os.close(terminal)
    assert process.returncode == status
    assert "Purge 3 dead letters? [y/N]" in errors
    assert len(await database.value(DEAD_LETTERS)) == left
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


async def test_invalid_queue_command_prints_one_error_and_changes_nothing(cli, dead_letters, database):
    """All lines run against the same dead letters, because setup is costly and none may change anything."""
    before = await snapshot(database)
    for line, sentence in REFUSED:
        result = await cli(line)
        assert (line, result.status, result.out) == (line, 2, "")
        assert sentence in result.err
    assert await snapshot(database) == before


async def test_control_characters_in_errors_are_not_printed(cli, queue, dispatcher):
    await queue.enqueue([entry()])
    await queue.fail([FrameFailure(token, "signal", "\x1b[2Jgone\a") for token in await dispatcher.tokens()])
    for line in ("dlq list --failed", "dlq list --queue \x1b[2J", "queue counts \x1b[2J"):
        result = await cli(line)
        assert "\x1b" not in result.out + result.err


async def test_empty_queue_and_dlq_lists_say_so(cli):
    assert "There is no queue yet" in await cli.out("queue counts")
    assert "There is no queue yet" in await cli.out("queue list")
    assert await cli.out("queue counts --json") == "[]\n"
    assert await cli.out("dlq list") == "No dead letter matches.\n"
    assert await cli.out("dlq list --json") == "[]\n"


async def test_missing_schema_or_url_error_names_the_fix(cli, monkeypatch, empty_database_url):
    monkeypatch.setenv("ROTA_POSTGRES_URL", empty_database_url)
    result = await cli("queue counts")
    assert (result.status, "run `rota db migrate`" in result.err) == (1, True)
    monkeypatch.delenv("ROTA_POSTGRES_URL")
    result = await cli("dlq list")
    assert (result.status, "PostgreSQL is not configured: set postgres.url" in result.err) == (2, True)


def test_help_imports_no_heavy_modules():
    script = (
        "import sys; from rota.cli.main import app; from typer.main import get_command; get_command(app);"
        "print(*{'asyncpg', 'prometheus_client', 'redis', 'nats', 'rich', 'rota.queue'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, text=True).stdout == "\n"


@pytest.mark.parametrize("group", [queue_commands.queue_app, dlq_commands.dlq_app])
def test_queue_commands_have_help_and_json_output(group):
    for command in group.registered_commands:
        assert len(command.callback.__doc__) > 20, command.name
        assert "form" in command.callback.__annotations__, command.name
