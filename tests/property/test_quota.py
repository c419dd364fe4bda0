"""`fits` computes in one division what booking frame by frame gives."""

from hypothesis import given
from hypothesis import strategies as st

from rota.model.quota import LEVELS, RESOURCES, Ask, Fit, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

AMOUNT = st.integers(0, 60)
LIMIT = st.none() | st.integers(-1, 60)
LEVEL_STATUS = st.builds(LevelStatus, st.builds(Limit, LIMIT, LIMIT), st.builds(Usage, AMOUNT, AMOUNT))
LEVEL_STATUSES = st.dictionaries(st.sampled_from(LEVELS), LEVEL_STATUS)
ASK = st.builds(Ask, st.integers(0, 9), st.integers(0, 9)).filter(lambda ask: ask.cores or ask.gpus)


def one_by_one(statuses, ask, wanted):
    usages = {level: statuses.get(level, LevelStatus()).usage for level in LEVELS}
    for booked in range(wanted):
        for resource in RESOURCES:
            for level in LEVELS:
                limit = statuses.get(level, LevelStatus()).limit.of(resource)
                if level is Level.SUBSCRIPTION and resource is Resource.CORES:
                    limit = limit or 0
                elif level is Level.SUBSCRIPTION:
                    limit = None if limit in (None, -1) else limit
                else:
                    limit = None if limit in (None, -1, 0) else limit
                current, requested = usages[level].of(resource), ask.of(resource)
                if requested > 0 and limit is not None and current + requested > limit:
                    return Fit(booked, Refusal(level, resource, current, limit, requested))
        usages = {level: usage.plus(ask) for level, usage in usages.items()}
    return Fit(wanted)


@given(LEVEL_STATUSES, ASK, st.integers(0, 30))
def test_fits_equals_booking_frame_by_frame(statuses, ask, wanted):
    assert fits(statuses, ask, wanted) == one_by_one(statuses, ask, wanted)


@given(LEVEL_STATUSES, ASK, st.integers(0, 30))
def test_fitting_frames_exceed_no_limit(statuses, ask, wanted):
    count = fits(statuses, ask, wanted).count
    for level, status in statuses.items():
        after = status.usage.plus(ask, count)
        limit = status.limit.cores
        if count and ask.cores and limit is not None and (limit > 0 or level is Level.SUBSCRIPTION):
            assert after.cores <= limit
