"""What ``--drafter`` says: which drafter, and what is put around it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hspec.drafters.drafter import Drafter
from hspec.drafters.lookup_first import LONGEST_COPY, LookupFirst, usual_lookup
from hspec.drafters.lookup_first import SUFFIX as LOOKUP
from hspec.drafters.ngram import NAME as NGRAM
from hspec.drafters.while_sure import SUFFIX as SURE
from hspec.drafters.while_sure import WhileSure
from hspec.errors import UsageError

_ENDING = re.compile(rf"({re.escape(LOOKUP)}|{re.escape(SURE)}[^+/]*)$")


@dataclass(frozen=True)
class Around:
    """What is put around a drafter; as it stands here, nothing."""

    lookup: bool = False
    """Whether prompt lookup comes first (:class:`hspec.drafters.lookup_first.LookupFirst`)."""
    least: float | None = None
    """How sure it must be to draft (:class:`hspec.drafters.while_sure.WhileSure`); None drafts always."""

    @property
    def endings(self) -> str:
        """As they stand behind a drafter's name."""
        return ("" if self.least is None else f"{SURE}{self.least:g}") + (LOOKUP if self.lookup else "")

    def put(self, drafter: Drafter, longest_copy: int = LONGEST_COPY) -> Drafter | WhileSure | LookupFirst:
        """Doubts are of what the drafter drafts itself, not of what is looked up.

        Args:
            longest_copy: tokens that lookup drafts at most.

        Raises:
            UsageError: it has no confidence head, and would need one.
        """
        sure = drafter if self.least is None else WhileSure(drafter, self.least)
        return LookupFirst(sure, usual_lookup(drafter, longest_copy)) if self.lookup else sure


NOTHING = Around()


def split(source: str | Path | None) -> tuple[str | Path | None, Around]:
    """``FOLDER``, ``FOLDER+ngram``, ``FOLDER+sure0.4``, or both endings in any order: the drafter's folder, hub id or name (None for the
    one that ships), and what is put around it. A folder that is called so is a folder.

    Raises:
        UsageError: an ending twice, a chance that is none, or lookup alone with something around it.
    """
    name, endings = "" if source is None else str(source), list[str]()
    while (found := _ENDING.search(name)) and not Path(name).expanduser().exists():
        endings.append(found[0])
        name = name.removesuffix(found[0])
    if endings and name == NGRAM:
        raise UsageError(
            f"--drafter {source}: {NGRAM} is no trained drafter: give it alone, or a drafter's folder with {LOOKUP}"
        )
    chances = [ending.removeprefix(SURE) for ending in endings if ending != LOOKUP]
    for ending, count in ((SURE, len(chances)), (LOOKUP, len(endings) - len(chances))):
        if count > 1:
            raise UsageError(f"--drafter {source}: {ending} stands there {count} times, leave it there once")
    least = _chance(chances[0], source) if chances else None
    return (name or None) if endings else source, Around(LOOKUP in endings, least)


def _chance(text: str, source: object) -> float:
    try:
        chance = float(text)
    except ValueError:
        chance = 0.0
    if not 0 < chance < 1:  # what is not a number is not above 0 either
        raise UsageError(f"--drafter {source}: behind {SURE} a chance above 0 and below 1 is needed, as in {SURE}0.4")
    return chance


def unwrapped(drafter: object) -> tuple[object, Around]:
    """A drafter without what is put around it, and what that is."""
    lookup = isinstance(drafter, LookupFirst)
    inner = drafter.drafter if isinstance(drafter, LookupFirst) else drafter
    return (inner.drafter, Around(lookup, inner.least)) if isinstance(inner, WhileSure) else (inner, Around(lookup))
