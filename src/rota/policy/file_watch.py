"""The policy file is read at start, and again when it has changed or somebody asks for it.

- At start it must be good: nothing is decided by a policy that nobody has read. Later a file that cannot be read, is
  wrong or not signed changes nothing: the old policy stays in force, the log says what is wrong, each thing once, and
  it is looked at again at every look.
- A policy comes into force by one assignment (`Snapshots.use`): no question sees half of it.

If we die between reading and using it, the next look does both.
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

REFUSED = metrics.gauge("rota_policy_file_refused", "1 while the policy file is wrong, and an older one in force.")
LOADED = metrics.counter("rota_policy_loads", "Policies that came into force here.")
RULES = metrics.gauge("rota_policy_rules", "Rules of the policy in force.")


class PolicyFile:
    """Where the policy stands, and who must have signed it."""

    def __init__(self, path: Path, seal: SignatureVerifier | None = None) -> None:
        self.path = path
        self._seal = seal or SignatureVerifier()

    @classmethod
    def of(cls, settings: Settings) -> PolicyFile | None:
        wanted = settings.policy
        if not wanted.file:
            return None
        key, signature = (Path(name) if name else None for name in (wanted.public_key_file, wanted.signature_file))
        return cls(Path(wanted.file), SignatureVerifier(key, signature, wanted.signature_required))

    def read(self, known: str = "") -> CompiledPolicy | None:
        """None when it is still what `known` was made of. Raises InvalidInput; blocks for as long as a disk takes."""
        content = read_bytes(self.path)
        text = decode_text(content, str(self.path))
        if snapshot_id(text) == known:
            return None
        self._seal.check(self.path, content)
        return CompiledPolicy.of(text, str(self.path))


class PolicyWatch:
    """`Service("policy", watch.run)`."""

    def __init__(self, file: PolicyFile, every_s: float) -> None:
        first = file.read()
        assert first is not None
        self.file = file
        self.snapshots = PolicySnapshots(first)
        self._every_s = every_s
        self._wrong: str | None = None
        self._looking = asyncio.Lock()
        _record_loaded(first)

    async def run(self, life: Lifecycle) -> None:
        life.ready()
        while await life.pause(self._every_s):
            await self.poll()

    async def poll(self) -> bool:
        """Use what the file says now; whether that is something else. What is wrong is told by the log."""
        try:
            return await self.reload()
        except InvalidInput as wrong:
            self._log_refused(wrong.sentence)
            return False

    def _log_refused(self, sentence: str) -> None:
        if sentence != self._wrong:
            log.error("policy_refused", reason=sentence, in_force=self.snapshots.current.snapshot)
        self._wrong = sentence

    async def reload(self) -> bool:
        """As `look`; raises InvalidInput for what is wrong."""
        async with self._looking:
            REFUSED.set(1)
            found = await asyncio.to_thread(self.file.read, self.snapshots.current.snapshot)
            REFUSED.set(0)
            self._wrong = None
            if found is None:
                return False
            failpoints.hit("policy.read_before_use")
            self.snapshots.activate(found)
        _record_loaded(found)
        return True

    async def listen(self, database: Database, life: Lifecycle) -> None:
        """Look as soon as somebody asks all servers to (`nudge`)."""
        async with database.listen(CHANNEL) as told:
            life.ready()
            while not life.draining:
                if await told.next(1.0) is not None:
                    await self.poll()


def _record_loaded(policy: CompiledPolicy) -> None:
    LOADED.inc()
    RULES.set(policy.size)
    log.info("policy_loaded", snapshot=policy.snapshot, rules=policy.size, source=policy.written.source)


async def request_reload(database: Database, actor: str) -> None:
    """Every server of this installation looks at its policy file now; the trail says who wanted that."""
    async with database.transaction() as tx:
        await audit.append(tx, [AuditEntry(actor, "policy.reload", "policy", {})])
        await tx.run(NOTIFY_RELOAD, CHANNEL)
