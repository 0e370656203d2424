"""Claims: what a publication found, what was measured here, and the bar that decides whether it holds."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rich.table import Table
from rich.text import Text


class Claim(NamedTuple):
    """One finding of a publication, judged."""

    claim: str  # the finding, in our own words
    paper: float | str | None  # the publication's figure
    measured: float  # ours
    stderr: float | None  # its standard error
    bar: str  # what `measured` has to satisfy
    holds: bool | None  # None where the run is too small to judge


def at_most(claim: str, *, paper: float | str | None, measured: float, bar: float, stderr: float | None = None) -> Claim:
    """Holds if `measured` is at most `bar`; never for NaN."""
    return _claim(claim, paper, measured, stderr, f"<= {bar:.4g}", measured <= bar)


def at_least(claim: str, *, paper: float | str | None, measured: float, bar: float, stderr: float | None = None) -> Claim:
    """Holds if `measured` is at least `bar`; never for NaN."""
    return _claim(claim, paper, measured, stderr, f">= {bar:.4g}", measured >= bar)


def within(
    claim: str,
    *,
    paper: float | str | None,
    measured: float,
    expected: float,
    stderr: float,
    standard_errors: float = 4.0,
) -> Claim:
    """Holds if `measured` lies within `standard_errors` times `stderr` of `expected`; never for NaN."""
    bar = f"{expected:.4g} +- {standard_errors:g} standard errors"
    return _claim(claim, paper, measured, stderr, bar, abs(measured - expected) <= standard_errors * stderr)


def unjudged(claims: Sequence[Claim]) -> list[Claim]:
    """The same claims with `holds` left open, for runs too small to judge them."""
    return [claim._replace(holds=None) for claim in claims]


def table(claims: Sequence[Claim]) -> Table:
    """A console table of the claims."""
    rendered = Table("claim", "paper", "measured", "bar", "holds", title="Claims", title_justify="left")
    for claim in claims:
        measured = _figure(claim.measured)
        if claim.stderr is not None:
            measured += f" ± {claim.stderr:.2g}"
        verdict = {None: Text("not judged"), True: Text("yes", "green"), False: Text("no", "red")}[claim.holds]
        # As Text, or what stands in brackets would be taken for a style.
        rendered.add_row(Text(claim.claim), Text(_figure(claim.paper)), measured, claim.bar, verdict)
    return rendered


def _claim(claim, paper, measured, stderr, bar, holds) -> Claim:
    measured = float(measured)
    holds = bool(holds) and not math.isnan(measured)
    return Claim(claim, paper, measured, None if stderr is None else float(stderr), bar, holds)


def _figure(value: float | str | None) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else f"{value:.4g}"
