"""`Playbook`: sections of short bullets with counters, grown by deltas instead of rewritten (ACE's form).

A playbook is a value: every operation gives a new one, with a report where there is something to report. It makes
no LM call, and touches files only in `save` and `load`.

Ids are unique for the life of a playbook. Their number goes up with every bullet ever added, over all sections, and
a number that was given out is not given out again, nor that of a bullet that was removed or united. The text and
the JSON form both carry the next number, so this holds after loading too; an ACE file does not have it, and there
ids continue after the highest one in sight.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dspy_combee.playbook.bullets import (
    MAX_NEXT_NUMBER,
    SECTIONS,
    Bullet,
    Entry,
    PlaybookError,
    TextLine,
    clean_section,
    find_section,
)
from dspy_combee.playbook.deltas import Applied, Batch, Conflict, Refused, Resolve
from dspy_combee.playbook.diff import PlaybookDiff, compare
from dspy_combee.playbook.files import from_json, is_json, read_whole, to_json, write_whole
from dspy_combee.playbook.near_duplicates import NearDuplicates, TokenJaccard
from dspy_combee.playbook.pruning import Pruned, estimate_tokens, prune, unite_bullets
from dspy_combee.playbook.text import BEGIN, END, find_block, following_number, parse, render

TAGS = ("helpful", "harmful", "neutral")


@dataclass(frozen=True)
class Playbook:
    """Bullets in sections, in order, with whatever lines of text stand between them.

    Iterating gives the bullets and `len` counts them, so a playbook without bullets is false.

    Attributes:
        sections: The names of the sections, in order, empty ones included; ACE's seven by default. Those that only
            entries name are appended.
        entries: Bullets and lines of text. They are grouped by section, otherwise their order is kept.
        next_number: The number of the next new bullet's id; raised above those in use.

    Raises:
        PlaybookError: If two bullets have one id, or something is not of its kind.
    """

    sections: tuple[str, ...] = tuple(SECTIONS)
    entries: tuple[Entry, ...] = ()
    next_number: int = 1

    def __post_init__(self) -> None:
        entries = list(self.entries)
        for entry in entries:
            if not isinstance(entry, Bullet | TextLine):
                raise PlaybookError(f"an entry is a Bullet or a TextLine, not {type(entry).__name__}")
        bullets = [entry for entry in entries if isinstance(entry, Bullet)]
        repeated = [name for name, count in Counter(bullet.id for bullet in bullets).items() if count > 1]
        if repeated:
            raise PlaybookError(f"ids that come more than once: {', '.join(repeated)}")
        if type(self.next_number) is not int or not 1 <= self.next_number <= MAX_NEXT_NUMBER:
            raise PlaybookError(f"next_number must be an int >= 1, not {self.next_number!r}")
        names = [*map(clean_section, self.sections), *(entry.section for entry in entries)]
        sections = tuple(name for name in dict.fromkeys(names) if name)
        places = {name: place for place, name in enumerate(("", *sections))}
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "entries", tuple(sorted(entries, key=lambda entry: places[entry.section])))
        object.__setattr__(self, "next_number", max(self.next_number, following_number(entries)))

    def __len__(self) -> int:
        return len(self.bullets)

    def __iter__(self) -> Iterator[Bullet]:
        return iter(self.bullets)

    def __str__(self) -> str:
        return self.to_text()

    @cached_property
    def bullets(self) -> tuple[Bullet, ...]:
        """All bullets, in order."""
        return tuple(entry for entry in self.entries if isinstance(entry, Bullet))

    @cached_property
    def _by_id(self) -> dict[str, Bullet]:
        return {bullet.id: bullet for bullet in self.bullets}

    def get(self, bullet_id: str) -> Bullet | None:
        """The bullet with this id, or None."""
        return self._by_id.get(bullet_id)

    def in_section(self, name: str) -> tuple[Bullet, ...]:
        """The bullets of a section, in order; the name may be spelled as in `formulas_and_calculations`."""
        section = find_section(name, self.sections) if name else ""
        return tuple(bullet for bullet in self.bullets if bullet.section == section)

    def apply(self, deltas: Iterable[Any], resolve: Resolve | None = None) -> DeltaReport:
        """Apply one batch of deltas that were all proposed against this playbook.

        `dspy_combee.deltas` says how conflicts are settled. Text lines are left alone.

        Args:
            deltas: `Add`, `Update`, `Merge` and `Remove`, or mappings as `delta_from` reads them. Whatever else
                comes is refused.
            resolve: Called with a bullet and its differing UPDATEs, the better supported first; gives the
                content to use, or None. What it raises is passed on.
        """
        batch = Batch(self.sections, self.bullets, self.next_number)
        batch.run(deltas, resolve)
        playbook = self._with(batch.bullets.values(), tuple(batch.sections), batch.next_number)
        return DeltaReport(playbook, tuple(batch.applied), tuple(batch.refused), tuple(batch.conflicts))

    def tag(self, tags: Iterable[tuple[str, str]]) -> TagReport:
        """Count tags: each (id, tag) pair adds exactly one to its bullet's counter.

        Args:
            tags: The tag is `"helpful"`, `"harmful"` or `"neutral"`, which changes nothing. Pairs with an unknown
                id or tag are refused.
        """
        counted: Counter[tuple[str, str]] = Counter()
        refused = []
        for index, pair in enumerate(tags):
            bullet_id, tag = read_tag(pair)
            if bullet_id in self._by_id and tag in TAGS:
                counted[bullet_id, tag] += 1
            else:
                reason = f"unknown tag {tag!r}" if bullet_id in self._by_id else f"unknown id {bullet_id!r}"
                refused.append(Refused(index, pair, reason))
        bullets = [
            replace(
                bullet,
                helpful=bullet.helpful + counted[bullet.id, "helpful"],
                harmful=bullet.harmful + counted[bullet.id, "harmful"],
            )
            for bullet in self.bullets
        ]
        helpful, harmful, neutral = (sum(count for (_, tag), count in counted.items() if tag == name) for name in TAGS)
        return TagReport(self._with(bullets), helpful, harmful, neutral, tuple(refused))

    def unite(self, near_duplicates: NearDuplicates | None = None) -> PruneReport:
        """Unite all near-duplicates: the better supported content stays, counters and reflection ids are joined.

        Args:
            near_duplicates: `TokenJaccard()` by default; `EmbeddingCosine(embedder)` judges by an embedder.
        """
        bullets, pruned = unite_bullets(self.bullets, near_duplicates or TokenJaccard())
        return self._pruned(bullets, pruned, None, estimate_tokens)

    def enforce_budget(
        self,
        token_budget: int = 80_000,
        *,
        near_duplicates: NearDuplicates | None = None,
        count_tokens: Callable[[str], int] = estimate_tokens,
    ) -> PruneReport:
        """Prune the playbook until its text fits.

        A playbook that fits stays as it is. Otherwise near-duplicates are united; if that is not enough, all
        bullets with harmful > helpful go; then the least used, no more than needed (see `pruning.prune`). Lines
        of text and headers are not pruned, so the report's `fits` may be false even without bullets.

        Args:
            token_budget: The most tokens of the text that stands in a prompt, at least 1.
            near_duplicates: `TokenJaccard()` by default; `EmbeddingCosine(embedder)` judges by an embedder.
            count_tokens: Counts the tokens of a text.

        Raises:
            ValueError: If `token_budget` is not an int >= 1.
        """
        if type(token_budget) is not int or token_budget < 1:
            raise ValueError(f"token_budget must be an int >= 1, not {token_budget!r}")
        bullets, pruned = prune(
            self.bullets,
            token_budget,
            lambda kept: count_tokens(self._with(kept).to_prompt()),
            near_duplicates or TokenJaccard(),
        )
        return self._pruned(bullets, pruned, token_budget, count_tokens)

    def diff(self, other: Playbook) -> PlaybookDiff:
        """What changes from this playbook to `other`, by bullet id; the order of entries is not compared."""
        return compare(self.entries, other.entries)

    def to_text(self, *, reflections: bool = True) -> str:
        """The text form, which `from_text` reads back; `dspy_combee.playbook.text` describes it.

        Args:
            reflections: Whether to note, after all sections, which reflections each bullet came from. Without
                these notes the text is shorter and reading it back gives bullets with no reflection ids.
        """
        return render(self.sections, self.entries, self.next_number, reflections=reflections)

    def to_prompt(self, *, reflections: bool = False) -> str:
        """The text form for a prompt: without reflection ids, and with tabs written as `&#9;`.

        DSPy expands tabs in a signature's instructions, so they would not come back from there.

        Args:
            reflections: Whether the ids of reflections go in too.
        """
        return render(self.sections, self.entries, self.next_number, reflections=reflections, tabs=False)

    @classmethod
    def from_text(cls, text: str, *, strict: bool = False) -> Playbook:
        """Read the text form, ACE's files included, with counters or without.

        Args:
            text: See `dspy_combee.playbook.text`.
            strict: Whether a malformed line is an error. Otherwise it is kept as a `TextLine`, as is a bullet
                whose id came before.

        Raises:
            PlaybookError: In strict mode, with the number of the malformed line.
        """
        parts = parse(text, strict=strict)
        return cls(tuple(parts.sections), tuple(parts.entries), parts.next_number)

    def to_json(self) -> str:
        """The JSON form, which `from_json` reads back."""
        return to_json(self.sections, self.entries, self.next_number)

    @classmethod
    def from_json(cls, text: str) -> Playbook:
        """Read the JSON form.

        Raises:
            PlaybookError: If the text is no JSON or not a playbook.
        """
        parts = from_json(text)
        return cls(tuple(parts.sections), tuple(parts.entries), parts.next_number)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the playbook to a file, whole or not at all: JSON if it ends in `.json`, else text.

        Raises:
            OSError: If the file cannot be written; an older one is then still there.
        """
        write_whole(path, self.to_json() if is_json(path) else self.to_text())

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, strict: bool = False) -> Playbook:
        """Read a file that `save` or ACE wrote: JSON if it ends in `.json`, else text.

        Args:
            path: The file, in UTF-8.
            strict: As in `from_text`.

        Raises:
            OSError: If the file cannot be read.
            PlaybookError: If it is not a playbook.
        """
        text = read_whole(path)
        return cls.from_json(text) if is_json(path) else cls.from_text(text, strict=strict)

    @classmethod
    def from_program(cls, program: Any, predictor: str | None = None) -> Playbook:
        """Read the playbook at the end of the instructions of a program's predictors.

        Args:
            program: A DSPy program.
            predictor: The name of a predictor; may be left out if all playbooks in the program are the same.

        Raises:
            PlaybookError: If there is none, no such predictor, or several that differ.
        """
        found = playbooks_in(program)
        if predictor is not None:
            if predictor not in found:
                raise PlaybookError(f"no playbook in predictor {predictor!r}; there is one in {list(found)}")
            return found[predictor]
        if len(set(found.values())) != 1:
            problem = "several playbooks, give the predictor" if found else "no playbook in the program"
            raise PlaybookError(f"{problem}; predictors with a playbook: {list(found)}")
        return next(iter(found.values()))

    def _with(
        self,
        bullets: Iterable[Bullet],
        sections: tuple[str, ...] | None = None,
        next_number: int | None = None,
    ) -> Playbook:
        """The same playbook with these bullets: changed ones in their places, new ones at the end of a section."""
        new = {bullet.id: bullet for bullet in bullets}
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, TextLine):
                entries.append(entry)
            elif entry.id in new:
                entries.append(new.pop(entry.id))
        number = self.next_number if next_number is None else next_number
        return Playbook(self.sections if sections is None else sections, (*entries, *new.values()), number)

    def _pruned(
        self,
        bullets: Sequence[Bullet],
        pruned: Sequence[Pruned],
        budget: int | None,
        count: Callable[[str], int],
    ) -> PruneReport:
        playbook = self._with(bullets)
        before, after = count(self.to_prompt()), count(playbook.to_prompt())
        return PruneReport(playbook, tuple(pruned), before, after, budget is None or after <= budget)


