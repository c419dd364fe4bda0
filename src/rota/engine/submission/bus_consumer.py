"""Submissions from the bus (`sys.job.submit`), with the same validation as every other interface.

Nothing proves who published a message: the principal that it names is stored as a claim, `bus:NAME`, which equals no
principal.

Redelivery is idempotent: a submission without an idempotency key gets one made of its stream sequence number and
storage time. A refused submission is dead-lettered with the reason and then terminated; if the process dies in
between, the dead letter is still written once, because its cause names the message.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from msgspec.structs import replace

from rota.api.admin import DeadLetter
from rota.engine.completion.report_consumer import INVALID_MESSAGES
from rota.engine.submission.submitter import Submitter
from rota.infra import failpoints
from rota.infra.nats import Acknowledgement, BatchConsumer, BatchProcessor, Bus, ConsumerSpec, Delivery, Terminate
from rota.infra.nats.topology import with_limits
from rota.infra.telemetry import tracing
from rota.model.errors import IdempotencyConflict, InvalidInput
from rota.model.jobs.submission import decode_submission
from rota.model.jobs.validation import ValidatedSubmission, validate_unverified
from rota.model.protocol import SUBMIT_SUBJECT
from rota.model.reasons import DeadLetterReason
from rota.model.settings.servers import NatsSettings
from rota.queue import DeadLetterQueue

SUBMIT_CONSUMER_SPEC: Final = ConsumerSpec(
    stream="SYS", durable="engine-submit", filter=SUBMIT_SUBJECT, ack_wait_s=3.0, max_deliver=100
)
REFUSED_REASON: Final = DeadLetterReason.SUBMISSION_REFUSED.value


class BusSubmissionConsumer:
    """`Service("submits", consumer.batch_consumer(bus).run)` runs it."""

    def __init__(self, submitter: Submitter, dead_letters: DeadLetterQueue, *, may_be_critical: bool = False) -> None:
        self._submitter = submitter
        self._dead_letters = dead_letters
        self._may_be_critical = may_be_critical

    def batch_consumer(self, bus: Bus, nats: NatsSettings | None = None) -> BatchConsumer:
        nats = nats or NatsSettings()
        processor = BatchProcessor(self.handle, self.terminated, dead_letter_retry_s=nats.nak_delay)
        return BatchConsumer(bus, with_limits(SUBMIT_CONSUMER_SPEC, nats), processor)

    async def handle(self, batch: Sequence[Delivery]) -> list[Acknowledgement]:
        plans: list[ValidatedSubmission] = []
        parents = []
        acknowledgements: list[Acknowledgement] = []
        for delivery in batch:
            try:
                plans.append(self._validate(delivery))
                parents.append(tracing.extract(delivery.headers) if tracing.is_enabled() else None)
                acknowledgements.append(None)
            except InvalidInput as error:
                acknowledgements.append(Terminate(error.sentence))
        failpoints.hit("submit.before_intake")
        try:
            await self._submitter.write(plans, parents=parents)
        except (InvalidInput, IdempotencyConflict) as error:
            if len(plans) > 1:
                raise  # one of them is invalid: the batch consumer retries each alone
            return [acknowledgement or Terminate(error.sentence) for acknowledgement in acknowledgements]
        return acknowledgements

    async def terminated(self, delivery: Delivery, reason: str) -> None:
        INVALID_MESSAGES.labels("submission").inc()
        dead_letter = DeadLetter(
            kind="message",
            reason=REFUSED_REASON,
            cause=_message_key(delivery),
            payload=delivery.data,
            error=reason[:10_000],
        )
        await self._dead_letters.add([dead_letter])

    def _validate(self, delivery: Delivery) -> ValidatedSubmission:
        submission = decode_submission(delivery.data)
        plan = validate_unverified(submission, "bus", may_be_critical=self._may_be_critical)
        if plan.key is not None:
            return plan
        return replace(plan, key=_message_key(delivery), digest=sha256(delivery.data).digest())


def _message_key(delivery: Delivery) -> str:
    return f"bus:{delivery.stream}:{delivery.stream_seq}:{delivery.stored_ns}"
