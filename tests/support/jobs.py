"""Helpers for submission tests: a show, submissions, counts of the rows they write, and parts without events."""

from rota.accounting.admin import QuotaAdmin
from rota.accounting.service import AccountingService
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionPublisher
from rota.engine.events.sink import DiscardedEvents
from rota.model.jobs.submission import LayerSpec, Submission
from rota.queue import Queue
from tests.support.queue import EMPTY as EMPTY_QUEUE
from tests.support.queue import sql

NO_EVENTS = DiscardedEvents()
TABLES = (
    *(
        "scan",
        "output",
        "job",
        "layer",
        "job_done",
        "frame_end",
        "idempotency_key",
        "queue_class",
        "placement_class",
        "outbox",
    ),
    *("approval", "policy_word"),
    *("job_resource", "layer_resource", "subscription", "folder", "point", "dept", "show"),
)
EMPTY_AUDIT = """
SET session_replication_role = replica;
DELETE FROM rota.audit;
UPDATE rota.audit_head SET seq = 0, hash = decode(repeat('00', 32), 'hex');
SET session_replication_role = origin
"""
EMPTY = "; ".join([EMPTY_QUEUE, *(f"DELETE FROM rota.{table}" for table in TABLES), EMPTY_AUDIT])

LEFT = sql("""
SELECT (SELECT count(*) FROM rota.job) AS jobs, (SELECT count(*) FROM rota.layer) AS layers,
       (SELECT count(*) FROM rota.ready_entries) AS entries, (SELECT count(*) FROM rota.deferred_jobs) AS deferred,
       (SELECT count(*) FROM rota.idempotency_key) AS keys, (SELECT count(*) FROM rota.job_resource) AS job_caps,
       (SELECT count(*) FROM rota.layer_resource) AS layer_caps, (SELECT count(*) FROM rota.outbox) AS messages
""")


async def a_show(database, show="film", folders=("default", "shots"), depts=("default", "fx")):
    admin = QuotaAdmin(database)
    await admin.create_show(show, actor="ann")
    for folder in folders:
        await admin.create_folder(show, folder, actor="ann")
    for dept in depts:
        await admin.create_dept(dept, actor="ann")
    return admin


def task(name="noop", value=None, *, show="film", layer=None, **more):
    """A submission of one layer; `layer` has further fields of the layer."""
    return Submission(show=show, layers=(LayerSpec(task=name, input=value, **(layer or {})),), **more)


async def left(database):
    """Counts of the rows that a submission writes, without zeros."""
    row = await database.row(LEFT)
    return {name: count for name, count in row.items() if count}


def completions(database, accounting=None, events=NO_EVENTS):
    return CompletionPublisher(database, accounting or AccountingService(database, None), events)


def a_finisher(database, bus, accounting=None, **options):
    publisher, queue = completions(database, accounting), Queue(database)
    return Finisher(database, queue, publisher, JobCanceller(database, bus, queue, publisher), **options)
