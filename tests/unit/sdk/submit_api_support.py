"""The submission routes as a scripted server: idempotent by key, with faults chosen by the test."""

import asyncio
from contextlib import asynccontextmanager
from uuid import UUID, uuid4

import msgspec

from rota.api.submission import SubmitBatchAnswer, SubmitBatchReply, SubmitBatchRequest, SubmitProblem
from rota.model.jobs.submission import Submission, SubmitResult
from tests.support.answers import CUT, answer, answering, problem

REFUSED = "refused"
"""The name of a submission that the server refuses."""


class SubmitApi:
    def __init__(self):
        self.jobs = {}
        """By idempotency key: the id and the submission."""
        self.received = []
        """The requests: path, names of its submissions, traces, headers."""
        self.faults = []
        """For the next requests: a response or CUT instead of the effect, "lost" after it, an event to wait for, None;
        a callable takes an item and returns the problem of its answer, or None."""
        self.server = None

    @property
    def batches(self):
        return [names for _, names, *_ in self.received]

    @property
    def paths(self):
        return [path for path, *_ in self.received]

    async def respond(self):
        request = self.server.requests[-1]
        path = request.path.removeprefix("/api/v1")
        if path == "/jobs":
            submissions = [msgspec.msgpack.decode(request.body, type=Submission)]
            traces = [request.headers.get("traceparent", "")]
        else:
            assert path == "/jobs/batch", path
            items = msgspec.msgpack.decode(request.body, type=SubmitBatchRequest).items
            submissions, traces = [item.submission for item in items], [item.trace for item in items]
        self.received.append((path, [each.name for each in submissions], traces, request.headers))
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, asyncio.Event):
            await fault.wait()
        elif fault is not None and fault != "lost" and not callable(fault):
            return fault
        answers = [
            SubmitBatchAnswer(problem=found)
            if (found := (fault(each) if callable(fault) else None) or refusal(each))
            else SubmitBatchAnswer(result=self.submit(each))
            for each in submissions
        ]
        if fault == "lost":
            return CUT
        if path == "/jobs/batch":
            return answer(201, SubmitBatchReply(answers))
        [only] = answers
        if only.problem is not None:
            one = only.problem
            return problem(one.status, one.code, one.detail, facts=one.facts, retry_after=str(one.retry_after_s))
        return answer(201, only.result)

    def submit(self, submission):
        key = submission.idempotency_key
        already = key in self.jobs
        job, _ = self.jobs.setdefault(key, (uuid4(), submission))
        return SubmitResult(job, "PENDING", already)

    def job_named(self, name) -> UUID:
        [found] = [job for job, submission in self.jobs.values() if submission.name == name]
        return found


def refusal(submission):
    if submission.name.startswith(REFUSED):
        return SubmitProblem(
            status=409, code="refused", detail=f"Not {submission.name}.", facts={"name": submission.name}
        )
    return None


@asynccontextmanager
async def submit_api():
    api = SubmitApi()
    async with answering(api.respond) as api.server:
        yield api
