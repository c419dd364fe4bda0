"""Each behaviour is defined at a path whose name says so."""

from pathlib import Path

import pytest

ROTA = Path(__file__).resolve().parents[3] / "src" / "rota"

PLACES = {
    "leader election": ("infra/lease/leadership.py", "class Leadership"),
    "circuit breaker": ("infra/breaker/breaker.py", "class "),
    "outbox": ("infra/outbox/outbox.py", "outbox"),
    "dead letters": ("queue/dead_letters.py", "class DeadLetter"),
    "sagas": ("workflow/sagas.py", "class Sagas"),
    "booking script": ("accounting/live/book.lua", "-- script: book"),
    "placement scoring": ("placement/scoring.py", "def "),
    "explain": ("engine/explain/explainer.py", "class Explainer"),
    "idempotent submit": ("engine/functions/idempotency_keys.sql", "FUNCTION rota.job_keys"),
    "queue counts": ("queue/counts.py", "Counts"),
    "cancel": ("engine/completion/canceller.py", "class JobCanceller"),
    "worker registration": ("engine/cluster/worker_registration.py", "class WorkerRegistration"),
    "sending work to a worker": ("engine/dispatch/assigner.py", "class Assigner"),
    "fair share and ageing": ("engine/dispatch/ordering.py", "AGEING"),
    "retry decision": ("engine/completion/retry_decision.py", "def "),
    "API authentication": ("server/http/middleware/authentication.py", "class AuthenticationMiddleware"),
    "API rate limit": ("server/http/middleware/rate_limit.py", "class "),
    "stored policy decisions": ("policy/decision_store.py", "class DecisionStore"),
    "artifacts": ("worker/data/artifacts.py", "Artifacts"),
    "workflow timers": ("workflow/functions/timers.sql", "workflow_timer"),
}


@pytest.mark.parametrize("behaviour", PLACES)
def test_behaviour_is_defined_at_the_path_that_names_it(behaviour):
    path, definition = PLACES[behaviour]
    assert definition in (ROTA / path).read_text()


def test_orientation_table_has_twenty_behaviours():
    assert len(PLACES) == 20
