"""Rota's streams and the workers' consumers, declared once for servers and workers.

One worker reads an assignment once, so JOBS (a work queue) deletes it on acknowledgement; assignments of a worker that
never returned expire after `JOBS_AGE_MAX_S`. SYS keeps messages for the configured time, because it may have several
readers. EVENTS is a convenience: a subscriber that was away for longer than an hour must query the API instead.
"""

from __future__ import annotations

from typing import Final
from uuid import UUID

import msgspec

from rota.infra.nats.streams import ConsumerSpec, StreamSpec
from rota.model.protocol import JOBS_SUBJECT
from rota.model.settings.servers import NatsSettings

JOBS_AGE_MAX_S: Final = 3600.0
ASSIGNMENT_ACK_WAIT_S: Final = 30.0
EVENTS_STREAM: Final = "EVENTS"
EVENTS_SUBJECT: Final = "event.told"
AUDIT_EVENTS_SUBJECT: Final = "event.audited"
SERVER_EVENTS_SUBJECT: Final = "event.server.*"
EVENTS_AGE_MAX_S: Final = 3600.0
EVENTS_BYTES_MAX: Final = 64 * 1024 * 1024


def streams(nats: NatsSettings) -> tuple[StreamSpec, StreamSpec]:
    """JOBS, from servers to workers, and SYS, from all processes to servers."""
    jobs = StreamSpec(
        name="JOBS",
        subjects=("job.>", "worker.*.jobs"),
        retention="workqueue",
        max_age_s=min(JOBS_AGE_MAX_S, nats.max_age),
        dedup_window_s=min(120.0, nats.max_age),
        replicas=nats.replicas,
    )
    system = StreamSpec(
        name="SYS",
        subjects=(
            *("sys.job.submit", "sys.job.gate", "sys.job.result", "sys.job.dlq"),
            *("sys.audit.>", "sys.workflow.notify"),
        ),
        max_age_s=nats.max_age,
        dedup_window_s=min(120.0, nats.max_age),
        replicas=nats.replicas,
    )
    return jobs, system


def events_stream(nats: NatsSettings) -> StreamSpec:
    """Live events of the servers, kept for an hour or up to `EVENTS_BYTES_MAX`."""
    return StreamSpec(
        name=EVENTS_STREAM,
        subjects=(EVENTS_SUBJECT, AUDIT_EVENTS_SUBJECT, SERVER_EVENTS_SUBJECT),
        max_age_s=min(EVENTS_AGE_MAX_S, nats.max_age),
        max_bytes=EVENTS_BYTES_MAX,
        dedup_window_s=min(120.0, nats.max_age),
        replicas=nats.replicas,
    )


def with_limits(spec: ConsumerSpec, nats: NatsSettings) -> ConsumerSpec:
    """A consumer of the servers, with the configured limits."""
    return msgspec.structs.replace(
        spec, ack_wait_s=nats.job_ack_wait, max_deliver=nats.max_deliver, max_ack_pending=nats.max_ack_pending
    )


def assignment_consumer(worker: UUID, forgotten_after_s: float) -> ConsumerSpec:
    """Assignments of one worker. NATS removes the consumer after `forgotten_after_s` without a reader."""
    return ConsumerSpec(
        stream="JOBS",
        durable=f"worker_{worker.hex}",
        filter=JOBS_SUBJECT.format(worker),
        ack_wait_s=ASSIGNMENT_ACK_WAIT_S,
        forgotten_after_s=forgotten_after_s,
    )
