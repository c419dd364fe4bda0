"""Publishes servers that join and leave, and detects servers that died with unpublished events.

A server that dies loses the events in its queue. Their number is unknown, but the death can be detected: each server
publishes on a subject of its own that it came and, after its last event, that it is gone. If the latter is missing and
the server's heartbeats have stopped, the leader publishes that it was lost, with a `reset` for the missing events. This
also holds when all servers died: the first one to return does it.

The stream deletes messages after an hour, so each server repeats its presence with an empty message. A paused server is
reported as lost, too: its heartbeats stopped, and events it publishes after waking up come after the `reset`.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import sha256
from typing import Final

import structlog

from rota.engine.cluster.membership import HEARTBEAT_TIMEOUT_S, ClusterMembership
from rota.infra.clock import Clock, SystemClock
from rota.infra.nats import Bus, BusMessage
from rota.infra.nats.topology import EVENTS_STREAM, SERVER_EVENTS_SUBJECT
from rota.infra.service import Lifecycle
from rota.model.errors import InvalidInput, NatsUnavailable
from rota.model.events import RESET_KIND, EventGroup, EventMessage
from rota.model.protocol import decode, encode

log = structlog.get_logger(__name__)
REPUBLISH_INTERVAL_S: Final = 15 * 60.0
RETRY_INTERVAL_S: Final = 1.0
CAME, GONE, LOST = "server.came", "server.gone", "server.lost"


class ServerPresence:
    """`run` publishes for this server and must outlive its event publisher; the leader calls `report_lost_servers`."""

    def __init__(self, bus: Bus, members: ClusterMembership, clock: Clock | None = None) -> None:
        self.bus = bus
        self.members = members
        self._clock = clock or SystemClock()
        self._closed_subjects: set[str] = set()
        """Subjects whose last message is final; a name belongs to one process."""

    async def run(self, life: Lifecycle) -> None:
        published = await self._publish([self._event_group(CAME, self.members.name)])
        life.ready()
        while await life.pause(REPUBLISH_INTERVAL_S if published else RETRY_INTERVAL_S):
            published = await self._publish([] if published else [self._event_group(CAME, self.members.name)])
        await self._publish([self._event_group(GONE, self.members.name)])

    async def report_lost_servers(self) -> list[str]:
        """Publish which servers died without signing off; returns their subjects."""
        since, now_s = self.members.hears_itself_since, self._clock.monotonic()
        if since is None or self.members.is_isolated() or now_s - since < 2 * HEARTBEAT_TIMEOUT_S:
            return []
        present = {subject_of(name) for name in self.members.live_replicas()}
        known = set(await self.bus.subjects(EVENTS_STREAM, SERVER_EVENTS_SUBJECT))
        self._closed_subjects = (self._closed_subjects & known) - present
        silent = known - present - self._closed_subjects
        return [subject for subject in sorted(silent) if await self._report_if_lost(subject)]

    async def _report_if_lost(self, subject: str) -> bool:
        last = await self.bus.last_message(EVENTS_STREAM, subject)
        # A server that has just joined sends its first heartbeat a moment later.
        if last is None or self._clock.now_ms() - last.stored_ns // 1_000_000 < 2000 * HEARTBEAT_TIMEOUT_S:
            return False
        self._closed_subjects.add(subject)
        published = EventMessage([])
        with suppress(InvalidInput):
            published = decode(EventMessage, last.data)
        if published.groups and published.groups[0].kind in (GONE, LOST):
            return False
        name = published.server
        groups = [
            self._event_group(LOST, name),
            EventGroup(RESET_KIND, self._clock.now_ms(), facts={"because": "server_lost"}),
        ]
        log.warning("server_lost", server=name or subject)
        # Two leaders that report the same loss use the same id: NATS drops one as a duplicate.
        message = BusMessage(
            subject=subject, data=encode(EventMessage(groups, server=name)), msg_id=f"lost:{subject}:{last.stream_seq}"
        )
        await self.bus.publish(message)
        return True

    async def _publish(self, groups: list[EventGroup]) -> bool:
        subject = subject_of(self.members.name)
        msg_id = f"{subject}:{self._clock.now_ms()}"
        try:
            await self.bus.publish(
                BusMessage(subject=subject, data=encode(EventMessage(groups, server=self.members.name)), msg_id=msg_id)
            )
        except NatsUnavailable as error:
            log.info("server_presence_publish_failed", reason=error.sentence)
            return False
        return True

    def _event_group(self, kind: str, name: str) -> EventGroup:
        return EventGroup(kind, self._clock.now_ms(), facts={"name": name} if name else {})


def subject_of(name: str) -> str:
    """Names may contain characters that a subject must not."""
    return SERVER_EVENTS_SUBJECT.replace("*", sha256(name.encode()).hexdigest()[:16])
