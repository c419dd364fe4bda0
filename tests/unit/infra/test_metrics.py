"""The metrics registry refuses unbounded labels and names outside the scheme."""

import itertools
import string

import pytest

from rota.infra.telemetry import metrics

LETTERS = ("".join(letters) for letters in itertools.product(string.ascii_lowercase, repeat=4))


@pytest.fixture
def name():
    """A metric name that no other test of this process uses."""
    return f"rota_test_{next(LETTERS)}"


def test_counter_is_rendered_with_its_total(name):
    metrics.counter(name, "Things.", labels=("reason",)).labels("cap").inc(2)
    assert f'{name}_total{{reason="cap"}} 2.0' in metrics.render().decode()
    assert f"{name}_created" not in metrics.render().decode()


def test_gauge_and_histogram_are_rendered(name):
    metrics.gauge(name, "Now.").set(3)
    metrics.histogram(f"{name}_seconds", "How long.").observe(0.0007)
    page = metrics.render().decode()
    assert f"\n{name} 3.0\n" in page
    assert f'{name}_seconds_bucket{{le="0.0005"}} 0.0' in page
    assert f'{name}_seconds_bucket{{le="0.001"}} 1.0' in page
    assert f'{name}_seconds_bucket{{le="600.0"}} 1.0' in page


@pytest.mark.parametrize(
    "bad", ["jobs", "rota_", "rota__jobs", "rota_Jobs", "rota_jobs_total", "rota_jobs2", "rota_a-b"]
)
def test_metric_name_outside_the_scheme_is_refused(bad):
    with pytest.raises(AssertionError, match=bad):
        metrics.counter(bad, "Bad.")


@pytest.mark.parametrize("label", ["job_id", "id", "frame", "worker", "run", "token", "booking_token", "user", "job"])
def test_label_with_unbounded_values_is_refused(name, label):
    with pytest.raises(AssertionError, match=f"label '{label}'"):
        metrics.gauge(name, "Bad.", labels=("topic", label))


@pytest.mark.parametrize("label", ["topic", "state", "reason", "pool", "show", "name", "service", "phase"])
def test_label_with_bounded_values_is_accepted(name, label):
    metrics.histogram(name, "Good.", labels=(label,))


def test_metric_name_declared_twice_is_refused(name):
    metrics.counter(name, "First.")
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.counter(name, "Second.")


def test_process_metrics_are_rendered():
    assert "process_open_fds" in metrics.render().decode()
