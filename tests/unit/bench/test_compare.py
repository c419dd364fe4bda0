"""`python -m bench compare`: what fails, and what is refused before anything is measured."""

import subprocess
import sys

import pytest

from bench.compare import Laps, run
from bench.report import Report


@pytest.mark.parametrize(("this", "passes"), [((104.0, 130.0, 109.0), True), ((112.0, 90.0, 120.0), False)])
def test_median_of_the_pairs_decides(this, passes):
    laps = Laps()
    for cpu_us in this:
        for name, sample in (("this", cpu_us), ("other", 100.0)):
            laps.cpu_us[name].append(sample)
            laps.per_s[name].append(1e6 / sample)
    assert Report([*laps.figures("frame", "HEAD")]).within_bars is passes


def test_unknown_revision_is_refused_before_the_first_lap():
    with pytest.raises(SystemExit, match="There is no revision 'nowhere' here"):
        run(quick=True, revision="nowhere")


@pytest.mark.parametrize("arguments", [["compare"], ["e2e", "HEAD"]])
def test_revision_is_an_argument_of_compare_alone(arguments):
    done = subprocess.run([sys.executable, "-m", "bench", *arguments], check=False, capture_output=True, text=True)
    assert (done.returncode, "`compare` needs a revision" in done.stderr) == (2, True)
