import math

import pytest
from rich.console import Console

from jaxml25.training import claims


@pytest.mark.parametrize(("measured", "holds"), [(0.1, True), (0.2, True), (0.3, False), (math.nan, False)])
def test_at_most_holds_up_to_the_bar_and_never_for_nan(measured, holds):
    claim = claims.at_most("small", paper=0.1, measured=measured, bar=0.2, stderr=0.01)
    assert claim.holds is holds and claim.bar == "<= 0.2" and claim.stderr == 0.01


@pytest.mark.parametrize(("measured", "holds"), [(0.1, False), (0.2, True), (0.3, True), (math.nan, False)])
def test_at_least_holds_from_the_bar_on_and_never_for_nan(measured, holds):
    claim = claims.at_least("large", paper="larger", measured=measured, bar=0.2)
    assert claim.holds is holds and claim.bar == ">= 0.2" and claim.stderr is None


@pytest.mark.parametrize(
    ("measured", "stderr", "holds"),
    [(1.25, 0.125, True), (0.75, 0.125, True), (1.375, 0.125, False), (0.5, 0.125, False), (1.0, 0.0, True)]
    + [(math.nan, 0.1, False), (1.0, math.nan, False), (math.inf, math.inf, True)],
)
def test_within_counts_standard_errors_on_both_sides_and_never_holds_for_nan(measured, stderr, holds):
    claim = claims.within("one", paper=None, measured=measured, expected=1.0, stderr=stderr, standard_errors=2.0)
    assert claim.holds is holds and claim.bar == "1 +- 2 standard errors"


def test_unjudged_claims_keep_everything_but_the_verdict():
    claim = claims.at_most("small", paper=0.1, measured=0.1, bar=0.2)
    assert claims.unjudged([claim]) == [claim._replace(holds=None)]


def test_the_table_shows_every_claim_with_its_verdict_and_brackets_as_they_are():
    judged = [
        claims.at_most("p[x] is small", paper="[y]", measured=0.1, bar=0.2, stderr=0.015),
        claims.at_least("large", paper=None, measured=0.1, bar=0.2),
        *claims.unjudged([claims.at_least("open", paper=1.5, measured=0.1, bar=0.2)]),
    ]
    console = Console(width=120)
    with console.capture() as shown:
        console.print(claims.table(judged))
    first, second, third = [line for line in shown.get().splitlines() if line.startswith("│")]
    assert "p[x] is small" in first and "[y]" in first and "0.1 ± 0.015" in first and "yes" in first
    assert "–" in second and "no" in second
    assert "1.5" in third and "not judged" in third
