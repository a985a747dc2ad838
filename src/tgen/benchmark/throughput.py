"""Prefill and decoding in llama-bench's terms: pp512, tg128, @ d4096.

A test reads `n_prompt` tokens at once, then takes `n_gen` tokens one at a time, after `n_depth`
tokens that are there already; only the passes are inside the clock, and every token is drawn
beforehand from the vocabulary, so that neither sampling nor tokenising count. After a round that
warms up, tests of all arms take turns, forth and back: what slows the machine down slows all.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tgen.engine.base import Engine, Logits, reset
from tgen.errors import UsageError

_STEPS_TO_WARM = 8
_REST = 0.25  # seconds, until the threads of the arm before have stopped looking for work


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is timed."""

    n_prompt: int = 0
    n_gen: int = 0
    n_depth: int = 0
    batch: int = 1  # rows, each of which takes as much

    @property
    def label(self) -> str:
        """As llama-bench writes it."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        return "+".join(parts) + (f" @ d{self.n_depth}" if self.n_depth else "")

    @property
    def n_tokens(self) -> int:
        """That a row comes to hold."""
        return self.n_depth + self.n_prompt + self.n_gen

    def check(self, context_length: int) -> None:
        """Raises UsageError if it times nothing or does not fit the context."""
        if self.batch < 1:
            raise UsageError(f"--batch is {self.batch}", "a test has at least 1 row")
        if self.n_prompt + self.n_gen == 0:
            raise UsageError("a test of no tokens was asked for", "give -p or -n above 0")
        if self.n_tokens > context_length:
            raise UsageError(
                f"{self.label} needs {self.n_tokens:,} tokens, the model's context is "
                f"{context_length:,}",
                "choose smaller -p, -n or -d",
            )


class Backend(Protocol):
    """Something with the model loaded that a test can be run on. Nothing else is in the clock."""

    runs_on: str  # arms that run on the same have the same threads

    def prepare(self, test: Workload) -> None:
        """Leaves `test.batch` rows that hold `n_depth` tokens each."""

    def prompt(self, test: Workload) -> None:
        """Reads `n_prompt` tokens into each row, until the logits that follow are there."""

    def step(self) -> None:
        """Takes one more token into each row, likewise."""

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of keys and values held; None: not known."""


class EngineBackend:
    """An engine of ours."""

    def __init__(
        self, engine: Engine, tokens: Sequence[int], *, threads: int | None = None
    ) -> None:
        """`tokens`: as many as the context holds. `threads` are torch's, None: as they are."""
        self.engine, self._tokens, self._threads = engine, list(tokens), threads
        self._logits: Logits = np.zeros((1, 0), np.float32)
        self.runs_on = engine.name

    def prepare(self, test: Workload) -> None:
        """What is there already of the depth stays."""
        if self.engine.name == "torch":  # which has one number of threads for all
            from tgen.model.device import set_threads

            set_threads(self._threads)
        if len(self.engine.lengths) != test.batch or self.engine.lengths[0] < test.n_depth:
            reset(self.engine, test.batch)
            if test.n_depth:
                self._extend(test.n_depth)
        self.engine.rewind([test.n_depth] * test.batch)

    def prompt(self, test: Workload) -> None:
        """In one call."""
        self._extend(test.n_prompt)

    def step(self) -> None:
        """In one call."""
        self._extend(1)

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of keys and values held."""
        return self.engine.cache_bytes

    def logits(self) -> Logits:
        """(B, V): what the last prompt or step gave."""
        return self._logits

    def _extend(self, n: int) -> None:
        held = self.engine.lengths
        self._logits = self.engine.extend([self._tokens[held[0] : held[0] + n]] * len(held))


def random_tokens(vocab_size: int, n: int, *, seed: int) -> list[int]:
    """What every arm reads: drawn beforehand, so that neither sampling nor tokenising count."""
    return [int(i) for i in np.random.default_rng(seed).integers(vocab_size, size=n)]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Nanoseconds of one run of a test."""

    prompt: int
    steps: int
    cache_bytes: int | None

    @property
    def seconds(self) -> float:
        """Of all of it."""
        return (self.prompt + self.steps) / 1e9


def measure(tests: Sequence[tuple[Backend, Workload]], *, trials: int) -> Iterator[list[Trial]]:
    """Rounds of one trial of each test, in the order of `tests`; the first, which warms up, is not
    among them but takes its time. Raises UsageError for fewer than one."""
    if trials < 1:
        raise UsageError(f"-r is {trials}", "at least one trial is needed")
    before: Backend | None = None
    for number in range(-1, trials):
        found: dict[int, Trial] = {}
        order = list(range(len(tests)))
        for i in order if number % 2 else reversed(order):
            arm, test = tests[i]
            if before is not None and before.runs_on != arm.runs_on:
                time.sleep(_REST)
                _warm(arm, test)
            found[i], before = run(arm, test), arm
        if number >= 0:
            yield [found[i] for i in order]


def _warm(arm: Backend, test: Workload) -> None:
    """What a rest has let cool down: caches, clocks, threads that sleep."""
    arm.prepare(test)
    if test.n_prompt:
        arm.prompt(test)
    for _ in range(min(test.n_gen, _STEPS_TO_WARM)):
        arm.step()


def run(arm: Backend, test: Workload) -> Trial:
    """One trial."""
    arm.prepare(test)
    begin = time.perf_counter_ns()
    if test.n_prompt:
        arm.prompt(test)
    read = time.perf_counter_ns()
    for _ in range(test.n_gen):
        arm.step()
    end = time.perf_counter_ns()
    return Trial(prompt=read - begin, steps=end - read, cache_bytes=arm.cache_bytes)
