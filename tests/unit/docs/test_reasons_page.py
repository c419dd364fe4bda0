"""The page about reasons is what the code says, and every reason has a tier or ends something."""

from pathlib import Path

from rota.model.reasons import MEANINGS, REMEDIES, TIERS, WAITING_REASONS, Reason, Tier
from tools.docs.reasons_reference import page

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "reasons.md"


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text() == page()


def test_every_reason_has_a_meaning_and_a_remedy_in_sentences():
    assert set(MEANINGS) == set(REMEDIES) == set(Reason)
    assert all(text.endswith(".") for text in (*MEANINGS.values(), *REMEDIES.values()))


def test_whatever_waits_has_a_tier_and_tiers_are_mended_in_their_order():
    assert set(TIERS) >= WAITING_REASONS
    # Told of a job that waits, too: what would end it, or what one try of several has ended with.
    assert set(TIERS) - WAITING_REASONS == {Reason.NO_POOL_MAPPING, Reason.ENDING, Reason.DISPATCH_FAILED}
    assert sorted(Tier, key=lambda tier: tier.rank) == [
        *("misconfigured", "blocked", "quota", "capacity", "order", "system")
    ]


def test_a_remedy_names_what_it_is_told_and_leaves_the_rest_in_capitals():
    assert Reason.NO_POOL_MAPPING.remedy(topic="shot").startswith("`rota pool map shot POOL` maps")
    assert "`rota sub set film farm --burst 5` raises" in Reason.QUOTA_SUBSCRIPTION.remedy(
        show="film", pool="farm", burst="burst", n="5"
    )
