"""Engine parts of a test that publishes no events."""

from rota.accounting.service import AccountingService
from rota.engine.completion.canceller import JobCanceller
from rota.engine.completion.finisher import Finisher
from rota.engine.completion.publisher import CompletionPublisher
from rota.engine.events.sink import DiscardedEvents
from rota.queue import Queue

NO_EVENTS = DiscardedEvents()


def completions(database, accounting=None, events=NO_EVENTS):
    return CompletionPublisher(database, accounting or AccountingService(database, None), events)


def a_finisher(database, bus, accounting=None, **options):
    publisher, queue = completions(database, accounting), Queue(database)
    return Finisher(database, queue, publisher, JobCanceller(database, bus, queue, publisher), **options)
