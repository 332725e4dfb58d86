"""`Playbook`: sections of short bullets with counters, grown by deltas instead of rewritten (ACE's form).

A playbook is a value: every operation returns a new one, with a report where there is something to report. It makes
no LM calls, and touches files only in `save` and `load`.

Ids are unique for the life of a playbook. Their numbers count all bullets ever added, over all sections, and are never
reused, not even after a bullet was removed or united. The text and the JSON form both carry the next number, so this
holds after loading too; an ACE file does not have it, so there ids continue after the highest one in the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from dspy_combee.playbook.bullets import (
    MAX_NEXT_NUMBER,
    SECTIONS,
    Bullet,
    Entry,
    PlaybookError,
    TextLine,
    bare_id,
    clean_section,
    find_section,
)
from dspy_combee.playbook.deltas import Applied, Batch, Conflict, Refused
from dspy_combee.playbook.pruning import NearDuplicates, Pruned, prune, same_words
from dspy_combee.playbook.text import BEGIN, END, number_after, parse, render, render_bullet
from dspy_combee.records.files import replacing
from dspy_combee.records.text import estimate_tokens

TAGS = ("helpful", "harmful", "neutral")

_FORMAT = "dspy_combee.playbook"
_VERSION = 1


@dataclass(frozen=True)
class Playbook:
    """Hold bullets in sections, in order, with whatever lines of text stand between them.

    Iterating yields the bullets and `len` counts them, so a playbook without bullets is falsy.

    Raises:
        PlaybookError: If two bullets have the same id, or a field has the wrong type.
    """

    sections: tuple[str, ...] = tuple(SECTIONS)
    """The names of the sections, in order, empty ones included. Those that only entries name are appended."""
    entries: tuple[Entry, ...] = ()
    """Bullets and lines of text, grouped by section, otherwise in the order given."""
    next_number: int = 1
    """The number of the next new bullet's id; raised above those in use."""

    def __post_init__(self) -> None:
        for entry in self.entries:
            if not isinstance(entry, Bullet | TextLine):
                raise PlaybookError(f"an entry is a Bullet or a TextLine, not {type(entry).__name__}")
        ids = Counter(entry.id for entry in self.entries if isinstance(entry, Bullet))
        if repeated := [name for name, count in ids.items() if count > 1]:
            raise PlaybookError(f"ids that come more than once: {', '.join(repeated)}")
        if type(self.next_number) is not int or not 1 <= self.next_number <= MAX_NEXT_NUMBER:
            raise PlaybookError(f"next_number must be an int >= 1, not {self.next_number!r}")
        names = [*map(clean_section, self.sections), *(entry.section for entry in self.entries)]
        sections = tuple(name for name in dict.fromkeys(names) if name)
        places = {name: place for place, name in enumerate(("", *sections))}
        object.__setattr__(self, "sections", sections)
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=lambda entry: places[entry.section])))
        object.__setattr__(self, "next_number", max(self.next_number, number_after(self.entries)))

    def __len__(self) -> int:
        return len(self.bullets)

    def __iter__(self) -> Iterator[Bullet]:
        return iter(self.bullets)

    def __str__(self) -> str:
        return self.to_text()

    @cached_property
    def bullets(self) -> tuple[Bullet, ...]:
        """Return all bullets, in order."""
        return tuple(entry for entry in self.entries if isinstance(entry, Bullet))

    @cached_property
    def _by_id(self) -> dict[str, Bullet]:
        return {bullet.id: bullet for bullet in self.bullets}

    def get(self, bullet_id: str) -> Bullet | None:
        """Return the bullet with this id, or None."""
        return self._by_id.get(bullet_id)

    def in_section(self, name: str) -> tuple[Bullet, ...]:
        """Return the bullets of a section, in order; the name may be spelled as in `formulas_and_calculations`."""
        section = find_section(name, self.sections) if name else ""
        return tuple(bullet for bullet in self.bullets if bullet.section == section)

    def apply(self, deltas: Iterable[Any]) -> DeltaReport:
        """Apply one batch of deltas that were all proposed against this playbook.

        `dspy_combee.playbook.deltas` describes how conflicts are settled. Text lines are left alone.

        Args:
            deltas: `Add`, `Update`, `Merge` and `Remove`, or mappings as `delta_from` reads them. Anything else is
                refused.
        """
        batch = Batch(self.sections, self.bullets, self.next_number)
        batch.run(deltas)
        playbook = self._with(batch.bullets.values(), tuple(batch.sections), batch.next_number)
        return DeltaReport(playbook, tuple(batch.applied), tuple(batch.refused), tuple(batch.conflicts))

    def tag(self, tags: Iterable[tuple[str, str]]) -> TagReport:
        """Count (id, tag) pairs: each adds exactly one to its bullet's counter.

        Args:
            tags: A tag is `"helpful"`, `"harmful"`, or `"neutral"`, which changes nothing. Pairs with an unknown id or
                tag are refused.
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
        playbook = self._with(
            replace(
                bullet,
                helpful=bullet.helpful + counted[bullet.id, "helpful"],
                harmful=bullet.harmful + counted[bullet.id, "harmful"],
            )
            for bullet in self.bullets
        )
        helpful, harmful, neutral = (sum(count for (_, tag), count in counted.items() if tag == name) for name in TAGS)
        return TagReport(playbook, helpful, harmful, neutral, tuple(refused))

    def enforce_budget(
        self, token_budget: int = 80_000, *, near_duplicates: NearDuplicates = same_words
    ) -> PruneReport:
        """Prune the playbook until its text fits.

        A playbook that fits is left alone. Otherwise near-duplicates are united; if that is not enough, all bullets
        with harmful > helpful go; then the least used, no more than needed (see `pruning.prune`). Lines of text and
        headers are not pruned, so the report's `fits` may be false even without bullets.

        Args:
            token_budget: The most tokens (estimated) of the playbook in a prompt, at least 1.
            near_duplicates: By default bullets with the same words; `EmbeddingCosine(embedder)` asks an embedder.

        Raises:
            ValueError: If `token_budget` is not an int >= 1.
        """
        if type(token_budget) is not int or token_budget < 1:
            raise ValueError(f"token_budget must be an int >= 1, not {token_budget!r}")

        def count(kept: Iterable[Bullet]) -> int:
            return estimate_tokens(self._with(kept).to_prompt())

        bullets, pruned = prune(self.bullets, token_budget, count, near_duplicates)
        tokens = count(bullets)
        return PruneReport(self._with(bullets), tuple(pruned), tokens, tokens <= token_budget)

    def diff(self, other: Playbook) -> PlaybookDiff:
        """Compare bullets by id and lines of text as they are, whatever their order."""
        lines, other_lines = (
            Counter(entry for entry in playbook.entries if isinstance(entry, TextLine)) for playbook in (self, other)
        )
        pairs = ((bullet, other.get(bullet.id)) for bullet in self)
        return PlaybookDiff(
            added=(*(bullet for bullet in other if not self.get(bullet.id)), *(other_lines - lines).elements()),
            removed=(*(bullet for bullet in self if not other.get(bullet.id)), *(lines - other_lines).elements()),
            changed=tuple((before, after) for before, after in pairs if after and before != after),
        )

    def to_text(self) -> str:
        """Return the text form, which `from_text` reads back; `dspy_combee.playbook.text` describes it."""
        return render(self.sections, self.entries, self.next_number)

    def to_prompt(self) -> str:
        """Return the text form for a prompt.

        It leaves out the ids of reflections, which cost tokens and mean nothing to a model, and writes tabs as `&#9;`,
        since DSPy expands tabs in a signature's instructions.
        """
        return render(self.sections, self.entries, self.next_number, for_prompt=True)

    @classmethod
    def from_text(cls, text: str, *, strict: bool = False) -> Playbook:
        """Read the text form, ACE's files included, with counters or without.

        Args:
            text: See `dspy_combee.playbook.text`.
            strict: Whether a malformed line, or a bullet whose id came before, is an error. Otherwise it is kept as a
                `TextLine`.

        Raises:
            PlaybookError: In strict mode, with the number of the malformed line.
        """
        return cls(*parse(text, strict=strict))

    def to_json(self) -> str:
        """Return the JSON form, which `from_json` reads back; an entry with a `text` is a line of text."""
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "next_number": self.next_number,
            "sections": list(self.sections),
            "entries": [asdict(entry) for entry in self.entries],
        }
        return json.dumps(data, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Playbook:
        """Read the JSON form.

        Raises:
            PlaybookError: If the text is not JSON or not a playbook.
        """
        try:
            data: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlaybookError(f"not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
            raise PlaybookError(f"not a playbook: 'format' {_FORMAT!r} and 'version' {_VERSION} are expected")
        sections, items = data.get("sections"), data.get("entries")
        if not isinstance(sections, list) or not isinstance(items, list):
            raise PlaybookError("not a playbook: 'sections' and 'entries' must be lists")
        try:
            entries = tuple(TextLine(**item) if "text" in item else Bullet(**item) for item in items)
        except TypeError as error:
            raise PlaybookError(f"not a playbook: {error}") from error
        return cls(tuple(sections), entries, data.get("next_number", 1))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the playbook to a file, whole or not at all: JSON if it ends in `.json`, else text.

        Raises:
            OSError: If the file cannot be written; an older one is then still there.
        """
        with replacing(path) as file:
            file.write(self.to_json() if _is_json(path) else self.to_text())

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
        try:
            with open(path, encoding="utf-8", newline="") as file:
                text = file.read()
        except UnicodeDecodeError as error:
            raise PlaybookError(f"{os.fspath(path)} is not UTF-8: {error}") from error
        return cls.from_json(text) if _is_json(path) else cls.from_text(text, strict=strict)

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
        self, bullets: Iterable[Bullet], sections: tuple[str, ...] | None = None, next_number: int | None = None
    ) -> Playbook:
        """Return a playbook with these bullets: changed ones in their places, new ones at the end of a section."""
        new = {bullet.id: bullet for bullet in bullets}
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, TextLine):
                entries.append(entry)
            elif entry.id in new:
                entries.append(new.pop(entry.id))
        return Playbook(sections or self.sections, (*entries, *new.values()), next_number or self.next_number)


