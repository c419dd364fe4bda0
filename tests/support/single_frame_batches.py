"""Frames as swarms: what a caller that books or releases many jobs at once makes of groups."""

from itertools import groupby

import msgspec

from rota.accounting.ledger import NIL_UUID, BookingGroup, SingleFrameBatch


def gathered(groups):
    """Neighbours of one frame and no caps that are alike but for their job and layer become a swarm, in their order."""
    batch = []
    for kind, neighbours in groupby(groups, _kind):
        alike = list(neighbours)
        batch += alike if kind is None else [swarm_of(alike)]
    return batch


def swarm_of(groups):
    charge = msgspec.structs.replace(groups[0].charge, job=NIL_UUID, layer=NIL_UUID)
    tokens = [token for group in groups for token in group.tokens]
    jobs, layers = [group.charge.job for group in groups], [group.charge.layer for group in groups]
    return SingleFrameBatch(charge, groups[0].host, tokens, jobs, layers)


def as_swarms(deleted):
    """What was released, with all that is single in swarms, as whoever ends frames tells it."""
    singles = [
        BookingGroup(each.charge, NIL_UUID, each.tokens, False) for each in deleted.released if len(each.tokens) == 1
    ]
    released = [each for each in deleted.released if len(each.tokens) > 1]
    return msgspec.structs.replace(deleted, released=released, swarms=gathered(sorted(singles, key=_kind)))


def _kind(group):
    charge = group.charge
    if group.capped or len(group.tokens) != 1:
        return None
    return (charge.alloc, charge.folder, charge.dept, charge.cores, charge.gpus, group.host)
