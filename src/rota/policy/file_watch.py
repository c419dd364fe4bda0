"""Reads the policy file at start, and again when it changes or on request.

- At start the file must be valid. Later an unreadable, invalid or unsigned file changes nothing: the current policy
  stays in force, the log reports each distinct problem once, and every poll tries again.
- A policy takes effect by one assignment (`PolicySnapshots.activate`): no request sees half of it.

If the process dies between reading and activating, the next poll does both.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

import structlog

from rota.infra import audit, failpoints
from rota.infra.audit import AuditEntry
from rota.infra.postgres import Database, query
from rota.infra.service import Lifecycle
from rota.infra.telemetry import metrics
from rota.infra.yaml_reader import decode_text, read_bytes
from rota.model.errors import InvalidInput
from rota.model.settings import Settings
from rota.policy.evaluate import CompiledPolicy
from rota.policy.loader import snapshot_id
from rota.policy.signature import SignatureVerifier
from rota.policy.snapshots import PolicySnapshots

log = structlog.get_logger(__name__)
CHANNEL: Final = "rota_policy"
NOTIFY_RELOAD = query(__package__, "nudge")

REFUSED = metrics.gauge("rota_policy_file_refused", "1 while the policy file is invalid and an older policy in force.")
LOADED = metrics.counter("rota_policy_loads", "Policies that took effect here.")
RULES = metrics.gauge("rota_policy_rules", "Rules of the policy in force.")


class PolicyFile:
    """The path of the policy file, and how its signature is verified."""

    def __init__(self, path: Path, verifier: SignatureVerifier | None = None) -> None:
        self.path = path
        self._verifier = verifier or SignatureVerifier()

    @classmethod
    def of(cls, settings: Settings) -> PolicyFile | None:
        policy = settings.policy
        if not policy.file:
            return None
        key, signature = (Path(name) if name else None for name in (policy.public_key_file, policy.signature_file))
        return cls(Path(policy.file), SignatureVerifier(key, signature, policy.signature_required))

    def read(self, known: str = "") -> CompiledPolicy | None:
        """None if it still has the snapshot id `known`. Raises InvalidInput; blocks on disk I/O."""
        content = read_bytes(self.path)
        text = decode_text(content, str(self.path))
        if snapshot_id(text) == known:
            return None
        self._verifier.check(self.path, content)
        return CompiledPolicy.of(text, str(self.path))


class PolicyWatch:
    """`Service("policy", watch.run)`."""

    def __init__(self, file: PolicyFile, poll_interval_s: float) -> None:
        first = file.read()
        assert first is not None
        self.file = file
        self.snapshots = PolicySnapshots(first)
        self._poll_interval_s = poll_interval_s
        self._last_error: str | None = None
        self._reload_lock = asyncio.Lock()
        _record_loaded(first)

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        while await life.pause(self._poll_interval_s):
            await self.poll()

    async def poll(self) -> bool:
        """Activate the file if it changed; whether it did. Logs an invalid file."""
        try:
            return await self.reload()
        except InvalidInput as error:
            self._log_refused(error.sentence)
            return False

    def _log_refused(self, sentence: str) -> None:
        if sentence != self._last_error:
            log.error("policy_file_rejected", reason=sentence, in_force=self.snapshots.current.snapshot)
        self._last_error = sentence

    async def reload(self) -> bool:
        """As `poll`; raises InvalidInput for an invalid file."""
        async with self._reload_lock:
            REFUSED.set(1)
            found = await asyncio.to_thread(self.file.read, self.snapshots.current.snapshot)
            REFUSED.set(0)
            self._last_error = None
            if found is None:
                return False
            failpoints.hit("policy.read_before_use")
            self.snapshots.activate(found)
        _record_loaded(found)
        return True

    async def listen(self, database: Database, life: Lifecycle) -> None:
        """Poll when `request_reload` notifies all servers."""
        async with database.listen(CHANNEL) as notifications:
            life.ready()
            while not life.draining:
                if await notifications.next(1.0) is not None:
                    await self.poll()


def _record_loaded(policy: CompiledPolicy) -> None:
    LOADED.inc()
    RULES.set(policy.size)
    log.info("policy_loaded", snapshot=policy.snapshot, rules=policy.size, source=policy.written.source)


async def request_reload(database: Database, actor: str) -> None:
    """Make every server reload its policy file now; the audit log names the actor."""
    async with database.transaction() as tx:
        await audit.append(tx, [AuditEntry(actor, "policy.reload", "policy", {})])
        await tx.run(NOTIFY_RELOAD, CHANNEL)
