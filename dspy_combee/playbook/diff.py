"""What changes from one playbook to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dspy_combee.playbook.bullets import Bullet, Entry, TextLine
from dspy_combee.playbook.text import render_bullet


@dataclass(frozen=True)
class PlaybookDiff:
    """What changes from one playbook to another; false if nothing does, and `str` shows it line by line.

    Attributes:
        added: Bullets that only the other has.
        removed: Bullets that only the first has.
        changed: Bullets with one id that are not equal, as pairs (before, after).
        added_text: Lines of text that only the other has.
        removed_text: Lines of text that only the first has.
    """

    added: tuple[Bullet, ...]
    removed: tuple[Bullet, ...]
    changed: tuple[tuple[Bullet, Bullet], ...]
    added_text: tuple[TextLine, ...]
    removed_text: tuple[TextLine, ...]

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed or self.added_text or self.removed_text)

    def __str__(self) -> str:
        lines = [f"- {render_bullet(bullet)}" for bullet in self.removed]
        for before, after in self.changed:
            lines += [f"- {render_bullet(before)}", f"+ {render_bullet(after)}"]
        lines += [f"+ {render_bullet(bullet)}" for bullet in self.added]
        lines += [f"- {line.text}" for line in self.removed_text]
        lines += [f"+ {line.text}" for line in self.added_text]
        return "\n".join(lines)


def compare(before: Sequence[Entry], after: Sequence[Entry]) -> PlaybookDiff:
    """Compare the entries of two playbooks: bullets by their ids, lines of text as they are, order not at all."""
    old, new = ({item.id: item for item in side if isinstance(item, Bullet)} for side in (before, after))
    old_text, new_text = (Counter(item for item in side if isinstance(item, TextLine)) for side in (before, after))
    return PlaybookDiff(
        added=tuple(bullet for bullet in new.values() if bullet.id not in old),
        removed=tuple(bullet for bullet in old.values() if bullet.id not in new),
        changed=tuple((bullet, new[name]) for name, bullet in old.items() if new.get(name, bullet) != bullet),
        added_text=tuple((new_text - old_text).elements()),
        removed_text=tuple((old_text - new_text).elements()),
    )
