"""Submissions from the bus: `sys.job.submit`, with the same checks as every other face.

A message that comes again submits nothing again: without a key of its own it has one made of its number in the stream
and the moment it was stored, written with the job. One that is refused goes to the dead letters with the reason, and is
then terminated; if we die in between, the dead letter is written once all the same, since its cause names the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from msgspec.structs import replace

from rota.engine.results import INVALID
from rota.engine.submit import Submitter, planned
from rota.infra import faults
from rota.infra.nats import Bus, ConsumerSpec, Delivery, Handling, Reject, Verdict
from rota.infra.nats.declared import limited
from rota.infra.telemetry import tracing
from rota.model.errors import IdempotencyConflict, InvalidInput
from rota.model.job_plan import Plan
from rota.model.messages import SUBMIT
from rota.model.settings.servers import Nats
from rota.queue import DeadLetter, DeadLetters

SUBMITS: Final = ConsumerSpec(stream="SYS", durable="engine-submit", filter=SUBMIT, ack_wait_s=30.0, max_deliver=100)
REFUSED: Final = "submission_refused"


class Intake:
    """`Service("submits", intake.handling(bus).run)` keeps it going."""

    def __init__(self, submitter: Submitter, dead_letters: DeadLetters, *, may_be_critical: bool = False) -> None:
        self._submitter = submitter
        self._dead_letters = dead_letters
        self._may_be_critical = may_be_critical

    def handling(self, bus: Bus, nats: Nats | None = None) -> Handling:
        nats = nats or Nats()
        spec = limited(SUBMITS, nats)
        return Handling(bus, spec, self.handle, self.terminated, dead_letter_retry_s=nats.nak_delay)

    async def handle(self, batch: Sequence[Delivery]) -> list[Verdict]:
        plans: list[Plan] = []
        parents = []
        verdicts: list[Verdict] = []
        for delivery in batch:
            try:
                plans.append(self._plan(delivery))
                parents.append(tracing.extract(delivery.headers) if tracing.on() else None)
                verdicts.append(None)
            except InvalidInput as error:
                verdicts.append(Reject(error.sentence))
        faults.at("submit.before_intake")
        try:
            await self._submitter.write(plans, parents=parents)
        except (InvalidInput, IdempotencyConflict) as error:
            if len(plans) > 1:
                raise  # one of them: each is tried alone
            return [verdict or Reject(error.sentence) for verdict in verdicts]
        return verdicts

    async def terminated(self, delivery: Delivery, reason: str) -> None:
        INVALID.labels("submission").inc()
        letter = DeadLetter(
            kind="message", reason=REFUSED, cause=_name(delivery), payload=delivery.data, error=reason[:10_000]
        )
        await self._dead_letters.add([letter])

    def _plan(self, delivery: Delivery) -> Plan:
        [plan] = planned([delivery.data], may_be_critical=self._may_be_critical)
        if plan.key is not None:
            return plan
        return replace(plan, key=_name(delivery), digest=sha256(delivery.data).digest())


def _name(delivery: Delivery) -> str:
    return f"bus:{delivery.stream}:{delivery.stream_seq}:{delivery.stored_ns}"
