"""Text with paragraphs, lines and tables, put together from the elements of a document."""

import re
from collections import Counter
from typing import Literal

TablePart = Literal["table", "row", "cell"]
# Bullets and marks of the fonts Symbol and Wingdings, which documents store in a private area.
SYMBOLS = {
    0xF0B7: "•", 0xF0A7: "▪", 0xF06C: "●", 0xF06E: "■", 0xF06F: "□", 0xF071: "❑", 0xF076: "❖",
    0xF0A8: "◻", 0xF0D8: "➢", 0xF0E0: "→", 0xF0FC: "✓",
}  # fmt: skip
_SPACES = re.compile(r"[ \t\n\r\f]+")
_MAX_DEPTH = 50  # of tables in cells; deeper ones belong to the last, as each level copies its text


class _Frame:
    """A text under way: the document, a cell, or a text beside the running one."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.asides: list[str] = []  # that follow the open paragraph
        self.line_breaks = 0  # due before the next part
        self.has_table = False


class _Table:
    def __init__(self) -> None:
        self.n_rows = 0  # with text
        self.cells: list[str] | None = None  # of the open row
        self.in_cell = False


class TextBuilder:
    """Paragraphs are separated by a blank line, rows of tables by a line break, cells by a tab."""

    def __init__(self, left_out: Counter[str]) -> None:
        self.left_out = left_out
        self._frames = [_Frame()]
        self._tables: list[_Table] = []
        self._n_deeper = 0  # open tables below the last one

    def paragraph(self) -> None:
        """Separate the text before from the text after by a blank line."""
        self._frames[-1].line_breaks = 2

    def line(self) -> None:
        """Separate the text before from the text after by a line break at least."""
        self._frames[-1].line_breaks = max(1, self._frames[-1].line_breaks)

    def line_break(self) -> None:
        """Add a line break; two make a blank line."""
        self._frames[-1].line_breaks = min(2, self._frames[-1].line_breaks + 1)

    def join_items(self) -> None:
        """Separate an item of a list from the one before by a line break only."""
        self._frames[-1].line_breaks = min(1, self._frames[-1].line_breaks)

    def add(self, text: str) -> None:
        """Add text as it is."""
        frame = self._frames[-1]
        if text:
            if frame.line_breaks and frame.parts:
                frame.parts.append("\n" * frame.line_breaks)
            frame.line_breaks = 0
            frame.parts.append(text)

    def add_words(self, text: str) -> None:
        """Add text whose white space stands for one space, as in HTML."""
        frame = self._frames[-1]
        text = _SPACES.sub(" ", text)
        at_start = frame.line_breaks or not frame.parts or frame.parts[-1][-1] in " \n"
        self.add(text.lstrip(" ") if at_start else text)

    @property
    def position(self) -> tuple[int, int]:
        """The end of the text so far, for `cut`."""
        return len(self._frames), len(self._frames[-1].parts)

    def cut(self, position: tuple[int, int]) -> str:
        """Return the text since `position`, if its frame is open."""
        depth, start = position
        return "".join(self._frames[-1].parts[start:]) if len(self._frames) == depth else ""

    def remove(self, position: tuple[int, int]) -> None:
        """Remove the text since `position`, but not the line breaks that it began with."""
        frame = self._frames[-1]
        if removed := self.cut(position):
            n_before = len(removed) - len(removed.lstrip("\n"))
            frame.line_breaks = max(frame.line_breaks, n_before)
            del frame.parts[position[1] :]

    def begin_aside(self) -> None:
        """Begin a text that is not part of the running one: a note, a text box."""
        self._frames.append(_Frame())

    def end_aside(self) -> None:
        """End the text since `begin_aside`; it follows the open paragraph."""
        self.add_aside(tidy("".join(self._frames.pop().parts)))

    def add_aside(self, text: str) -> None:
        """Add a text that follows the open paragraph."""
        self._frames[-1].asides.append(text)

    def end_paragraph(self) -> None:
        """Add the asides of the paragraph as paragraphs of their own."""
        asides, self._frames[-1].asides = self._frames[-1].asides, []
        for text in filter(None, asides):
            self.paragraph()
            self.add(text)

    def begin(self, part: TablePart) -> None:
        """Begin a table, a row or a cell; an open row or cell ends."""
        if part == "table" and len(self._tables) == _MAX_DEPTH:
            self._n_deeper += 1
        elif part == "table":
            self._tables.append(_Table())
        elif part == "row" and self._tables:
            self._end_row()
            self._tables[-1].cells = []
        elif self._tables:
            self._end_cell()
            if self._tables[-1].cells is None:
                self.begin("row")
            self._tables[-1].in_cell = True
            self._frames.append(_Frame())

    def end(self, part: TablePart) -> None:
        """End a table, a row or a cell."""
        if part == "table" and self._n_deeper:
            self._n_deeper -= 1
        elif part == "table":
            self._end_table()
        elif part == "row":
            self._end_row()
        else:
            self._end_cell()

    def _end_cell(self) -> None:
        """End a cell, which becomes one line unless it has paragraphs or a table."""
        if self._tables and self._tables[-1].in_cell:
            has_table = self._frames[-1].has_table
            cell = tidy("".join(self._frames.pop().parts))
            if "\n\n" not in cell and not has_table:
                cell = cell.replace("\n", " ")
            table = self._tables[-1]
            table.in_cell = False
            assert table.cells is not None
            table.cells.append(cell)

    def _end_row(self) -> None:
        """End a row; its cells become a line, or paragraphs if one has several lines."""
        if not self._tables:
            return
        self._end_cell()
        table = self._tables[-1]
        cells, table.cells = table.cells, None
        if cells and any(cells):
            if any("\n" in cell for cell in cells):
                self.paragraph()
                self.add("\n\n".join(filter(None, cells)))
                self.paragraph()
            else:
                self.line() if table.n_rows else self.paragraph()
                self.add("\t".join(cells).rstrip())
            table.n_rows += 1

    def _end_table(self) -> None:
        """End a table; one without text is counted."""
        if self._tables:
            self._end_row()
            if not self._tables.pop().n_rows:
                self.left_out["table without text"] += 1
            self._frames[-1].has_table = True
            self.paragraph()

    def finish(self) -> str:
        """Return the whole text; what is open ends."""
        while self._tables:
            self._end_table()
        return tidy("".join(self._frames[0].parts))


def tidy(text: str) -> str:
    """Return the text without spaces at the ends of lines and without several blank lines."""
    text = re.sub(r"[ \t]+(?=\n)", "", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip(" \t\n")
