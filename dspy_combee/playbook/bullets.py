"""What a playbook consists of: bullets, other lines of text, and the sections they stand in.

The seven section names and their slugs are ACE's, so that its playbooks can be read and extended.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from dspy_combee.records.errors import CombeeError
from dspy_combee.records.text import repair

SECTIONS = {
    "STRATEGIES & INSIGHTS": "sai",
    "FORMULAS & CALCULATIONS": "calc",
    "CODE SNIPPETS & TEMPLATES": "code",
    "COMMON MISTAKES TO AVOID": "err",
    "PROBLEM-SOLVING HEURISTICS": "prob",
    "CONTEXT CLUES & INDICATORS": "ctx",
    "OTHERS": "misc",
}
"""ACE's sections. The slug opens the ids of the bullets that are added to the section, as in `calc-00003`."""
DEFAULT_SECTION = "OTHERS"

ID_PATTERN = r"[^\W\d_][\w-]*-[0-9]{1,15}"
# Above any number that a playbook reaches by growing: larger ones come from elsewhere and do not move the counter.
MAX_NUMBER = 10**12
MAX_NEXT_NUMBER = 2 * MAX_NUMBER
MAX_COUNT = 10**15 - 1  # JavaScript, which shows the counters in reports, counts no higher than 2**53.

_ID = re.compile(ID_PATTERN)
_BETWEEN_WORDS = re.compile(r"[\s_/-]+")
_SMALL_WORDS = frozenset({"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


class PlaybookError(CombeeError, ValueError):
    """Report what is wrong in a playbook, or in a part of one, and where."""


@dataclass(frozen=True)
class Bullet:
    """Hold one lesson of a playbook.

    Lone surrogates in the texts become U+FFFD.

    Raises:
        PlaybookError: If the id has another shape, the content is blank, or a count is not an int >= 0.
    """

    id: str
    """A slug, a hyphen and a number, such as `calc-00003`; unique in a playbook."""
    section: str
    """The name of its section, on one line; `""` is the part of a playbook before the first section."""
    content: str
    """Any text that is not blank."""
    helpful: int = 0
    """How often the bullet was tagged helpful, up to `MAX_COUNT`."""
    harmful: int = 0
    """How often it was tagged harmful, up to `MAX_COUNT`."""
    reflection_ids: tuple[str, ...] = ()
    """The reflections that the bullet came from, oldest first, each once."""

    def __post_init__(self) -> None:
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise PlaybookError(f"a bullet's id looks like 'calc-00003', not {self.id!r}")
        content = clean_text(self.content, f"the content of [{self.id}]")
        if not content.strip():
            raise PlaybookError(f"the content of [{self.id}] is blank: {content!r}")
        for name in ("helpful", "harmful"):
            count = getattr(self, name)
            if type(count) is not int or count < 0:
                raise PlaybookError(f"{name} of [{self.id}] must be an int >= 0, not {count!r}")
            object.__setattr__(self, name, min(count, MAX_COUNT))
        object.__setattr__(self, "section", clean_section(self.section))
        object.__setattr__(self, "content", content)
        object.__setattr__(self, "reflection_ids", clean_ids(self.reflection_ids))


@dataclass(frozen=True)
class TextLine:
    """Keep a line of a playbook that is neither a bullet nor a section's name.

    Raises:
        PlaybookError: If the text is blank or has more than one line.
    """

    section: str
    """The name of the section it stands in; `""` before the first."""
    text: str
    """One line, not blank."""

    def __post_init__(self) -> None:
        text = clean_text(self.text, "a line of text")
        if "\n" in text or not text.strip():
            raise PlaybookError(f"a line of text is one line and not blank: {text!r}")
        object.__setattr__(self, "section", clean_section(self.section))
        object.__setattr__(self, "text", text)


Entry = Bullet | TextLine


def bullet_number(bullet_id: str) -> int:
    """Return the number in a bullet's id."""
    return int(bullet_id.rpartition("-")[2])


def bullet_support(bullet: Bullet) -> tuple[int, int, int, int]:
    """Return a sort key that is larger for the better supported bullet.

    More reflections come first, then more helpful tags, then fewer harmful ones, then the older bullet.
    """
    return len(bullet.reflection_ids), bullet.helpful, -bullet.harmful, -bullet_number(bullet.id)


def bare_id(value: object) -> str | None:
    """Strip white space and brackets, as a model may write them, from a bullet's id; return None if it is not text."""
    return value.strip().removeprefix("[").removesuffix("]") if isinstance(value, str) else None


def clean_text(value: object, what: str) -> str:
    """Replace lone surrogates, which have no UTF-8 form, by U+FFFD.

    Raises:
        PlaybookError: If `value` is not text; the message calls it `what`.
    """
    if not isinstance(value, str):
        raise PlaybookError(f"{what} must be text, not {type(value).__name__}")
    return repair(value)


def clean_section(value: object) -> str:
    """Collapse white space in a section's name to single spaces."""
    return " ".join(clean_text(value, "a section's name").split())


def clean_ids(value: object) -> tuple[str, ...]:
    """Drop repeated reflection ids, keeping the order given.

    Raises:
        PlaybookError: If `value` is not a list or tuple of texts, or one of them is blank.
    """
    if not isinstance(value, list | tuple):
        raise PlaybookError(f"reflection ids must be a list of texts, not {value!r}")
    ids = join_ids(clean_text(item, "a reflection id") for item in value)
    if not all(item.strip() for item in ids):
        raise PlaybookError("a reflection id is blank")
    return ids


def join_ids(*lists: Iterable[str]) -> tuple[str, ...]:
    """Concatenate the lists, keeping each id where it comes first."""
    return tuple(dict.fromkeys(item for ids in lists for item in ids))


def find_section(name: str, known: Iterable[str]) -> str:
    """Return the section that `name` spells: one of `known`, else one of ACE's, else a new one called as given.

    `Formulas_and_calculations` spells `FORMULAS & CALCULATIONS`. A blank name is the section OTHERS.
    """
    folded = _fold_section(name if name.strip() else DEFAULT_SECTION)
    found = (section for section in (*known, *SECTIONS) if _fold_section(section) == folded)
    return next(found, clean_section(name))


def _fold_section(name: str) -> str:
    folded = unicodedata.normalize("NFC", clean_section(name)).casefold().replace("&", " and ")
    return _BETWEEN_WORDS.sub("_", folded.strip()).strip("_") or name


def section_slug(section: str) -> str:
    """Return the slug of ids in `section`: ACE's for its seven, else initials, or four letters of a single word."""
    if known := SECTIONS.get(find_section(section, ())):
        return known
    words = re.findall(r"[a-z]+", unicodedata.normalize("NFKD", section).encode("ascii", "ignore").decode().lower())
    words = [word for word in words if word not in _SMALL_WORDS] or words or [SECTIONS[DEFAULT_SECTION]]
    return words[0][:4] if len(words) == 1 else "".join(word[0] for word in words[:5])
