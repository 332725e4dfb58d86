"""Back-off: how everything that an executor runs slows down together when a provider asks for it."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

WAKE = 1.0  # Seconds that a wait lasts at most: a Ctrl-C that comes just before one without an end would wait too.


@dataclass(frozen=True)
class Backoff:
    """How calls that a provider turned away are tried again.

    A pause doubles from `first_delay` with each incident since the last success, with jitter, and is never shorter
    than what the provider asks for (Retry-After).

    Attributes:
        incidents: After this many incidents in a row without a success in between, the run gives up.
        attempts: Tries of one item, however well the others fare.
        first_delay: Seconds of the first pause.
        max_delay: Seconds that a pause lasts at most; a provider that asks for more is given up.
        jitter: Share of a pause that is drawn at random on top of it.
    """

    incidents: int = 6
    attempts: int = 24
    first_delay: float = 1.0
    max_delay: float = 60.0
    jitter: float = 0.5

    def delay(self, incident: int, asked: float | None) -> float:
        """Seconds to pause after the given incident (from 1), when the provider asked for so many."""
        pause = min(self.max_delay, self.first_delay * 2.0 ** (incident - 1))
        return max(pause, asked or 0.0) * (1.0 + self.jitter * random.random())


class Throttle:
    """The slots of an executor: as many as its width, fewer after an incident, none while it pauses.

    An incident halves the number; as many successes as there are slots bring one back.

    Args:
        width: Slots at most.
        backoff: How to slow down.
    """

    def __init__(self, width: int, backoff: Backoff) -> None:
        self.width = width
        self.backoff = backoff
        self.limit = width
        self._condition = threading.Condition()
        self._in_flight = 0
        self._successes = 0
        self._incidents = 0
        self._resume_at = 0.0

    def acquire(self) -> None:
        """Take a slot; wait for one, and for the end of a pause."""
        self.take(1, wait=True)

    def take(self, most: int, wait: bool) -> int:
        """Take as many slots as are free, at most so many.

        Args:
            most: Slots wanted, at least 1.
            wait: Whether to wait until one is free.

        Returns:
            How many were taken; 0 where none was free and `wait` is False.
        """
        with self._condition:
            while True:
                pause = self._resume_at - time.monotonic()
                free = 0 if pause > 0 else min(most, self.limit - self._in_flight)
                if free > 0:
                    self._in_flight += free
                    return free
                if not wait:
                    return 0
                self._condition.wait(min(pause, WAKE) if pause > 0 else WAKE)

    def release(self, number: int = 1) -> None:
        """Give a slot back, or several."""
        with self._condition:
            self._in_flight -= number
            self._condition.notify_all()

    def succeed(self) -> None:
        """A call has gone through."""
        with self._condition:
            self._incidents = 0
            if self.limit < self.width:
                self._successes += 1
                if self._successes >= self.limit:
                    self._successes = 0
                    self.limit += 1
                    self._condition.notify_all()

    def slow_down(self, attempts: int, asked: float | None) -> bool:
        """A call was turned away: pause, and narrow.

        What is turned away during a pause was under way before it, and belongs to the same incident.

        Args:
            attempts: Tries of that call so far.
            asked: Seconds to wait that the provider asks for.

        Returns:
            Whether the call should be tried again.
        """
        with self._condition:
            now = time.monotonic()
            if now >= self._resume_at:
                self._incidents += 1
                self._successes = 0
                self.limit = max(1, self.limit // 2)
                self._resume_at = now + self.backoff.delay(self._incidents, asked)
            patient = asked is None or asked <= self.backoff.max_delay
            if patient and self._incidents < self.backoff.incidents:
                return attempts < self.backoff.attempts
            self._incidents, self._resume_at = 0, now  # Who gives up ends; the next run on these slots begins anew.
            self._condition.notify_all()
            return False
