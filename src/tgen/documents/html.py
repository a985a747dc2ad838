"""HTML and the XHTML of e-books: the text of a page without navigation, scripts and styles."""

import codecs
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser

from tgen.documents.kinds import byte_order_mark
from tgen.documents.text_builder import TablePart, TextBuilder

_SKIPPED = {
    *("script", "style", "template", "noscript", "title", "nav", "footer", "button", "select"),
    *("textarea", "datalist", "svg", "canvas", "object", "iframe", "video", "audio", "rt", "rp"),
    *("annotation", "annotation-xml"),
}  # fmt: skip
_SKIPPED_ROLES = {
    *("navigation", "banner", "contentinfo", "search", "doc-noteref", "doc-backlink", "doc-toc"),
    *("doc-pagebreak", "doc-pagelist", "noteref", "pagebreak", "toc", "page-list", "landmarks"),
}  # fmt: skip
_PARAGRAPHS = {
    *("p", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "pre", "hr", "section", "article"),
    *("main", "header", "aside", "figure", "figcaption", "address", "fieldset", "body", "dl"),
}  # fmt: skip
_TABLE_PARTS: dict[str, TablePart] = {"table": "table", "tr": "row", "td": "cell", "th": "cell"}
_LINES = {"div", "li", "dt", "dd", "legend", "caption", "summary", "details", "form", "center"}
_BLOCKS = _PARAGRAPHS | _LINES | {*_TABLE_PARTS, "ul", "ol"}
_SECTIONS = {"thead", "tbody", "tfoot"}
# Elements whose end tag may be missing: what begins after them, and what they are in.
_OPEN_ENDED: dict[str, tuple[set[str], set[str]]] = {
    "p": (_BLOCKS, _BLOCKS),
    "li": ({"li"}, {"ul", "ol", "menu"}),
    **dict.fromkeys(("dt", "dd"), ({"dt", "dd"}, {"dl"})),
    **dict.fromkeys(("rt", "rp"), ({"rt", "rp"}, {"ruby"})),
    **dict.fromkeys(("td", "th"), ({"td", "th", "tr", *_SECTIONS}, {"table"})),
    "tr": ({"tr", *_SECTIONS}, {"table"}),
    **dict.fromkeys(_SECTIONS, (_SECTIONS, {"table"})),
}
_PAGE = {"html", "body"}  # which scripts show once they run
_VOID = {
    *("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param"),
    *("source", "track", "wbr"),
}  # fmt: skip
_SKIPPED_CLASSES = {"headerlink", "sdfootnotesym", "sdendnotesym", "pagenum", "pageno"}
_SKIPPED_CLASSES |= {"gmail_signature", "moz-signature"}  # of mail
# In the class of a link to a footnote or back.
_NOTE = re.compile(r"foot|note|fn-?(ref|back|anchor)", re.I)
_ARROW = re.compile(r"\s*[↩↑⤴^][\ufe0e\ufe0f]?\s*")  # of a link back
_MARK = re.compile(r"\s*[\[(]?(\d{1,4}|[a-z*†‡§¶]{1,3})[\])]?\s*")  # of a footnote
_NUMBER = re.compile(r"\s*[0-9+\-\u2212]+\s*")  # that is raised or lowered: x<sup>2</sup>
_SCRIPTS = {
    "sup": str.maketrans("0123456789+-\u2212", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻"),
    "sub": str.maketrans("0123456789+-\u2212", "₀₁₂₃₄₅₆₇₈₉₊₋₋"),
}
# Parts of the names of encodings that Python does not know: x-sjis, windows-874, iso-8859-8-i.
_LABEL = re.compile(r"^(?:x-)+|^windows-(?=\d)|-[ie]$")
_AS_BROWSERS = {  # encodings that browsers read as another one, with more characters
    "ascii": "cp1252", "iso8859-1": "cp1252", "utf-16": "cp1252", "iso8859-9": "cp1254",
    "gb2312": "gb18030", "gbk": "gb18030", "big5": "big5hkscs", "shift_jis": "cp932",
    "euc_kr": "cp949", "iso8859-11": "cp874", "tis-620": "cp874",
}  # fmt: skip
_MAX_PARTS = 100  # open elements of an equation
_SIGNS = {  # signs before the first, the second and the third part of an equation
    "mfrac": " /", "msup": " ^", "mover": " ^", "msub": " _", "munder": " _", "msubsup": " _^",
    "munderover": " _^", "msqrt": "√",
}  # fmt: skip
_CHARSET = re.compile(
    rb"""(?:<meta[^>]*?charset|<\?xml[^>]*?encoding)\s*=\s*["']?\s*([\w:.-]+)""", re.I
)


def read_html(data: bytes, left_out: Counter[str], encoding: str | None = None) -> Iterator[str]:
    """Yield the text of a page; `encoding` counts more than what the page declares."""
    builder = TextBuilder(left_out)
    add_page(decode_html(data, encoding), builder)
    yield builder.finish()


def declares_encoding(head: bytes) -> bool:
    """Return whether the beginning of a page names its encoding."""
    return _CHARSET.search(head[:4096]) is not None


def undeclared_encoding(data: bytes) -> str:
    """Return the encoding of a page that names none and is not UTF-8 throughout: UTF-8 if most of
    its characters outside of ASCII are, else cp1252, as in browsers."""
    wide = [character for character in data.decode(errors="replace") if character > "\x7f"]
    return "utf-8" if len(wide) > 5 * wide.count("\ufffd") else "cp1252"


def decode_html(data: bytes, encoding: str | None = None) -> str:
    """Return a page as text, in UTF-8 if it is that, else in the declared encoding if there is one,
    else see `undeclared_encoding`."""
    marked, n_mark = byte_order_mark(data)
    if marked:
        return data[n_mark:].decode(marked, "replace")
    if encoding is None:
        try:
            return data.decode()
        except UnicodeDecodeError:
            declared = _CHARSET.search(data[:4096])
            encoding = declared[1].decode().lower() if declared else undeclared_encoding(data)
    return data.decode(_codec(encoding.lower()), "replace")


def _codec(label: str) -> str:
    """Return the codec with which browsers read a page of an encoding."""
    label = _LABEL.sub(lambda found: "cp" if found[0] == "windows-" else "", label)
    try:
        name = codecs.lookup(label).name
        b" ".decode(name, "replace")  # a LookupError if it is not of text
    except (LookupError, ValueError):
        return "cp932" if label == "cp31j" else "cp1252"
    return _AS_BROWSERS.get(name, name)


def add_page(page: str, builder: TextBuilder, *, in_book: bool = False) -> None:
    """Add the text of a page. A `<header>` of the page is left out, but not `in_book`."""
    parser = _Parser(builder, in_book)
    parser.feed(page)
    parser.close()


class _Parser(HTMLParser):
    def __init__(self, builder: TextBuilder, in_book: bool) -> None:
        super().__init__()
        self._builder = builder
        self._skipped = ""  # the element whose content is left out
        self._depth = 0  # of elements inside that may have others of its name
        self._n_pre = self._n_articles = 0
        self._in_book = in_book
        self._in_list = 0
        self._divs: list[bool] = []  # that are open: whether each has several lines
        self._links_inside = False  # to a place in a page
        self._link: tuple[int, int] | None = None  # its beginning
        self._in_note = False  # this link is of a footnote
        self._mark: tuple[int, int] | None = None  # beginning of <sup> or <sub>
        self._mark_links = False
        self._equation: list[tuple[str, str]] = []  # open elements, and the signs of their parts

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin an element."""
        if self._skipped:
            starts, outer = _OPEN_ENDED.get(self._skipped, (set(), {self._skipped}))
            if self._depth or tag not in starts:
                self._depth += tag in outer
                return
            self._skipped = ""
        attributes = {name: value or "" for name, value in attrs}
        if tag in ("img", "svg", "image"):
            self._builder.left_out["picture"] += 1
        if tag not in _VOID and self._is_skipped(tag, attributes):
            self._skipped, self._depth = tag, 0
            return
        builder = self._builder
        if tag in _BLOCKS:
            self._equation.clear()
        elif tag == "math" or self._equation:
            self._begin_part(tag)
        if tag in ("br", "div") and self._divs:
            self._divs[-1] = True
        if tag == "br":
            builder.line_break()
        elif tag == "div":
            builder.line()
            self._divs.append(False)
        elif tag in _TABLE_PARTS:
            builder.begin(_TABLE_PARTS[tag])
        elif tag in ("ul", "ol"):
            builder.line() if self._in_list else builder.paragraph()
            self._in_list += 1
        elif tag == "a":
            self._links_inside = "#" in attributes.get("href", "")
            self._mark_links |= self._links_inside
            self._link = builder.position
            self._in_note = _NOTE.search(attributes.get("class", "")) is not None
        elif tag in _SCRIPTS:
            self._mark, self._mark_links = builder.position, self._links_inside
        elif tag == "li":
            builder.line()
        elif tag in _PARAGRAPHS:
            builder.line() if tag == "p" and self._in_list else builder.paragraph()
            self._n_pre += tag == "pre"
            self._n_articles += tag in ("article", "main", "section")
        elif tag in _LINES:
            builder.line()

    def handle_endtag(self, tag: str) -> None:
        """End an element."""
        builder = self._builder
        if self._skipped:
            _, outer = _OPEN_ENDED.get(self._skipped, (set(), {self._skipped}))
            if self._depth or tag not in {self._skipped, *outer}:
                self._depth -= tag in outer
                return
            ends_other, self._skipped = self._skipped in _OPEN_ENDED, ""
            if not ends_other:
                return
        open_parts = [name for name, _ in reversed(self._equation)]
        if tag in open_parts:
            del self._equation[-1 - open_parts.index(tag) :]
        if tag in _TABLE_PARTS:
            builder.end(_TABLE_PARTS[tag])
        elif tag in ("ul", "ol"):
            self._in_list = max(0, self._in_list - 1)
            builder.line() if self._in_list else builder.paragraph()
        elif tag == "a" and self._link:
            text = builder.cut(self._link) if self._links_inside else ""
            is_note = self._in_note and not self._mark  # in <sup>, brackets may be around it
            if _ARROW.fullmatch(text) or (is_note and _MARK.fullmatch(text)):
                builder.remove(self._link)
            self._links_inside, self._link = False, None
        elif tag in _SCRIPTS and self._mark:
            text = builder.cut(self._mark)
            if tag == "sup" and self._mark_links and _MARK.fullmatch(text):
                builder.remove(self._mark)
            elif _NUMBER.fullmatch(text):
                builder.remove(self._mark)
                builder.add(text.lstrip("\n").translate(_SCRIPTS[tag]))
            self._mark = None
        elif tag in _PARAGRAPHS:
            builder.line() if tag == "p" and self._in_list else builder.paragraph()
            self._n_pre = max(0, self._n_pre - (tag == "pre"))
            self._n_articles -= tag in ("article", "main", "section")
        elif tag == "div" and self._divs and self._divs.pop():
            builder.paragraph()  # a stanza, or paragraphs
        elif tag in _LINES:
            builder.line()

    def handle_data(self, data: str) -> None:
        """Add text."""
        if self._skipped or (self._equation and not data.strip(" \t\n\r\f")):
            return
        if self._n_pre:
            self._builder.add(data.replace("\r\n", "\n"))
        else:
            self._builder.add_words(data)

    def _begin_part(self, tag: str) -> None:
        """Begin an element of an equation; write the sign before it, such as that of a fraction."""
        if self._equation:
            parent, signs = self._equation[-1]
            if signs[0].strip():
                self._builder.add(signs[0])
            self._equation[-1] = parent, signs[1:] or " "
        if tag in ("mtr", "mtd", "mspace"):
            self._builder.add_words(" ")
        if len(self._equation) < _MAX_PARTS and tag not in _VOID:
            self._equation.append((tag, _SIGNS.get(tag, " ")))

    def _is_skipped(self, tag: str, attributes: dict[str, str]) -> bool:
        roles = f"{attributes.get('role', '')} {attributes.get('epub:type', '')}".split()
        style = attributes.get("style", "").replace(" ", "").lower()
        is_hidden = (
            "hidden" in attributes or "display:none" in style or "visibility:hidden" in style
        )
        return (
            tag in _SKIPPED
            or (tag == "header" and not self._in_book and not self._n_articles)
            or not _SKIPPED_ROLES.isdisjoint(roles)
            or not _SKIPPED_CLASSES.isdisjoint(attributes.get("class", "").split())
            or (tag == "div" and attributes.get("title") in ("header", "footer"))  # LibreOffice
            or (tag == "dialog" and "open" not in attributes)
            or (is_hidden and tag not in _PAGE)
        )
