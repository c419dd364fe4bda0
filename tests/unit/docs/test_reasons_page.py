"""docs/reference/reasons.md matches the code; every reason has a tier or is terminal."""

from pathlib import Path

from rota.model.reasons import MEANINGS, REMEDIES, TIERS, WAITING_REASONS, Reason, Tier
from tools.docs.reasons_reference import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"


def test_reasons_page_matches_the_code():
    assert PAGE.read_text() == page()


def test_every_reason_has_a_meaning_and_a_remedy_in_sentences():
    assert set(MEANINGS) == set(REMEDIES) == set(Reason)
    assert all(text.endswith(".") for text in (*MEANINGS.values(), *REMEDIES.values()))


def test_every_waiting_reason_has_a_tier_and_tiers_are_ranked():
    assert set(TIERS) >= WAITING_REASONS
    # These three are also shown for waiting jobs: what will end the job, or how one attempt ended.
    assert set(TIERS) - WAITING_REASONS == {Reason.NO_POOL_MAPPING, Reason.ENDING, Reason.DISPATCH_FAILED}
    assert sorted(Tier, key=lambda tier: tier.rank) == [
        *("misconfigured", "blocked", "quota", "capacity", "order", "system")
    ]


def test_remedy_fills_in_known_values_and_keeps_placeholders_for_the_rest():
    assert Reason.NO_POOL_MAPPING.remedy(topic="shot").startswith("`rota pool map shot POOL` maps")
    assert "`rota sub set film farm --burst 5` raises" in Reason.QUOTA_SUBSCRIPTION.remedy(
        show="film", pool="farm", burst="burst", n="5"
    )
