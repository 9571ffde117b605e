"""The report says what was seen, in both languages."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.campaign.values import observed, plan
from tmd.campaign import page, picture
from tmd.campaign.campaign import CampaignOutcome, Ending, Result
from tmd.campaign.costs import Cost
from tmd.campaign.scenario import FaultPart, Scenario
from tmd.core.values.errors import ConfigError
from tmd.demo.report import PARTS

COST = Cost("p10", "failover", "trainer.exited", 0.25, dict.fromkeys(PARTS, 0.05), 1)
KILL = Scenario(name="one", faults=(FaultPart(kind="process.kill"),))
GOOD = Result("process", KILL, observed(plan("failover done", 1)), (), (COST,))
BAD = Result("process", KILL, observed(), ("plans: none | <instead>",))
SKIPPED = Result("cable", KILL, observed(skipped="needs root"))


def outcome(*results: Result) -> CampaignOutcome:
    return CampaignOutcome(results, (Ending("process", 100, (), 3.0),), 4.0)


@pytest.mark.parametrize("suffix", page.SUFFIXES)
def test_a_report_names_kinds_costs_deviations_and_what_was_skipped(
    suffix: str, tmp_path: Path
) -> None:
    """And the command that does it again."""
    file = tmp_path / f"report{suffix}"
    page.write(outcome(GOOD, BAD, SKIPPED), "tmd campaign run process", file)
    text = file.read_text()

    parts = ("with deviations", "process.kill", "0.250 s", "needs root", "tmd campaign run process")
    for said in parts:
        assert said in text
    assert "<instead>" not in text or suffix == ".md"


def test_a_campaign_is_well_only_if_the_job_is() -> None:
    """Losses that differ are no detail."""
    same = CampaignOutcome((GOOD,), (Ending("process", 100, (), 3.0),), 4.0)
    other = CampaignOutcome((GOOD,), (Ending("process", 100, ("losses differ",), 3.0),), 4.0)

    assert same.well
    assert "identical" in page.summary(same)
    assert not other.well
    assert page.summary(other).endswith("; 1 job with deviations from the undisturbed run.")


def test_weights_that_were_not_compared_are_not_called_identical() -> None:
    """A scenario broke the cluster, so that the job did not end: only losses were compared."""
    broken = CampaignOutcome((BAD,), (Ending("process", 37, (), 3.0, whole=False),), 4.0)

    assert "identical" not in page.summary(broken)
    assert page.summary(broken).startswith("1 scenario of 1 kind of fault in 4 s, 1 with")


def test_a_campaign_that_has_played_nothing_proves_nothing() -> None:
    """Without root, or another release, all its scenarios may be skipped."""
    nothing = CampaignOutcome((SKIPPED,), (Ending("process", 0, (), 3.0),), 4.0)

    assert not nothing.well
    assert "identical" not in page.summary(nothing)
    assert "every scenario was skipped" in page.as_markdown(nothing, "tmd campaign run upgrade")


def test_a_report_of_an_unknown_format_is_refused_beforehand(tmp_path: Path) -> None:
    """Not after twenty minutes."""
    with pytest.raises(ConfigError, match=r"must end with \.html or \.md"):
        page.check(tmp_path / "report.pdf")


def test_pictures_are_well_formed_and_have_a_mark_for_each_value() -> None:
    """Also where values are none at all, negative, or large."""
    values = {"a.b": [0.1, -0.5, 40.0], "<c>": [0.0, 0.0, 0.0]}
    dots = ElementTree.fromstring(picture.dots(values))
    bars = ElementTree.fromstring(picture.bars(values, ("x", "y", "z")))

    assert len(dots.findall("{*}circle")) == 6
    assert len(bars.findall("{*}rect")) == 6 + 3
