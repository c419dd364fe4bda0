"""`rota doctor` and the policy: whether the file can be read, or the kernel answers. Nothing where there is none."""

from __future__ import annotations

from rota.cli.dlq_view import several
from rota.cli.doctor_told import Check, fail, ok
from rota.model.errors import InvalidInput, RotaError
from rota.model.settings import Settings
from rota.policy import opening

NAME = "policy"


async def checks(settings: Settings) -> list[Check]:
    if not opening.has_policy(settings):
        return []
    where = f"the kernel at {settings.safety_kernel.addr}" if settings.safety_kernel.addr else settings.policy.file
    try:
        kernel = opening.opened(settings, None)
        assert kernel is not None
        try:
            [now, *_] = await kernel.listed()
        finally:
            await kernel.close()
    except InvalidInput as wrong:
        return [fail(NAME, wrong.sentence, "Servers keep the policy they have and do not start anew: mend the file.")]
    except RotaError as away:
        return [fail(NAME, away.sentence, "Jobs wait until it answers: start `rota kernel`, see safety_kernel.addr.")]
    return [ok(NAME, f"{several(now.rules, 'rule')} by {where}, snapshot {now.id}.", snapshot=now.id, rules=now.rules)]
