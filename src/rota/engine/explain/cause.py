"""One cause, with what its code says by itself. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rota.api.explanation import BlockingJob, Cause, Holder, LimitAmounts, Refuser
from rota.engine.queries.jobs import Layer
from rota.model.reasons import Reason, Tier
from rota.placement import PlacementExplanation

_NEXT_TRY: Final = {
    Tier.MISCONFIGURED: "when a worker comes, or pools and topics change",
    Tier.BLOCKED: "",
    Tier.QUOTA: "when something that counts there ends, or the limit changes",
    Tier.CAPACITY: "when a worker comes or has room",
    Tier.ORDER: "when those before it have started",
    Tier.SYSTEM: "as soon as it is back",
}


def cause(
    code: Reason,
    sentence: str = "",
    *,
    remedy: str = "",
    layer: Layer | None = None,
    refuser: Refuser | None = None,
    amounts: LimitAmounts | None = None,
    holders: Sequence[Holder] = (),
    waits_for: Sequence[BlockingJob] = (),
    found: PlacementExplanation | None = None,
    next_at: datetime | None = None,
    next_try: str | None = None,
) -> Cause:
    """With the tier of its code, and its meaning and remedy where there is nothing to add."""
    assert code.tier is not None, f"{code} is nothing that a job waits for"
    return Cause(
        tier=code.tier,
        code=code,
        sentence=sentence or code.meaning,
        remedy=remedy or code.remedy(),
        layer=None if layer is None else layer.name,
        refuser=refuser,
        amounts=amounts,
        holders=tuple(holders),
        waits_for=tuple(waits_for),
        considered=0 if found is None else found.considered,
        passed=() if found is None else found.passed,
        next_at=next_at,
        next_try=_NEXT_TRY[code.tier] if next_try is None else next_try,
    )