@dataclass(frozen=True)
class DeltaReport:
    """Report what `Playbook.apply` did. Every delta is in `applied`, `refused`, or a conflict's `dropped`."""

    playbook: Playbook
    applied: tuple[Applied, ...]
    refused: tuple[Refused, ...]
    conflicts: tuple[Conflict, ...]


@dataclass(frozen=True)
class TagReport:
    """Report what `Playbook.tag` did: how many tags of each kind were counted, and those that were not."""

    playbook: Playbook
    helpful: int
    harmful: int
    neutral: int
    refused: tuple[Refused, ...]


@dataclass(frozen=True)
class PruneReport:
    """Report what `Playbook.enforce_budget` did."""

    playbook: Playbook
    """What is left."""
    pruned: tuple[Pruned, ...]
    """The bullets that went, in the order in which they went, each with its reason."""
    tokens_after: int
    """The tokens (estimated) of what is left, as text in a prompt."""
    fits: bool
    """Whether they are within the budget."""


@dataclass(frozen=True)
class PlaybookDiff:
    """Hold the changes from one playbook to another; falsy if there are none, and `str` lists them."""

    added: tuple[Entry, ...]
    """Bullets, then lines of text, that only the other has."""
    removed: tuple[Entry, ...]
    """Bullets, then lines of text, that only the first has."""
    changed: tuple[tuple[Bullet, Bullet], ...]
    """Bullets with one id that are not equal, as pairs (before, after)."""

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        signed: list[tuple[str, Entry]] = [("-", entry) for entry in self.removed]
        for before, after in self.changed:
            signed += [("-", before), ("+", after)]
        signed += [("+", entry) for entry in self.added]
        return "\n".join(
            f"{sign} {render_bullet(entry) if isinstance(entry, Bullet) else entry.text}" for sign, entry in signed
        )