@dataclass(frozen=True)
class DeltaReport:
    """What `Playbook.apply` did. Every delta is in `applied`, in `refused`, or in a conflict's `dropped`."""

    playbook: Playbook
    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]
    conflicts: tuple[Conflict, ...]


@dataclass(frozen=True)
class TagReport:
    """What `Playbook.tag` did: how many tags of each kind were counted, and those that were not."""

    playbook: Playbook
    helpful: int
    harmful: int
    neutral: int
    refused: tuple[Refused, ...]


@dataclass(frozen=True)
class PruneReport:
    """What `Playbook.enforce_budget` did.

    Attributes:
        playbook: What is left.
        pruned: The bullets that went, in the order in which they went, each with its reason.
        tokens_before: The tokens of the text in a prompt before.
        tokens_after: The same after.
        fits: Whether they are within the budget.
    """

    playbook: Playbook
    pruned: tuple[Pruned, ...]
    tokens_before: int
    tokens_after: int
    fits: bool


def attach(instructions: str, playbook: Playbook, *, reflections: bool = False) -> str:
    """Put a playbook at the end of instructions, between two delimiter lines that nothing in it can imitate.

    Tabs are written as `&#9;`, since DSPy expands those in instructions. To replace a playbook, `detach` it first:
    instructions that end with one are taken as they are.

    Args:
        instructions: Any text.
        playbook: Goes in whole.
        reflections: Whether the ids of reflections go in too. They cost tokens and mean nothing to a model.
    """
    text = playbook.to_prompt(reflections=reflections)
    return (instructions + "\n\n" if instructions else "") + f"{BEGIN}\n{text}{END}"


def detach(instructions: str) -> tuple[str, Playbook | None]:
    """Take the playbook off the end of instructions: what stood before it, and the playbook.

    The playbook is None, and the instructions unchanged, where they do not end with one. Nothing in the playbook
    is an error: lines that somebody has made unreadable come back as text.
    """
    found = find_block(instructions)
    if found is None:
        return instructions, None
    base, text = found
    return base, Playbook.from_text(text)


def playbooks_in(program: Any) -> dict[str, Playbook]:
    """The playbooks in a DSPy program's instructions, by the name of the predictor."""
    found = {}
    for name, predictor in program.named_predictors():
        playbook = detach(predictor.signature.instructions)[1]
        if playbook is not None:
            found[name] = playbook
    return found


def read_tag(pair: Any) -> tuple[str, str]:
    """Return the (id, tag) of a pair, brackets and case ignored; an unknown id and no tag where it is no pair."""
    if isinstance(pair, Mapping):
        pair = (pair.get("id", pair.get("bullet_id")), pair.get("tag"))
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(item, str) for item in pair):
        return repr(pair), ""
    return pair[0].strip().removeprefix("[").removesuffix("]"), pair[1].strip().lower()
