"""What a playbook consists of: bullets, lines that are no bullets, and the sections they stand in.

The seven section names and their slugs are those of ACE, so that its playbooks can be read and grown on.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass

from dspy_combee.records.errors import CombeeError

# A section's slug opens the ids of the bullets that are added to it: `calc-00003`.
SECTIONS = {
    "STRATEGIES & INSIGHTS": "sai",
    "FORMULAS & CALCULATIONS": "calc",
    "CODE SNIPPETS & TEMPLATES": "code",
    "COMMON MISTAKES TO AVOID": "err",
    "PROBLEM-SOLVING HEURISTICS": "prob",
    "CONTEXT CLUES & INDICATORS": "ctx",
    "OTHERS": "misc",
}
DEFAULT_SECTION = "OTHERS"

ID_PATTERN = r"[^\W\d_][\w-]*-[0-9]{1,15}"
# Above any number that a playbook reaches by growing: larger ones come from elsewhere and do not move the counter.
MAX_NUMBER = 10**12
MAX_NEXT_NUMBER = 2 * MAX_NUMBER
MAX_COUNT = 10**15 - 1  # JavaScript, which shows them in reports, counts no higher than 2**53

_ID = re.compile(ID_PATTERN)
_SURROGATES = re.compile("[\ud800-\udfff]")
_BETWEEN_WORDS = re.compile(r"[\s_/-]+")
_SMALL_WORDS = frozenset({"a", "an", "and", "at", "by", "for", "from", "in", "of", "on", "or", "the", "to", "with"})


class PlaybookError(CombeeError, ValueError):
    """A playbook, or a part of one, is not what it should be; the message says what and where."""


@dataclass(frozen=True)
class Bullet:
    """One lesson of a playbook.

    Lone surrogates in the texts become U+FFFD, white space inside a section's name becomes single spaces, and an
    id in `reflection_ids` that comes twice is kept once.

    Attributes:
        id: A slug, a hyphen and a number, such as `calc-00003`; unique in a playbook.
        section: The name of its section; `""` is the part of a playbook before the first section.
        content: Any text that is not blank.
        helpful: How often the bullet was tagged helpful; at `MAX_COUNT` it stays.
        harmful: How often it was tagged harmful; so too.
        reflection_ids: The reflections that the bullet came from, oldest first.

    Raises:
        PlaybookError: If the id has another shape, the content is blank, or a count is no int >= 0.
    """

    id: str
    section: str
    content: str
    helpful: int = 0
    harmful: int = 0
    reflection_ids: tuple[str, ...] = ()

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

    @property
    def number(self) -> int:
        """The number in the id."""
        return number_of(self.id)


@dataclass(frozen=True)
class TextLine:
    """A line of a playbook that is neither a bullet nor a section's name, kept as it came.

    Attributes:
        section: The name of the section it stands in; `""` before the first.
        text: One line, not blank.

    Raises:
        PlaybookError: If the text is blank or has more than one line.
    """

    section: str
    text: str

    def __post_init__(self) -> None:
        text = clean_text(self.text, "a line of text")
        if "\n" in text or not text.strip():
            raise PlaybookError(f"a line of text is one line and not blank: {text!r}")
        object.__setattr__(self, "section", clean_section(self.section))
        object.__setattr__(self, "text", text)


Entry = Bullet | TextLine


def number_of(bullet_id: str) -> int:
    """The number in a bullet's id."""
    return int(bullet_id.rpartition("-")[2])


def clean_text(value: object, what: str) -> str:
    """`value` without lone surrogates, which have no UTF-8 form.

    Raises:
        PlaybookError: If it is no text; the message calls it `what`.
    """
    if not isinstance(value, str):
        raise PlaybookError(f"{what} must be text, not {type(value).__name__}")
    return _SURROGATES.sub("\ufffd", value)


def clean_section(value: object) -> str:
    """A section's name on one line, its white space made single spaces."""
    return " ".join(clean_text(value, "a section's name").split())


def clean_ids(value: object) -> tuple[str, ...]:
    """Reflection ids, each once, in the order given.

    Raises:
        PlaybookError: If `value` is no list, tuple, set or the like of texts, or one of them is blank.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise PlaybookError(f"reflection ids must be a list of texts, not {value!r}")
    ordered = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
    ids = tuple(dict.fromkeys(clean_text(item, "a reflection id") for item in ordered))
    if not all(item.strip() for item in ids):
        raise PlaybookError("a reflection id is blank")
    return ids


def fold_section(name: str) -> str:
    """What two spellings of one section's name have in common: `Formulas_and_calculations`, `FORMULAS & ...`."""
    folded = unicodedata.normalize("NFC", clean_section(name)).casefold().replace("&", " and ")
    return _BETWEEN_WORDS.sub("_", folded.strip()).strip("_") or name


def find_section(name: str, known: Iterable[str]) -> str:
    """The section that `name` spells: one of `known`, else one of ACE's, else a new one called as given.

    A blank name is the section OTHERS.
    """
    folded = fold_section(name if name.strip() else DEFAULT_SECTION)
    for section in (*known, *SECTIONS):
        if fold_section(section) == folded:
            return section
    return clean_section(name)


def slug_of(section: str) -> str:
    """The slug of ids in `section`: ACE's for its seven, else up to five initials, or four letters of a lone word."""
    known = SECTIONS.get(find_section(section, ()))
    if known:
        return known
    ascii_text = unicodedata.normalize("NFKD", section).encode("ascii", "ignore").decode().lower()
    words = re.findall(r"[a-z]+", ascii_text)
    words = [word for word in words if word not in _SMALL_WORDS] or words
    if not words:
        return SECTIONS[DEFAULT_SECTION]
    return words[0][:4] if len(words) == 1 else "".join(word[0] for word in words[:5])


def bullet_support(bullet: Bullet) -> tuple[int, int, int, int]:
    """A sort key that is larger for the better supported bullet.

    More reflections, then more helpful tags, then fewer harmful ones, then the older bullet (the lower number).
    """
    return len(bullet.reflection_ids), bullet.helpful, -bullet.harmful, -bullet.number


def join_ids(*lists: Iterable[str]) -> tuple[str, ...]:
    """All ids of the lists, each once, in the order of first mention."""
    return tuple(dict.fromkeys(item for ids in lists for item in ids))
