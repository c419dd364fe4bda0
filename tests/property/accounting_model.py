"""Model of the ledgers: charges by token in a dictionary, limits by key, and `rota.model.quota`.

`Model` has rows (`booked`), tokens that Redis holds without a row (`orphans`: a booker crashed, or a release was not
published) and tombstones. It answers like `AccountingService.book`: groups are decided in order, and tokens that Redis
holds without a row since an earlier fence are decided again, after all others.
"""

import msgspec

from rota.accounting.ledger import DeclineReason
from rota.model.quota import LEVELS, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

DEFERRED = object()
"""To be decided again: Redis held the token under an earlier fence, or was not asked yet."""


class Model:
    def __init__(self):
        self.managed = True
        self.seeded = True
        self.limits = {}
        self.booked = {}
        self.orphans = {}
        self.tombstones = {}

    @property
    def live(self):
        """Whether Redis decides."""
        return self.managed and self.seeded

    @property
    def tokens(self):
        """What Redis counts: charges by token."""
        orphans = {token: charge for token, (charge, _) in self.orphans.items()}
        return {token: charge for token, (charge, _) in self.booked.items()} | orphans

    def counters(self):
        held = self.tokens if self.live else {token: charge for token, (charge, _) in self.booked.items()}
        counters = {}
        for charge in held.values():
            add(counters, charge)
        return counters

    def book(self, groups, fence, *, force=False, unavailable=None, postgres_first=False):
        """An answer per group: (booked, already, refused, declined, refusal). `unavailable`: why Redis decides nothing;
        `postgres_first` means that the caller did not know that Redis manages the show."""
        if unavailable is not None:
            return [self._undecided(group, unavailable) for group in groups]
        if self.live and postgres_first:
            return self._decide_deferred(groups, [self._undecided(group, DEFERRED) for group in groups], fence, force)
        if self.live:
            return self._book_live(groups, fence, force)
        return [self._book_in_tables(group, force) for group in groups]

    def release(self, tokens, fence, *, published=True):
        """Charges of the released tokens. Redis learns of the release if it is `published`."""
        gone = {token: self.booked.pop(token)[0] for token in set(tokens) & set(self.booked)}
        self.tombstones |= dict.fromkeys(gone, fence)
        if self.live and not published:
            self.orphans |= {token: (charge, fence) for token, charge in gone.items()}
        return gone

    def clear_orphans(self):
        self.orphans = {}

    def reconcile(self, fence):
        """How many orphans had a tombstone already, and how many have one now."""
        known = [token for token in self.orphans if token in self.tombstones]
        added = [token for token in self.orphans if token not in self.tombstones]
        self.tombstones |= dict.fromkeys(added, fence)
        self.orphans = {}
        return len(known), len(added)

    def prune(self, fence):
        self.tombstones = {token: at for token, at in self.tombstones.items() if at >= fence}

    def _undecided(self, group, why):
        already, declined = [], {}
        for token in group.tokens:
            reason = self._barred(group, token) or why
            if reason is DeclineReason.ALREADY:
                already.append(token)
            else:
                declined[token] = reason
        return [], already, [], declined, None

    def _book_in_tables(self, group, force):
        barred = {token: why for token in group.tokens if (why := self._barred(group, token))}
        wanted = [token for token in group.tokens if token not in barred]
        fit, refusal = self._fit(group.charge, len(wanted), self.counters(), force)
        self.booked |= dict.fromkeys(wanted[:fit], (group.charge, group.host))
        already = [token for token, why in barred.items() if why is DeclineReason.ALREADY]
        declined = {token: why for token, why in barred.items() if why is not DeclineReason.ALREADY}
        return wanted[:fit], already, wanted[fit:], declined, refusal

    def _book_live(self, groups, fence, force):
        """The script decides all groups by token; then PostgreSQL accepts or refuses what it admitted."""
        counters = self.counters()
        decided = [self.decide(group, force, counters) for group in groups]
        answers = [self._insert(group, *each, fence) for group, each in zip(groups, decided, strict=True)]
        return self._decide_deferred(groups, answers, fence, force)

    def _decide_deferred(self, groups, answers, fence, force):
        """Decides the deferred tokens."""
        left = [
            msgspec.structs.replace(group, tokens=[token for token in group.tokens if answer[3].get(token) is DEFERRED])
            for group, answer in zip(groups, answers, strict=True)
        ]
        if not any(group.tokens for group in left):
            return answers
        return [merged(*each) for each in zip(answers, self._book_live(left, fence, force), strict=True)]

    def decide(self, group, force, counters):
        tokens = self.tokens
        absent = [token for token in group.tokens if token not in tokens]
        otherwise = [token for token in group.tokens if token in tokens and tokens[token] != group.charge]
        fit, refusal = self._fit(group.charge, len(absent), counters, force)
        for _ in absent[:fit]:
            add(counters, group.charge)
        return absent[fit:], otherwise, refusal

    def _insert(self, group, refused, otherwise, refusal, fence):
        booked, already, declined = [], [], dict.fromkeys(otherwise, DeclineReason.DUPLICATE)
        for token in group.tokens:
            if token in refused or token in declined:
                continue
            match self._barred(group, token):
                case None if token in self.orphans and self.orphans[token][1] < fence:
                    declined[token] = DEFERRED
                    del self.orphans[token]
                case None:
                    booked.append(token)
                    self.booked[token] = (group.charge, group.host)
                    self.orphans.pop(token, None)
                case DeclineReason.ALREADY:
                    already.append(token)
                case why:
                    declined[token] = why
                    self.orphans.pop(token, None)
        return booked, already, refused, declined, refusal

    def _barred(self, group, token):
        if token in self.booked:
            return (
                DeclineReason.ALREADY if self.booked[token] == (group.charge, group.host) else DeclineReason.DUPLICATE
            )
        return DeclineReason.TOMBSTONED if token in self.tombstones else None

    def _fit(self, charge, wanted, counters, force):
        keys = {level: (level, charge.key(level)) for level in LEVELS}
        if keys[Level.SUBSCRIPTION] not in self.limits:
            resource = Resource.CORES if charge.cores else Resource.GPUS
            refusal = Refusal(Level.SUBSCRIPTION, resource, 0, 0, charge.ask.of(resource))
            return 0, refusal if wanted else None
        if force:
            return wanted, None
        held = {
            level: LevelStatus(self.limits.get(key, Limit()), counters.get(key, Usage())) for level, key in keys.items()
        }
        fit = fits(held, charge.ask, wanted)
        return fit.count, fit.refusal


def merged(first, then):
    booked, already, refused, declined, refusal = then
    left = {token: why for token, why in first[3].items() if why is not DEFERRED}
    return [*first[0], *booked], [*first[1], *already], [*refused, *first[2]], left | declined, refusal or first[4]


def add(counters, charge):
    for level in LEVELS:
        key = (level, charge.key(level))
        counters[key] = counters.get(key, Usage()).plus(charge.ask)
