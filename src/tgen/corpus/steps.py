"""Long work in steps: generators that yield the fraction done, up to 1, and return a result."""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[float, None, T]


def finish(steps: Steps[T], progress: Callable[[float], None] = lambda _: None) -> T:
    """Do all steps and return their result; `progress` gets the fraction done."""
    while True:
        try:
            progress(next(steps))
        except StopIteration as end:
            result: T = end.value
            return result


def as_part(steps: Steps[T], start: float, end: float) -> Steps[T]:
    """Do steps that are the part of a longer work from the fraction `start` to `end`."""
    try:
        while True:
            yield start + (end - start) * next(steps)
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        steps.close()
