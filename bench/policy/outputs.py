"""What looking at outputs costs: the first look, for all outputs of one report together, and the look inside."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID, uuid4

import msgspec

from bench.report import Figure
from rota.engine.completion.finisher import EndedAttempt
from rota.engine.completion.retry_decision import AttemptOutcome
from rota.engine.outputs.sync_check import CheckedFrames, SyncOutputChecker
from rota.model.ids import JobId, LayerId, ShowId
from rota.model.jobs.submission import SubmissionDetails, encode_details
from rota.model.policy.outputs import OutputEffect, OutputMeta
from rota.model.protocol import AttemptResult, AttemptStatus
from rota.policy.output.evaluate import CompiledOutputPolicy, deadline_after
from rota.policy.output.parts import OutputContent
from rota.policy.output.rules import DEFAULT_RULES, OutputMatch, OutputRule, OutputRules

OUTPUTS: Final = 64
"""Of one report: what a worker of 64 places ends within the few milliseconds between two."""
RULES: Final = 100
ROUNDS: Final = 2000
TEXT: Final = "The frame took 12 ms on node 7; see /shots/12/beauty.0001.exr for the rest of it. " * 12


def figures(quick: bool = False) -> list[Figure]:
    """All of these need nothing but this process."""
    rounds = ROUNDS // 10 if quick else ROUNDS
    first = asyncio.run(_sync_ms(rounds))
    p99 = sorted(first)[int(len(first) * 0.99)]
    note = f"the first look at {OUTPUTS} outputs of a report, {RULES} rules, p99 of {rounds}"
    inside = f"looks into outputs of 1 KB by {len(DEFAULT_RULES)} rules, one thread"
    return [
        Figure("sync_output_p99_ms", [p99], bar=1, note=note),
        Figure("output_scans_per_s", _scans_per_s(rounds), higher_is_better=True, note=inside),
    ]


def policy(rules: int = RULES) -> CompiledOutputPolicy:
    """The default rules behind many that are about other topics, as a grown policy has them."""
    others = tuple(
        OutputRule(
            id=f"r{at}",
            decision=OutputEffect.QUARANTINE,
            match=OutputMatch(topics=(f"job.{at}.*", "job.pay.?"), max_output_bytes=1000 * at),
        )
        for at in range(rules - len(DEFAULT_RULES))
    )
    return CompiledOutputPolicy(OutputRules(rules=(*others, *DEFAULT_RULES)), snapshot="bench")


async def _sync_ms(rounds: int) -> list[float]:
    ready = policy()
    parts = SyncOutputChecker(lambda: ready, "bench")
    given = _report()
    layer = next(iter(given.frames.values())).layer
    tx: Any = SimpleNamespace(rows=_rows_of(layer))
    took = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        await parts.check(tx, given)
        took.append((time.perf_counter() - began_s) * 1000)
    return took


def _rows_of(layer: UUID) -> Any:
    row = {
        "pk_layer": layer,
        "layer": "main",
        "first_frame": 0,
        "frame_step": 1,
        "topic": "job.render",
        "show": "film",
        "labels": '{"shot": "12"}',
        "request": encode_details(SubmissionDetails(risk_tags=("network",), capability="render")),
    }

    async def rows(_query: object, _layers: object) -> list[dict[str, object]]:
        return [row]

    return rows


def _report() -> CheckedFrames:
    worker, show, job, layer = uuid4(), ShowId(uuid4()), JobId(uuid4()), LayerId(uuid4())
    value = msgspec.msgpack.encode({"took": 12, "text": TEXT})
    frames = {
        at: EndedAttempt(AttemptResult(at, AttemptStatus.SUCCEEDED, value), worker, show, job, layer, at, 1)
        for at in range(OUTPUTS)
    }
    return CheckedFrames(frames, dict.fromkeys(frames, AttemptOutcome("SUCCEEDED", "")), {})


def _scans_per_s(rounds: int) -> list[float]:
    ready, content = policy(), OutputContent(msgspec.msgpack.encode({"took": 12, "text": TEXT}))
    meta = OutputMeta(show="film", topic="job.render", bytes=1000)
    rates = []
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(rounds):
            ready.check_content(meta, content, deadline_after(30))
        rates.append(rounds / (time.perf_counter() - began_s))
    return rates
