"""A bulk has one idempotency key, except for servers that do not know it and for submissions with keys of their own."""

from uuid import uuid4

import pytest

from rota.client.jobs import BulkSubmitReply, HttpTransport
from rota.model.errors import NotFound, RotaError
from rota.model.job_states import JobState
from rota.model.jobs.submission import LayerSpec, Submission, SubmitResult


class Server:
    """Records requests; an old one has no route for the key of a bulk."""

    def __init__(self, *, old=False, unknown_job=False):
        self.old = old
        self.unknown_job = unknown_job
        self.requests = []

    async def call(self, method, path, _kind, *, idempotent, body):
        assert idempotent
        self.requests.append((method, path.split("/")[1:3], [each.idempotency_key for each in body]))
        if self.unknown_job or (self.old and method == "PUT"):
            raise NotFound("There is none.", status=404)
        return BulkSubmitReply([SubmitResult(uuid4(), JobState.SCHEDULED, already=True) for _ in body])


def bulk(*keys):
    return [Submission(show="film", layers=(LayerSpec(task="t"),), idempotency_key=key) for key in keys]


async def test_bulk_is_submitted_under_one_key():
    server = Server()
    answers = await HttpTransport(server).submit(bulk("", "", ""))
    assert server.requests == [("PUT", ["jobs", "bulk"], ["", "", ""])]
    assert [each.already for each in answers] == [False] * 3, "a repetition of the client itself is no news"


async def test_submissions_with_keys_of_their_own_keep_them():
    server = Server()
    answers = await HttpTransport(server).submit(bulk("a", ""))
    [(method, path, [first, second])] = server.requests
    assert (method, path, first) == ("POST", ["jobs", "bulk"], "a")
    assert second.startswith("sdk-")
    assert [each.already for each in answers] == [True, False]


async def test_older_server_gets_a_key_for_each_and_is_not_asked_again():
    server = Server(old=True)
    transport = HttpTransport(server)
    for _ in range(2):
        await transport.submit(bulk("", ""))
    assert [method for method, _, _ in server.requests] == ["PUT", "POST", "POST"]
    for _, _, keys in server.requests[1:]:
        assert len({*keys}) == 2
        assert all(keys)


async def test_missing_job_is_not_taken_for_a_missing_route():
    server = Server(unknown_job=True)
    transport = HttpTransport(server)
    with pytest.raises(NotFound):
        await transport.submit(bulk("", ""))
    server.unknown_job = False
    await transport.submit(bulk("", ""))
    assert [method for method, _, _ in server.requests] == ["PUT", "POST", "PUT"]


async def test_other_errors_are_raised_at_once():
    server = Server()

    async def refuse(*_args, **_more):
        raise RotaError("Not now.", status=503)

    server.call = refuse
    with pytest.raises(RotaError, match="Not now"):
        await HttpTransport(server).submit(bulk("", ""))