def attach(instructions: str, playbook: Playbook) -> str:
    """Append a playbook, as `Playbook.to_prompt` writes it, to instructions.

    It stands between two delimiter lines that nothing in it can imitate. To replace a playbook, `detach` it first: one
    at the end of `instructions` is not noticed.
    """
    return (instructions + "\n\n" if instructions else "") + f"{BEGIN}\n{playbook.to_prompt()}{END}"


def detach(instructions: str) -> tuple[str, Playbook | None]:
    """Split instructions into what stands before the playbook at their end, and the playbook.

    The playbook is None, and the instructions are returned unchanged, if they do not end with one. Lines of it that
    somebody has made unreadable come back as text.
    """
    # A line inside a playbook never begins with a delimiter, so the last one that opens is the right one.
    base, begin, block = ("\n" + instructions.rstrip()).rpartition(f"\n{BEGIN}\n")
    if not begin or not ("\n" + block).endswith("\n" + END):
        return instructions, None
    base = base.removesuffix("\n").removeprefix("\n")
    return base, Playbook.from_text(block.removesuffix(END))


def playbooks_in(program: Any) -> dict[str, Playbook]:
    """Return the playbooks in a DSPy program's instructions, by the name of the predictor."""
    found = {name: detach(predictor.signature.instructions)[1] for name, predictor in program.named_predictors()}
    return {name: playbook for name, playbook in found.items() if playbook is not None}


def _is_json(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).lower().endswith(".json")


def read_tag(pair: Any) -> tuple[str, str]:
    """Return the (id, tag) of a pair, brackets and case ignored; an unknown id and no tag where it is no pair."""
    if isinstance(pair, Mapping):
        pair = (pair.get("id", pair.get("bullet_id")), pair.get("tag"))
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(isinstance(item, str) for item in pair):
        return repr(pair), ""
    return bare_id(pair[0]) or "", pair[1].strip().lower()
