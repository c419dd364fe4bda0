"""Builds one cause, with the defaults of its reason code. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from rota.api.explanation import BlockingJob, Cause, Holder, LimitAmounts, Refuser
from rota.api.jobs import Layer
from rota.model.reasons import Reason, Tier
from rota.placement import PlacementExplanation

_NEXT_TRY: Final = {
    Tier.MISCONFIGURED: "when a worker registers, or pools and topics change",
    Tier.BLOCKED: "",
    Tier.QUOTA: "when usage under the limit ends, or the limit changes",
    Tier.CAPACITY: "when a worker registers or has free capacity",
    Tier.ORDER: "when the work ahead of it has started",
    Tier.SYSTEM: "as soon as the service is available",
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
    """A cause with the tier of its code, and by default its meaning and remedy."""
    assert code.tier is not None, f"{code} is not a reason to wait"
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
