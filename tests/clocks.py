"""Clocks for the batch-size controller that no real time moves."""

import threading

from .lessons import is_reflection


class LookClock:
    """Each look at it takes a second: so does every step, whatever n is."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


class CallClock:
    """Moves by the calls of a language model with its `latency`, as if they came one after the other."""

    def __init__(self, rollout=1, reflection=50):
        self.rollout, self.reflection = rollout, reflection
        self.seconds = 0
        self.rollouts = 0
        self._lock = threading.Lock()

    def __call__(self):
        return float(self.seconds)

    def latency(self, prompt, rng):
        reflects = is_reflection(prompt)
        with self._lock:
            self.seconds += self.reflection if reflects else self.rollout
            self.rollouts += not reflects
        return 0.0
