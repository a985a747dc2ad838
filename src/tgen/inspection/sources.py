"""The longest passages of a text that also occur in the training text, as OLMoTrace finds them.

A passage is a run of whole words, in bytes: it begins and ends at the border of a word in both
texts (see `corpus.text_index`), and is not part of a longer one.
"""

from collections.abc import Iterator

import numpy as np

from tgen.corpus.suffix_array import END
from tgen.corpus.text_index import Range, TextIndex, word_borders
from tgen.reports.inspection import SourcePassage, SourcePlace, SourcesReport

TOP, PLACES = 10, 10  # passages, and places of each, by default
_CONTEXT = 60  # bytes on each side


def find_sources(
    index: TextIndex, text: bytes, *, top: int = TOP, places: int = PLACES
) -> SourcesReport:
    """Return the `top` longest passages of a text that are in the index, with the first `places` of
    each."""
    found = sorted(_passages(index, text), key=lambda one: (one[0] - one[1], one[0]))
    passages = []
    covered = np.zeros(len(text), bool)
    for start, end, ranges in found[:top]:
        where = index.places(ranges, end - start, n=places, context=_CONTEXT)
        covered[start:end] = True
        passages.append(
            SourcePassage(
                start=start,
                end=end,
                text=text[start:end],
                occurrences=sum(high - low for low, high in ranges),
                places=[SourcePlace(**place._asdict()) for place in where],
            )
        )
    return SourcesReport(
        passages=passages,
        n_passages=len(found),
        n_bytes=len(text),
        n_covered=int(covered.sum()),
        corpus_bytes=index.n_bytes,
    )


def _passages(index: TextIndex, text: bytes) -> Iterator[tuple[int, int, list[Range]]]:
    """Yield start, end and occurrences of the passages that are not part of another."""
    begins, ends = map(np.flatnonzero, word_borders(text))
    last_end = 0  # of the passages so far
    for start in begins.tolist():
        stop = text.find(END, start)
        phrase = text[start : stop if stop >= 0 else len(text)]
        longest = start + index.longest_match(phrase)
        first, last = np.searchsorted(ends, [max(start, last_end), longest], side="right")
        for end in ends[first:last][::-1].tolist():
            ranges = index.whole_matches(text[start:end])
            if ranges:
                last_end = end
                yield start, end, ranges
                break
