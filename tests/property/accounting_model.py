"""What the books should say: a dictionary of charges by token, limits by key, and `rota.model.quota`.

`Model` knows rows (`booked`), tokens that Redis holds without a row (`ghosts`: a booker died, a release was not told),
and graves. Its answers are those of `Books.book`: groups are decided one after the other, and what Redis holds since an
earlier fence without a row is decided once more, behind all others.
"""

import msgspec

from rota.accounting.ledger import DeclineReason
from rota.model.quota import LEVELS, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

LATER = object()
"""Put off: Redis held it under an earlier fence, or was not asked yet."""


class Model:
    def __init__(self):
        self.managed = True
        self.seeded = True
        self.limits = {}
        self.booked = {}
        self.ghosts = {}
        self.graves = {}

    @property
    def live(self):
        """Whether Redis decides."""
        return self.managed and self.seeded

    @property
    def tokens(self):
        """What Redis counts: charges by token."""
        ghosts = {token: charge for token, (charge, _) in self.ghosts.items()}
        return {token: charge for token, (charge, _) in self.booked.items()} | ghosts

    def counters(self):
        held = self.tokens if self.live else {token: charge for token, (charge, _) in self.booked.items()}
        counters = {}
        for charge in held.values():
            add(counters, charge)
        return counters

    def book(self, groups, fence, *, force=False, off=None, elsewhere=False):
        """An answer per group: (booked, already, refused, declined, refusal). `off` says why Redis decides nothing;
        `elsewhere` that PostgreSQL was asked first, by somebody who did not know that Redis keeps the show."""
        if off is not None:
            return [self._undecided(group, off) for group in groups]
        if self.live and elsewhere:
            return self._again(groups, [self._undecided(group, LATER) for group in groups], fence, force)
        if self.live:
            return self._book_live(groups, fence, force)
        return [self._book_in_tables(group, force) for group in groups]

    def release(self, tokens, fence, *, told=True):
        """What was released: charges by token. Redis hears of it if it is `told`."""
        gone = {token: self.booked.pop(token)[0] for token in set(tokens) & set(self.booked)}
        self.graves |= dict.fromkeys(gone, fence)
        if self.live and not told:
            self.ghosts |= {token: (charge, fence) for token, charge in gone.items()}
        return gone

    def forget_ghosts(self):
        self.ghosts = {}

    def recount(self, fence):
        """How many ghosts lay in a grave, and how many lie in one now."""
        known = [token for token in self.ghosts if token in self.graves]
        buried = [token for token in self.ghosts if token not in self.graves]
        self.graves |= dict.fromkeys(buried, fence)
        self.ghosts = {}
        return len(known), len(buried)

    def prune(self, fence):
        self.graves = {token: at for token, at in self.graves.items() if at >= fence}

    def _undecided(self, group, why):
        already, declined = [], {}
        for token in group.tokens:
            told = self._barred(group, token) or why
            if told is DeclineReason.ALREADY:
                already.append(token)
            else:
                declined[token] = told
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
        """The script decides all groups by tokens; then PostgreSQL takes or refuses what it let in."""
        counters = self.counters()
        decided = [self.decide(group, force, counters) for group in groups]
        answers = [self._insert(group, *each, fence) for group, each in zip(groups, decided, strict=True)]
        return self._again(groups, answers, fence, force)

    def _again(self, groups, answers, fence, force):
        """What was put off is decided now."""
        left = [
            msgspec.structs.replace(group, tokens=[token for token in group.tokens if told[3].get(token) is LATER])
            for group, told in zip(groups, answers, strict=True)
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
                case None if token in self.ghosts and self.ghosts[token][1] < fence:
                    declined[token] = LATER
                    del self.ghosts[token]
                case None:
                    booked.append(token)
                    self.booked[token] = (group.charge, group.host)
                    self.ghosts.pop(token, None)
                case DeclineReason.ALREADY:
                    already.append(token)
                case why:
                    declined[token] = why
                    self.ghosts.pop(token, None)
        return booked, already, refused, declined, refusal

    def _barred(self, group, token):
        if token in self.booked:
            return (
                DeclineReason.ALREADY if self.booked[token] == (group.charge, group.host) else DeclineReason.DUPLICATE
            )
        return DeclineReason.TOMBSTONED if token in self.graves else None

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
    left = {token: why for token, why in first[3].items() if why is not LATER}
    return [*first[0], *booked], [*first[1], *already], [*refused, *first[2]], left | declined, refusal or first[4]


def add(counters, charge):
    for level in LEVELS:
        key = (level, charge.key(level))
        counters[key] = counters.get(key, Usage()).plus(charge.ask)
