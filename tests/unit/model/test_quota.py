"""Whether a booking fits, and which limit refuses it."""

import pytest

from rota.model.quota import LEVELS, Ask, Fit, Level, LevelStatus, Limit, Refusal, Resource, Usage, fits

SUBSCRIPTION = Level.SUBSCRIPTION
CORES, GPUS = Resource
NOTHING = Usage()


def level_statuses(*, cores=10_000, gpus=-1, usage=NOTHING, **others):
    """A subscription with free quota, and other levels by name."""
    return {SUBSCRIPTION: LevelStatus(Limit(cores, gpus), usage)} | {
        Level(name): LevelStatus(limit) for name, limit in others.items()
    }


@pytest.mark.parametrize(
    ("burst", "fit"), [(None, 0), (-1, 0), (0, 0), (99, 0), (100, 1), (250, 2), (300, 3), (1000, 5)]
)
def test_core_burst_is_never_unlimited(burst, fit):
    assert fits(level_statuses(cores=burst), Ask(100), 5).count == fit


@pytest.mark.parametrize(("burst", "fit"), [(None, 5), (-1, 5), (0, 0), (3, 3), (9, 5)])
def test_gpu_burst_is_unlimited_if_negative_or_missing(burst, fit):
    assert fits(level_statuses(gpus=burst), Ask(100, 1), 5).count == fit


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize(("cap", "fit"), [(None, 5), (-1, 5), (0, 5), (1, 0), (300, 3), (399, 3)])
def test_other_caps_are_unlimited_if_zero_negative_or_missing(level, cap, fit):
    assert fits(level_statuses(**{level: Limit(cap, None)}), Ask(100), 5).count == fit
    assert fits(level_statuses(**{level: Limit(None, cap)}), Ask(1, 100), 5).count == fit


def test_refusal_describes_the_first_refused_frame():
    held = level_statuses(cores=450, usage=Usage(100, 3))
    assert fits(held, Ask(100), 9) == Fit(3, Refusal(SUBSCRIPTION, CORES, 400, 450, 100))


def test_fit_of_all_frames_has_no_refusal():
    assert fits(level_statuses(cores=500), Ask(100), 5) == Fit(5)
    assert fits(level_statuses(cores=0), Ask(100), 0) == Fit(0)


def test_missing_burst_is_refused_as_zero():
    assert fits({}, Ask(100), 1) == Fit(0, Refusal(SUBSCRIPTION, CORES, 0, 0, 100))


def test_resource_that_is_not_requested_is_not_checked():
    over = Usage(9999, 99)
    full = {level: LevelStatus(Limit(1, 1), over) for level in LEVELS}
    full[SUBSCRIPTION] = LevelStatus(Limit(100_000, 1), over)
    full |= {level: LevelStatus(Limit(0, 1), over) for level in LEVELS[1:]}
    assert fits(full, Ask(100, 0), 5).count == 5


def test_cores_are_checked_at_every_level_before_gpus():
    tight = {level: LevelStatus(Limit(100, 1)) for level in LEVELS}
    for level in LEVELS:
        assert fits(tight, Ask(100, 1), 2).refusal == Refusal(level, CORES, 100, 100, 100)
        tight[level] = LevelStatus(Limit(10_000, 1))
    for level in LEVELS:
        assert fits(tight, Ask(100, 1), 2).refusal == Refusal(level, GPUS, 1, 1, 1)
        tight[level] = LevelStatus(Limit(10_000, 10_000))
    assert fits(tight, Ask(100, 1), 2) == Fit(2)


def test_tightest_limit_decides_at_any_level():
    held = level_statuses(cores=900, layer=Limit(200), point=Limit(300))
    assert fits(held, Ask(100), 9) == Fit(2, Refusal(Level.LAYER, CORES, 200, 200, 100))


def test_limit_below_current_usage_admits_nothing():
    assert fits(level_statuses(cores=100, usage=Usage(350)), Ask(100), 2) == Fit(
        0, Refusal(SUBSCRIPTION, CORES, 350, 100, 100)
    )
