"""docs/reference/time-constants.md lists every time above one second in the code; the relations between them hold."""

import re
from pathlib import Path

import pytest

from rota.agents import scheduler
from rota.agents.recovery import zombies_and_orphans
from rota.cli.local import embedded_worker
from rota.engine.admission import decision, policy_call
from rota.engine.cluster import membership
from rota.engine.events import publisher as event_publisher
from rota.engine.events import server_presence
from rota.engine.recovery import reconciler
from rota.infra.blob_store import files, store
from rota.infra.lease import leadership
from rota.infra.nats import batch_consumer, connection, consumer, topology
from rota.infra.outbox import relay
from rota.infra.postgres import listen
from rota.infra.service import lifecycle
from rota.model.heartbeats import silent_after_s
from rota.model.settings import Settings, leaves
from rota.model.settings.servers import NatsSettings
from rota.model.units import format_duration
from rota.worker import result_reporter, worker
from tools.docs import time_constants

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "time-constants.md"
SETTING = re.compile(r"`([a-z_]+\.[a-z_.]+)`")
LEAST_MAX_AGE_S = leaves()["nats.max_age"].kind.least

RELATIONS = {
    "a dead worker's frames are queued again": (
        silent_after_s(Settings().worker.heartbeat_interval) + 2 * reconciler.TICK_INTERVAL_S,
        5.0,
    ),
    "an isolated server knows it first": (2.5 * membership.HEARTBEAT_INTERVAL_S, membership.HEARTBEAT_TIMEOUT_S),
    "workers reconnect before they are judged": (
        connection.RECONNECT_BACKOFF.longest_s + connection.DIAL_TIMEOUT_S,
        reconciler.FIRST_HEARTBEAT_TIMEOUT_S,
    ),
    "no event is published twice": (
        event_publisher.RESEND_WINDOW_S,
        min(spec.dedup_window_s for spec in topology.streams(NatsSettings(max_age=LEAST_MAX_AGE_S))),
    ),
    "servers are in the event stream": (server_presence.REPUBLISH_INTERVAL_S, topology.EVENTS_AGE_MAX_S),
    "agents do not overlap": (scheduler.LEASE_LOST_STOP_TIMEOUT_S, zombies_and_orphans.TAKEOVER_GRACE_S),
    "a local worker dies with `rota up`": (embedded_worker.KILL_TIMEOUT_S, lifecycle.CANCEL_GRACE_S),
    "files are written before they are removed": (store.FILE_TIMEOUT_S, files.TEMPORARY_AGE_MAX_S),
    "decisions arrive before they expire": (
        leaves()["safety.timeout"].kind.most + policy_call.KERNEL_MARGIN_S,
        decision.DECISION_TTL_S,
    ),
}
OUTAGE_PAUSES_S = {
    "services": lifecycle.OUTAGE_PAUSE_MAX_S,
    "leaders": leadership.CAMPAIGN_BACKOFF.longest_s,
    "listeners": listen.RECONNECT_BACKOFF.longest_s,
    "NATS connections": connection.RECONNECT_BACKOFF.longest_s,
    "NATS pulls": consumer.PULL_RETRY_BACKOFF.longest_s,
    "NATS handlers": batch_consumer.OUTAGE_BACKOFF.longest_s,
    "outbox": relay.RETRY_BACKOFF.longest_s,
    "events": event_publisher.PUBLISH_BACKOFF.longest_s,
    "results": result_reporter.PUBLISH_BACKOFF.longest_s,
    "registration": worker.REGISTRATION_BACKOFF.longest_s,
}


def rows():
    """Cells of the table of all constants."""
    part = PAGE.read_text().split("\n## All constants\n")[1]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in part.splitlines() if line[:3] == "| `"]


def test_every_time_constant_above_one_second_is_documented_with_its_value():
    found = {f"`{name}`": format_duration(seconds) for name, seconds in time_constants.constants().items()}
    listed = {row[0]: row[1] for row in rows()}
    missing = {name: value for name, value in found.items() if name not in listed}
    assert not missing, f"add rows that say what depends on them and why they are no settings: {missing}"
    assert listed == found


def test_every_row_says_what_depends_on_it_and_why_it_is_no_setting():
    assert all(len(row) == 4 and len(row[2]) > 5 and len(row[3]) > 5 for row in rows())


def test_page_names_existing_settings():
    sections = {path.partition(".")[0] for path in leaves()}
    named = {name for row in rows() for cell in row[2:] for name in SETTING.findall(cell)}
    assert len(named) > 20
    assert [name for name in sorted(named) if name.partition(".")[0] in sections and name not in leaves()] == []


@pytest.mark.parametrize("relation", RELATIONS)
def test_constants_that_depend_on_each_other_are_in_order(relation):
    smaller, larger = RELATIONS[relation]
    assert smaller < larger


@pytest.mark.parametrize("part", OUTAGE_PAUSES_S)
def test_pause_during_an_outage_lets_work_resume_within_ten_seconds(part):
    """Two of them may follow one another: a connection, then what uses it."""
    assert OUTAGE_PAUSES_S[part] <= 5.0


def test_scanner_finds_each_way_of_writing_a_time(tmp_path, monkeypatch):
    source = tmp_path / "sample.py"
    source.write_text(
        "A_S = 2 * 60\nB_MS: int = 1500\nC = timedelta(minutes=1)\nD_S, E_S = 3.0, 0.5\nF = Backoff(longest_s=9.0)\n"
        "class G:\n    idle_s: float = A_S / 2\ndef h(a, wait_s=4, *, ttl=5.0): run(timeout=6)\n"
        "I_S = A_S\nJ_BYTES = 99\n"
    )
    (tmp_path / "q.sql").write_text("SELECT interval '2 hours', interval '1 second'; SET lock_timeout = '7s'")
    monkeypatch.setattr(time_constants, "SOURCE", tmp_path)
    assert time_constants.constants() == {
        "sample.A_S": 120.0,
        "sample.B_MS": 1.5,
        "sample.C": 60.0,
        "sample.D_S": 3.0,
        "sample.F.longest_s": 9.0,
        "sample.G.idle_s": 60.0,
        "sample.h(wait_s)": 4.0,
        "sample.h(ttl)": 5.0,
        "sample.h().timeout": 6.0,
        "q.sql: 2 hours": 7200.0,
        "q.sql: 7 s": 7.0,
    }
