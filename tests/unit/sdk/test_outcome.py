"""Waiting for a result takes one request, except from servers without the route, and for results of several pages."""

from types import SimpleNamespace
from uuid import uuid4

import pytest

from rota.api.jobs import JobView
from rota.client.jobs import FrameResultPage, HttpTransport, OutcomeReply
from rota.model.errors import NotFound, RotaError, Unavailable
from rota.model.job_states import JobState

JOB = uuid4()


class Server:
    """Records requests; an old one has no route for outcomes."""

    def __init__(self, *, old=False, unknown_job=False, state=JobState.SUCCEEDED, more=False, away=False):
        self.old = old
        self.unknown_job = unknown_job
        self.state = state
        self.more = more
        self.away = away
        self.requests = []

    async def long_poll(self, path, kind, within_s, is_done):
        self.requests.append((path.removeprefix(f"/jobs/{JOB}"), within_s))
        if self.away:
            raise Unavailable("Rota does not answer.")
        if self.unknown_job or (self.old and kind is OutcomeReply):
            raise NotFound("There is none.", status=404)
        view = SimpleNamespace(id=JOB, state=self.state)
        if kind is JobView:
            return view
        results = FrameResultPage([], "0.5" if self.more else None) if self.state.terminal else None
        reply = OutcomeReply(view, results)
        assert is_done(reply) is self.state.terminal
        return reply


async def test_outcome_has_the_job_and_its_results():
    server = Server()
    view, results = await HttpTransport(server).wait_for_outcome(JOB, 7.0)
    assert (view.id, view.state, results) == (JOB, JobState.SUCCEEDED, [])
    assert server.requests == [("/outcome", 7.0)]


@pytest.mark.parametrize("server", [Server(more=True), Server(state=JobState.RUNNING)])
async def test_results_that_are_not_complete_are_left_to_be_read(server):
    assert (await HttpTransport(server).wait_for_outcome(JOB, 7.0)).results is None


async def test_older_server_is_asked_for_the_job_alone_and_not_again_for_outcomes():
    server = Server(old=True)
    transport = HttpTransport(server)
    for _ in range(2):
        view, results = await transport.wait_for_outcome(JOB, 7.0)
        assert (view.state, results) == (JobState.SUCCEEDED, None)
    assert [path for path, _ in server.requests] == ["/outcome", "", ""]


async def test_unknown_job_is_not_taken_for_a_missing_route():
    server = Server(unknown_job=True)
    transport = HttpTransport(server)
    for _ in range(2):
        with pytest.raises(NotFound):
            await transport.wait_for_outcome(JOB, 7.0)
    assert [path for path, _ in server.requests] == ["/outcome", ""] * 2


async def test_server_that_does_not_answer_is_not_asked_in_another_way():
    server = Server(away=True)
    with pytest.raises(RotaError):
        await HttpTransport(server).wait_for_outcome(JOB, 7.0)
    assert len(server.requests) == 1
