"""The rules that turn intervals into words. Pure: no records, no files, no formatting.

Every decision is read off a printed two-sided 1 - alpha interval, so a one-sided question is answered at
alpha / 2. "Below" and "above" are strict: a bound that equals the margin, or zero, decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

RESTORED = "restored"
PARTLY_RESTORED = "partly restored"
FAILS_TO_RESTORE = "fails to restore"
HARMS = "harms"
INCONCLUSIVE = "inconclusive"
NO_GAP = "no gap"
RETAINED = "retained"
LOST = "lost"

TEXT_VERDICTS = (RESTORED, PARTLY_RESTORED, FAILS_TO_RESTORE, HARMS, INCONCLUSIVE, NO_GAP)
VISION_VERDICTS = (RETAINED, LOST, INCONCLUSIVE)

SENTENCES: dict[str, str] = {
    RESTORED: "the merge is within the margin of the base and above the vlm: the lost ability is back.",
    PARTLY_RESTORED: "the merge is above the vlm, but still below the base by more than the margin.",
    FAILS_TO_RESTORE: "the merge is below the base by more than the margin and not clearly off the vlm.",
    HARMS: "the merge is below the base by more than the margin, and below the vlm as well.",
    INCONCLUSIVE: "these documents cannot decide; more of them, or a wider margin, could.",
    NO_GAP: "the vlm is within the margin of the base, so there is nothing to restore.",
    RETAINED: "on pictures the merge is within the margin of the vlm.",
    LOST: "on pictures the merge is below the vlm by more than the margin.",
}
"""One sentence for people, for each verdict."""

TEXT_ONLY = "restored (text only)"
PICTURES_LOST = ", pictures lost"


@dataclass(frozen=True)
class Interval:
    """A paired difference in points (0 to 100 scale) with the bounds of its two-sided interval."""

    estimate: float
    low: float
    high: float

    def negated(self) -> Interval:
        """The interval of the opposite difference."""
        return Interval(0.0 - self.estimate, 0.0 - self.high, 0.0 - self.low)

    def rounded(self, digits: int) -> Interval:
        """The interval as it is printed with ``digits`` decimals (never a negative zero)."""
        return Interval(*(round(value, digits) + 0.0 for value in (self.estimate, self.low, self.high)))


def has_gap(gap: Interval, margin: float) -> bool:
    """True when the base is above the vlm by more than ``margin``: there is something to restore."""
    return gap.low > margin


def text_verdict(gap: Interval, loss: Interval, moved: Interval, margin: float) -> str:
    """Names what a merge did to a text task.

    In this order: gap.high < margin is ``no gap``; a gap that is not above the margin is unresolved and
    ``inconclusive``; loss.high < margin with moved.low > 0 is ``restored``; loss.low > margin is not
    restored, and is ``partly restored`` if moved.low > 0, ``harms`` if moved.high < 0, else ``fails to
    restore``; anything else is ``inconclusive``.

    Args:
        gap: base - vlm, points.
        loss: base - merge, points.
        moved: merge - vlm, points.
        margin: The declared margin, points.

    Returns:
        One of ``TEXT_VERDICTS``.
    """
    if gap.high < margin:
        return NO_GAP
    if not has_gap(gap, margin):
        return INCONCLUSIVE
    if loss.high < margin and moved.low > 0:
        return RESTORED
    if loss.low > margin:
        if moved.low > 0:
            return PARTLY_RESTORED
        return HARMS if moved.high < 0 else FAILS_TO_RESTORE
    return INCONCLUSIVE


def vision_verdict(loss: Interval, margin: float) -> str:
    """Names what a merge did to a picture task.

    Args:
        loss: vlm - merge, points.
        margin: The declared margin, points.

    Returns:
        ``retained`` if loss.high < margin, ``lost`` if loss.low > margin, else ``inconclusive``.
    """
    if loss.high < margin:
        return RETAINED
    return LOST if loss.low > margin else INCONCLUSIVE


# Every claim of `overall` is about ALL tasks (an intersection-union test, no correction): the first of
# these that occurs among the text tasks stands for the point. What is surely not restored comes before
# what is undecided.
_WORST_FIRST = (HARMS, FAILS_TO_RESTORE, PARTLY_RESTORED, INCONCLUSIVE, RESTORED, NO_GAP)
_WORST_VISION_FIRST = (LOST, INCONCLUSIVE, RETAINED)


def text_summary(text: Sequence[str]) -> str:
    """The verdict of a point over all its text tasks; empty without one.

    ``restored`` needs every task restored or without a gap, and at least one restored.
    """
    return next((verdict for verdict in _WORST_FIRST if verdict in text), "")


def vision_summary(vision: Sequence[str]) -> str:
    """The verdict of a point over all its picture tasks; empty without one."""
    return next((verdict for verdict in _WORST_VISION_FIRST if verdict in vision), "")


def overall_verdict(text: Sequence[str], vision: Sequence[str]) -> str:
    """Joins the verdicts of a point. A point restores only if text is restored and pictures are retained.

    Args:
        text: Verdicts of the text tasks that count.
        vision: Verdicts of the picture tasks that count.

    Returns:
        ``restored`` if text is restored and pictures retained; ``restored (text only)`` if no picture task
        was asked for; ``inconclusive`` if text is restored and pictures are undecided; otherwise the text
        verdict. ``, pictures lost`` follows wherever pictures are lost. Without text tasks the vision
        verdict; empty without any verdict.
    """
    words, pictures = text_summary(text), vision_summary(vision)
    if not words:
        return pictures
    if pictures == LOST:
        return words + PICTURES_LOST
    if words == RESTORED and pictures != RETAINED:
        return INCONCLUSIVE if pictures else TEXT_ONLY
    return words
