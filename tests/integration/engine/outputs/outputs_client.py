"""A process that scans outputs, or releases or redacts one; with a failpoint armed it crashes on the way.

    python -m tests.integration.engine.outputs.outputs_client COMMAND

COMMAND is scan quarantine | scan redact | release TOKEN | redact TOKEN

URL is the database.
"""

import asyncio
import os
import sys

from rota.engine.outputs.async_scanner import OutputScanner
from rota.engine.outputs.review import OutputReview, OutputReviewer
from rota.engine.outputs.sync_check import SyncOutputChecker
from rota.infra.blob_store import BlobStore
from rota.infra.postgres import Database, PostgresTarget
from rota.infra.telemetry import logs
from rota.model.identity.principals import Principal
from rota.model.policy.outputs import OutputEffect
from rota.policy.output.evaluate import CompiledOutputPolicy
from rota.policy.output.rules import OutputMatch, OutputRule, OutputRules
from rota.queue import Queue
from tests.support.jobs import completions


async def scan(database, effect):
    rule = OutputRule(id="r", decision=OutputEffect(effect.upper()), match=OutputMatch(scanners=("secret",)))
    policy = CompiledOutputPolicy(OutputRules(rules=(rule,)))
    checker = SyncOutputChecker(lambda: policy, "client")
    publisher = completions(database)
    scanner = OutputScanner(database, BlobStore(database), publisher, checker)
    while await scanner.scan_due():
        pass


async def release(database, token):
    await OutputReview(database, BlobStore(database), Queue(database), completions(database)).release(
        int(token), OutputReviewer("bob", Principal("bob")), "fine"
    )


async def redact(database, token):
    await OutputReview(database, BlobStore(database), Queue(database), completions(database)).redact(
        int(token), OutputReviewer("bob", Principal("bob")), "fine"
    )


async def main(what, about):
    database = await Database.open(PostgresTarget(url=os.environ["URL"]))
    await {"scan": scan, "release": release, "redact": redact}[what](database, about)
    await database.close()


if __name__ == "__main__":
    logs.configure()
    asyncio.run(main(*sys.argv[1:]))
