"""Converts booking groups to single-frame batches, as callers that book or release many jobs at once do."""

from itertools import groupby

import msgspec

from rota.accounting.ledger import NIL_UUID, BookingGroup, SingleFrameBatch


def to_single_frame_batches(groups):
    """Merge adjacent uncapped one-frame groups that differ only in job and layer into batches, keeping the order."""
    batch = []
    for kind, neighbours in groupby(groups, _kind):
        alike = list(neighbours)
        batch += alike if kind is None else [single_frame_batch(alike)]
    return batch


def single_frame_batch(groups):
    charge = msgspec.structs.replace(groups[0].charge, job=NIL_UUID, layer=NIL_UUID)
    tokens = [token for group in groups for token in group.tokens]
    jobs, layers = [group.charge.job for group in groups], [group.charge.layer for group in groups]
    return SingleFrameBatch(charge, groups[0].host, tokens, jobs, layers)


def with_single_frame_batches(deleted):
    """A release result with its one-frame groups as batches, as the finisher publishes it."""
    singles = [
        BookingGroup(each.charge, NIL_UUID, each.tokens, False) for each in deleted.released if len(each.tokens) == 1
    ]
    released = [each for each in deleted.released if len(each.tokens) > 1]
    return msgspec.structs.replace(
        deleted, released=released, swarms=to_single_frame_batches(sorted(singles, key=_kind))
    )


def _kind(group):
    charge = group.charge
    if group.capped or len(group.tokens) != 1:
        return None
    return (charge.alloc, charge.folder, charge.dept, charge.cores, charge.gpus, group.host)
