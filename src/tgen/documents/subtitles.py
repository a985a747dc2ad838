"""Subtitles, .srt and .vtt: what is said, one line each, without numbers, times and styles."""

import re
from collections import Counter
from collections.abc import Iterator

_TIME = r"(?:\d{1,3}:)?\d{1,2}:\d{1,2}[,.]\d{1,3}"
_CUE = re.compile(rf"\s*{_TIME}\s*-->\s*{_TIME}")
_BEGIN = re.compile(rf"(?:\A|\n)((?:\d+[ \t]*\n)?[ \t]*{_TIME}[ \t]*-->)")
_WORD_TIME = re.compile(rf"<{_TIME}>")  # in the captions of YouTube, whose lines come several times
_TAGS = re.compile(r"</?[a-zA-Z][^<>\n]*>|\{\\[^{}\n]*\}")
_ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">", "&nbsp;": " ", "&lrm;": "", "&rlm;": ""}


def read_subtitles(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text of the cues in their order."""
    is_vtt = text.startswith("WEBVTT")
    is_rolling = bool(_WORD_TIME.search(text))
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", _BEGIN.sub(r"\n\n\1", text)):
        block_lines = block.strip("\n").split("\n")
        cue = next((i for i, line in enumerate(block_lines[:2]) if _CUE.match(line)), None)
        if cue is None:
            if block.strip() and not is_vtt:
                left_out["block without time"] += 1
            continue
        for line in block_lines[cue + 1 :]:
            line = _TAGS.sub("", _WORD_TIME.sub("", line)).strip()
            if is_vtt:
                line = re.sub("&[a-z]+;", lambda name: _ENTITIES.get(name[0], name[0]), line)
            if line and not (is_rolling and lines[-1:] == [line]):
                lines.append(line)
    yield "\n".join(lines)
