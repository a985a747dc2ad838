"""Subtitles, .srt, .vtt, .sbv, .ass and .ssa: the spoken text without numbers, times and styles."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise

_TIME = r"(?:\d{1,3}:)?\d{1,2}:\d{1,2}[,.]\d{1,3}"
_CUE = re.compile(rf"\s*{_TIME}(?:\s*-->\s*|,){_TIME}")  # with a comma in .sbv
_BEGIN = re.compile(rf"(?:\A|\n)((?:\d+[ \t]*\n)?[ \t]*{_TIME}(?:[ \t]*-->|,\d))")
_WORD_TIME = re.compile(rf"<{_TIME}>")  # in the captions of YouTube, whose lines come several times
_MIN_REPEATED, _MOST = 4, 0.8  # cues of rolling captions: at least, and their share of all cues
_TAGS = re.compile(r"</?[a-zA-Z][^<>\n]*>|\{\\[^{}\n]*\}")
_SCRIPT = re.compile(r"\s*\[Script Info\]", re.IGNORECASE)  # of .ass and .ssa
_DRAWING = re.compile(r"\{[^{}]*\\p[1-9][^{}]*\}")  # its text is coordinates
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&nbsp;": " ", "&lrm;": "", "&rlm;": ""}


def read_subtitles(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text of the cues in their order."""
    if _SCRIPT.match(text):
        yield _read_script(text, left_out)
        return
    is_vtt = text.startswith("WEBVTT")
    is_rolling = bool(_WORD_TIME.search(text))
    cues: list[list[str]] = []
    for block in re.split(r"\n\s*\n", _BEGIN.sub(r"\n\n\1", text)):
        block_lines = block.strip("\n").split("\n")
        cue = next((i for i, line in enumerate(block_lines[:2]) if _CUE.match(line)), None)
        if cue is None:
            if block.strip() and not is_vtt:
                left_out["block without time"] += 1
            continue
        lines = [_TAGS.sub("", _WORD_TIME.sub("", line)).strip() for line in block_lines[cue + 1 :]]
        if is_vtt:
            lines = [
                re.sub("&[a-z]+;", lambda name: _ENTITIES.get(name[0], name[0]), line)
                for line in lines
            ]
        cues.append([line for line in lines if line])
    yield "\n".join(_without_repeated(list(filter(None, cues)), is_rolling))


def _without_repeated(cues: list[list[str]], is_rolling: bool) -> Iterator[str]:
    """Yield the lines of the cues; in rolling captions, whose cues begin with the last line of the
    cue before, each line once. In .srt files made from captions of YouTube, most cues do so."""
    pairs = list(pairwise(cues))
    n_repeated = sum(before[-1] == cue[0] for before, cue in pairs)
    is_rolling |= n_repeated >= max(_MIN_REPEATED, _MOST * len(pairs))
    last = ""
    for line in chain.from_iterable(cues):
        if not (is_rolling and line == last):
            yield line
        last = line


def _read_script(text: str, left_out: Counter[str]) -> str:
    """Return the text of the `Dialogue:` lines, whose last field it is."""
    lines: list[str] = []
    n_fields = 10
    for line in text.split("\n"):
        kind, _, content = line.strip().partition(":")
        if kind == "Format":  # the last one is that of the events
            n_fields = content.count(",") + 1
        elif kind == "Dialogue":
            cue = content.split(",", n_fields - 1)[-1]
            if _DRAWING.search(cue):
                left_out["drawing"] += 1
                continue
            cue = re.sub(r"\{[^{}]*\}", "", cue).replace("\\h", " ")
            lines += filter(None, map(str.strip, re.split(r"\\[Nn]", cue)))
    return "\n".join(lines)
