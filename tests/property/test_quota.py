"""`fits` in one division against booking frame by frame, as a person would check it."""

from hypothesis import given
from hypothesis import strategies as st

from rota.model.quota import LEVELS, RESOURCES, Ask, Fit, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

AMOUNT = st.integers(0, 60)
LIMIT = st.none() | st.integers(-1, 60)
STANDING = st.builds(LevelStatus, st.builds(Limit, LIMIT, LIMIT), st.builds(Usage, AMOUNT, AMOUNT))
STANDINGS = st.dictionaries(st.sampled_from(LEVELS), STANDING)
ASK = st.builds(Ask, st.integers(0, 9), st.integers(0, 9)).filter(lambda ask: ask.cores or ask.gpus)


def one_by_one(standings, ask, wanted):
    usages = {level: standings.get(level, LevelStatus()).usage for level in LEVELS}
    for booked in range(wanted):
        for resource in RESOURCES:
            for level in LEVELS:
                limit = standings.get(level, LevelStatus()).limit.of(resource)
                if level is Level.SUBSCRIPTION and resource is Resource.CORES:
                    limit = limit or 0
                elif level is Level.SUBSCRIPTION:
                    limit = None if limit in (None, -1) else limit
                else:
                    limit = None if limit in (None, -1, 0) else limit
                current, asked = usages[level].of(resource), ask.of(resource)
                if asked > 0 and limit is not None and current + asked > limit:
                    return Fit(booked, Refusal(level, resource, current, limit, asked))
        usages = {level: usage.plus(ask) for level, usage in usages.items()}
    return Fit(wanted)


@given(STANDINGS, ASK, st.integers(0, 30))
def test_one_division_per_limit_is_the_same_as_frame_by_frame(standings, ask, wanted):
    assert fits(standings, ask, wanted) == one_by_one(standings, ask, wanted)


@given(STANDINGS, ASK, st.integers(0, 30))
def test_what_fits_takes_no_level_over_its_limit(standings, ask, wanted):
    count = fits(standings, ask, wanted).count
    for level, standing in standings.items():
        after = standing.usage.plus(ask, count)
        limit = standing.limit.cores
        if count and ask.cores and limit is not None and (limit > 0 or level is Level.SUBSCRIPTION):
            assert after.cores <= limit
