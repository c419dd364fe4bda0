"""`rota doctor`: whether the policy file is valid, or the policy kernel answers. No check without a policy."""

from __future__ import annotations

from rota.cli.dlq.view import pluralize
from rota.cli.doctor.view import DoctorCheck, fail, ok
from rota.model.errors import InvalidInput, RotaError
from rota.model.settings import Settings
from rota.policy import factory

CHECK_NAME = "policy"


async def check_policy(settings: Settings) -> list[DoctorCheck]:
    if not factory.has_policy(settings):
        return []
    source = f"the kernel at {settings.safety_kernel.addr}" if settings.safety_kernel.addr else settings.policy.file
    try:
        kernel = factory.open_kernel(settings, None)
        assert kernel is not None
        try:
            [now, *_] = await kernel.list_snapshots()
        finally:
            await kernel.close()
    except InvalidInput as invalid:
        return [
            fail(CHECK_NAME, invalid.sentence, "Servers keep their current policy but cannot restart: fix the file.")
        ]
    except RotaError as error:
        return [
            fail(
                CHECK_NAME,
                error.sentence,
                "Jobs wait until it answers: start `rota kernel`, and check safety_kernel.addr.",
            )
        ]
    return [
        ok(
            CHECK_NAME,
            f"{pluralize(now.rules, 'rule')} by {source}, snapshot {now.id}.",
            snapshot=now.id,
            rules=now.rules,
        )
    ]
