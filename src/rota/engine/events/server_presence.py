"""Servers that come and go, told as events; and the gap that one leaves that goes without a word.

A server that dies takes the events with it that it had not published yet. Nobody knows how many, but that it died is
known: each says in a subject of its own that it came, and, after its last event, that it is gone. Where that is missing
and nobody hears of it any more, the leader says that it was lost, and that some events may be missing (`reset`). That
holds also when all of them died, for the first that comes again.

What they said lies in the stream, which forgets after an hour, so each says it again from time to time, with a message
that holds no event. A server that is only paused is told as lost, too: it was not heard, and what it tells when it
wakes comes after that.
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
    """`run` speaks for this server, and must outlive whoever tells its events; the leader calls `judge`."""

    def __init__(self, bus: Bus, members: ClusterMembership, clock: Clock | None = None) -> None:
        self.bus = bus
        self.members = members
        self._clock = clock or SystemClock()
        self._settled: set[str] = set()
        """Subjects in which the last word was said: a name is that of one process."""

    async def run(self, life: Lifecycle) -> None:
        said = await self._publish([self._event_group(CAME, self.members.name)])
        life.ready()
        while await life.pause(REPUBLISH_INTERVAL_S if said else RETRY_INTERVAL_S):
            said = await self._publish([] if said else [self._event_group(CAME, self.members.name)])
        await self._publish([self._event_group(GONE, self.members.name)])

    async def report_lost_servers(self) -> list[str]:
        """Say which servers went without a word; returns the subjects they spoke in."""
        since, now_s = self.members.hears_itself_since, self._clock.monotonic()
        if since is None or self.members.is_isolated() or now_s - since < 2 * HEARTBEAT_TIMEOUT_S:
            return []
        present = {subject_of(name) for name in self.members.live_replicas()}
        known = set(await self.bus.subjects(EVENTS_STREAM, SERVER_EVENTS_SUBJECT))
        self._settled = (self._settled & known) - present
        silent = known - present - self._settled
        return [subject for subject in sorted(silent) if await self._report_if_lost(subject)]

    async def _report_if_lost(self, subject: str) -> bool:
        last = await self.bus.last_message(EVENTS_STREAM, subject)
        # One that has just come is heard of a moment later.
        if last is None or self._clock.now_ms() - last.stored_ns // 1_000_000 < 2000 * HEARTBEAT_TIMEOUT_S:
            return False
        self._settled.add(subject)
        said = EventMessage([])
        with suppress(InvalidInput):
            said = decode(EventMessage, last.data)
        if said.groups and said.groups[0].kind in (GONE, LOST):
            return False
        name = said.server
        told = [
            self._event_group(LOST, name),
            EventGroup(RESET_KIND, self._clock.now_ms(), facts={"because": "server_lost"}),
        ]
        log.warning("server_lost", server=name or subject)
        # Of two who judge, one is told that it was said.
        message = BusMessage(
            subject=subject, data=encode(EventMessage(told, server=name)), msg_id=f"lost:{subject}:{last.stream_seq}"
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
        except NatsUnavailable as away:
            log.info("server_not_told", reason=away.sentence)
            return False
        return True

    def _event_group(self, kind: str, name: str) -> EventGroup:
        return EventGroup(kind, self._clock.now_ms(), facts={"name": name} if name else {})


def subject_of(name: str) -> str:
    """Names may hold what a subject must not."""
    return SERVER_EVENTS_SUBJECT.replace("*", sha256(name.encode()).hexdigest()[:16])
