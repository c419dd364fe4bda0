"""Shared by the tests of series: what a server sends, and how frames end."""

from uuid import uuid4

import msgspec

from rota.model.protocol import RECALL_SUBJECT, AssignedRange, Assignment, AttemptStatus, RecallFrames, encode
from tests.integration.worker.worker_support import task

HANDED_BACK = (AttemptStatus.REFUSED, "handed_back")
KEY = 4711


async def send_series(server, *frames, n=1, works=None):
    """Assign one series: of each (work, arguments) `n` frames of a layer. Returns its tokens."""
    first = server.tokens()
    carrier = first + n * len(frames) - 1
    works = [task(each) if isinstance(each, str) else each for each, *_ in frames]
    portions = [
        AssignedRange(
            first + n * at,
            n,
            uuid4(),
            uuid4(),
            1,
            1,
            at,
            msgspec.msgpack.encode({"args": list(given), "kwargs": {}}),
            None,
            1,
            "",
            carrier,
        )
        for at, (_, *given) in enumerate(frames)
    ]
    await server.publish(encode(Assignment(works, portions, [KEY + at for at in range(len(works))])))
    return range(first, carrier + 1)


async def recall(server, *ranges, worker=None):
    worker = worker or server.workers[-1]
    await server.bus.publish_core(RECALL_SUBJECT.format(worker), encode(RecallFrames(list(ranges))))


async def ends_of(server, tokens):
    """How each frame ended: None, its value, or its status and code."""
    found = await server.ended(tokens[0], len(tokens))
    return [how_it_ended(end) for end in (found if len(tokens) > 1 else [found])]


def how_it_ended(end):
    if end is None:
        return None
    return msgspec.msgpack.decode(end.value) if end.status is AttemptStatus.SUCCEEDED else (end.status, end.code)
