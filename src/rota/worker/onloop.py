"""Async tasks, run on the worker's own loop.

Frames are begun one after the other in one stretch of at most `STRETCH_S`, then the loop has its turn; one that
finishes at once costs neither a task nor a turn (see `carriers`). Each has variables (contextvars) of its own. What a
handler raises, `SystemExit` included, is its own end and not ours, and so it is with tasks that it makes (`contained`).
One that forks and comes back here as the child is ended on the spot, since it would speak in our name.

What cannot be helped: a handler that never awaits holds the loop, and all its neighbours with it. The pulse goes on
from its own thread and says so; nothing but the end of the process would stop the handler. Sync tasks can be killed.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque
from contextvars import Context as Variables
from contextvars import copy_context
from time import monotonic
from typing import Any, Final

import msgspec

from rota.infra.telemetry import tracing
from rota.model.messages import End
from rota.sdk.context import CURRENT, Context
from rota.worker import endings
from rota.worker.carriers import SPARE_MAX, Awaited, Carrier, Carriers
from rota.worker.contained import task_of
from rota.worker.desk import Desk
from rota.worker.endings import Input
from rota.worker.frames import Batch, Frame
from rota.worker.leavings import Ear
from rota.worker.values import Values

STRETCH_S: Final = 0.005
FORKED_STATUS: Final = 70


class _Forked:
    """Set in a child of ours that was forked by a handler."""

    here = False


os.register_at_fork(after_in_child=lambda: setattr(_Forked, "here", True))


class OnLoop:
    def __init__(self, desk: Desk, values: Values) -> None:
        self._desk = desk
        self._values = values
        self._ear = Ear(desk.teller, desk.leavings)
        self._carriers = Carriers()
        self._waiting: deque[Batch] = deque()
        self._some = asyncio.Event()
        self._wanted = 1
        _Forked.here = False  # the flag marks children of task handlers, and a worker process may itself be forked
        asyncio.get_running_loop().set_task_factory(task_of)

    @property
    def busy(self) -> bool:
        """Whether there are frames to begin right away."""
        return bool(self._waiting)

    def add(self, batch: Batch) -> None:
        self._waiting.append(batch)
        self._some.set()

    async def run(self) -> None:
        while True:
            await self._some.wait()
            while self._waiting:
                await self._stretch()
                await asyncio.sleep(0)
            self._some.clear()

    async def close(self) -> int:
        """End all; how many handlers ignored it."""
        return await self._carriers.close()

    async def _stretch(self) -> None:
        await self._carriers.stock(self._wanted)
        until = monotonic() + STRETCH_S
        used = 0
        while self._waiting and monotonic() < until and (carrier := self._carriers.first()) is not None:
            self._begin_with(carrier, until)
            used += not carrier.fit
        # As many as were needed this time, or twice that when there were too few.
        self._wanted = min(SPARE_MAX, max(1, used if self._carriers.first() else 2 * used))

    def _begin_with(self, carrier: Carrier, until: float) -> None:
        """Frames in the name of one carrier, until it has one to carry."""
        with self._carriers.in_name_of(carrier):
            while self._waiting and carrier.fit and monotonic() < until:
                batch = self._waiting[0]
                self._begin_some(batch, carrier, until)
                if batch.next >= batch.end:
                    self._waiting.popleft()
                    self._desk.gone(batch)

    def _begin_some(self, batch: Batch, carrier: Carrier, until: float) -> None:
        """Frames of one batch, until one has to wait or the time is over."""
        given = self._given(batch)
        while given is not None and batch.next < batch.end and carrier.fit and monotonic() < until:
            if batch.next in batch.dropped:
                batch.next += 1
                continue
            self._begin_alike(batch, given, carrier, until)
            if batch.next < batch.end and not given.shareable:
                given = self._given(batch)

    def _given(self, batch: Batch) -> Input | None:
        """What the next frame is called with; None: nothing of the batch can be called, and all of it has ended."""
        assert batch.task is not None, "a command does not run on the loop"
        try:
            return endings.read_input(batch.input, batch.task.signature)
        except msgspec.DecodeError as error:
            self._refuse_input(batch, error)
            return None

    def _begin_alike(self, batch: Batch, given: Input, carrier: Carrier, until: float) -> None:
        """Frames that return nothing at once, up to the first that does anything else: told as one run."""
        first = token = batch.next
        began_at = monotonic()
        last = batch.end if token + 1 == batch.end or given.shareable else token + 1
        end: End | Frame | None = None
        while token < last and token not in batch.dropped:
            end = self._first_step(batch, token, given, carrier)
            if _Forked.here:
                os._exit(FORKED_STATUS)
            if end is not None:
                break
            token += 1
            # A handler that cancelled the task it found itself in must not cancel the next frame.
            if carrier.gate.done() or monotonic() >= until:
                break
        if token > first:
            self._desk.done(batch, first, token - first, monotonic() - began_at)
        if isinstance(end, End):
            self._desk.ended_unbegun(batch, end)
        batch.next = token + (end is not None)

    def _first_step(self, batch: Batch, token: int, given: Input, carrier: Carrier) -> End | Frame | None:
        """None: it has returned nothing. An end: it is over. A frame: it runs, and is in the desk's hands."""
        assert batch.task is not None, "a command does not run on the loop"
        frame = self._desk.begin(batch, token) if batch.work.gpus else None
        context = Context(batch.portion, batch.frame_of(token), token, self._ear, frame.devices if frame else ())
        CURRENT.set(context)
        variables = copy_context()
        if batch.traced is not None:
            variables.run(tracing.enter, batch.traced.trace)
        end: End | Frame | None = None
        try:
            coroutine = batch.task.function(*given.args, **given.kwargs)
        except Exception as error:  # noqa: BLE001 - nothing of it has run: the arguments do not fit
            end = endings.bad_input(token, error)
            return self._over(frame, end)
        try:
            awaited = variables.run(coroutine.send, None)
        except StopIteration as returned:
            if returned.value is not None or batch.work.artifacts or self._desk.leavings.open:
                end = self._values.ended(batch, token, returned.value, frame)
        except BaseException as error:  # noqa: BLE001 - whatever it raises is the frame's end, not ours
            end = self._failed(batch, token, error)
        else:
            frame = frame or self._desk.begin(batch, token)
            self._hand_over(frame, context, carrier, coroutine, awaited, variables)
            return frame
        return end if frame is None else self._over(frame, end)

    def _over(self, frame: Frame | None, end: End | Frame | None) -> End | Frame | None:
        if frame is None or isinstance(end, Frame):
            return end
        self._desk.end(frame, end)
        return frame

    def _hand_over(
        self,
        frame: Frame,
        context: Context,
        carrier: Carrier,
        coroutine: Awaited,
        awaited: Any,
        variables: Variables,
    ) -> None:
        def ask() -> None:
            context.cancelled = True
            carrier.task.cancel()

        def give_up() -> None:
            carrier.task.cancel()
            self._desk.end(frame, None)

        def on_end(value: Any, raised: BaseException | None) -> None:
            if _Forked.here:
                os._exit(FORKED_STATUS)
            self._ended(frame, value, raised)

        frame.ask, frame.kill = ask, give_up
        carrier.carry(coroutine, awaited, variables, on_end)

    def _ended(self, frame: Frame, value: Any, raised: BaseException | None) -> None:
        if raised is not None:
            self._desk.end(frame, self._failed(frame.batch, frame.token, raised))
        elif frame.stop is not None or frame.over:
            self._desk.end(frame, None)
        elif not isinstance(end := self._values.ended(frame.batch, frame.token, value, frame), Frame):
            self._desk.end(frame, end)

    def _failed(self, batch: Batch, token: int, error: BaseException) -> End:
        if isinstance(error, Exception) and not isinstance(error, endings.QUIET):
            self._ear.log(token, endings.traced(error, batch.work.env))
        return endings.failed(token, error, batch.work.env)

    def _refuse_input(self, batch: Batch, error: Exception) -> None:
        for token in range(batch.next, batch.end):
            if token not in batch.dropped:
                self._desk.ended_unbegun(batch, endings.bad_input(token, error))
        batch.next = batch.end
