"""What the tables held and what servers said before a violation, written to a file in the folder SOAK_TRACE."""

import os
from collections import deque
from pathlib import Path

LOOKS = 100
"""Kept and written, about half a minute."""


class Trace:
    def __init__(self, seed):
        folder = os.environ.get("SOAK_TRACE")
        self._path = Path(folder) / f"seed{seed}.txt" if folder else None
        self._looks = deque(maxlen=LOOKS)

    def add(self, look):
        if self._path is not None:
            self._looks.append(
                "\n".join([*lines_of(look.after), *(f"  {name}: {said}" for name, said in look.explained)])
            )

    def write(self, violations):
        """Write what led to these."""
        if self._path is not None and violations:
            with self._path.open("a") as file:
                file.write("\n".join([*self._looks, *(f"#### {each}" for each in violations), ""]))
            self._looks.clear()


def lines_of(facts):
    yield f"== {facts.now:.2f} {facts.at:.2f}"
    for layer in facts.layers:
        job, queue = facts.job[layer.job], facts.queue[layer.queue]
        yield (
            f"{facts.show[job.show].name} {job.name} {job.id} priority {job.priority} {job.state} {job.reason} ends as"
            f" {job.ends_as} age {facts.now - job.submitted:.1f} in {queue.name}{' (paused)' if queue.paused else ''}:"
            f" {layer.frames} frames, {layer.ended} ended, {layer.deferred} deferred, {facts.booked[layer.id]} booked,"
            f" {facts.unclaimed(layer)} unclaimed, {facts.parked.get(job.id, 0)} parked, attempt {layer.attempt}"
        )
    for proc in facts.procs:
        name = facts.job[proc.job].name if proc.job in facts.job else "an ended job"
        yield f"  {proc.token} of {name} {proc.job} on {proc.host} since {facts.now - proc.booked:.1f} s"
    for share in facts.shares:
        used = facts.used[f"share {share.show} {share.pool}"]
        yield f"  {facts.show[share.show].name} uses {used} of {share.burst} in {share.name}"
    for each in facts.unbooked:
        yield f"  claim {each.claim}: {each.frames} frames of layer {each.layer}"
