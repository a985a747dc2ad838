"""Recognize documents by their first bytes and their names, without importing a library.

`UNREADABLE` has the kinds that are recognized, but not read.
"""

import codecs
import re
from pathlib import PurePath

_ZIP, _OLE = b"PK\x03\x04", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"
_SUFFIXES = {
    ".docx": "docx", ".docm": "docx", ".dotx": "docx", ".odt": "odt", ".ott": "odt",
    ".epub": "epub", ".html": "html", ".htm": "html", ".xhtml": "html", ".pdf": "pdf",
    ".rtf": "rtf", ".ipynb": "notebook", ".eml": "mail", ".mbox": "mbox", ".srt": "subtitles",
    ".vtt": "subtitles", ".doc": "doc", ".xlsx": "sheet", ".xls": "sheet", ".ods": "sheet",
    ".pptx": "slides", ".ppt": "slides", ".odp": "slides", ".mobi": "kindle", ".azw": "kindle",
    ".azw3": "kindle", ".mhtml": "mhtml", ".mht": "mhtml", ".sbv": "subtitles",
    ".ass": "subtitles", ".ssa": "subtitles", ".ttml": "timed", ".dfxp": "timed",
    ".enex": "evernote",
}  # fmt: skip
_BYTE_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32-le",  # starts with that of utf-16-le
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
_MARKDOWN = {".md", ".markdown", ".mdx", ".qmd", ".rmd"}
# Documents whose format does not say the encoding.
ANY_ENCODING = {"subtitles", "markdown", "notebook", "telegram", "discord", "whatsapp"}
# The problem of each kind that tgen does not read, and a hint.
UNREADABLE = {
    "doc": (
        "is a document of Word 97 to 2003, or encrypted",
        "save it as .docx without a password",
    ),
    "sheet": ("is a spreadsheet", "save its table as CSV: tgen train FILE.csv"),
    "slides": ("is a presentation", "save it as PDF, and train on that"),
    "flat": ("is a document in one XML file", "save it as .docx or .odt"),
    "fictionbook": ("is a FictionBook", "convert it to EPUB: ebook-convert FILE.fb2 FILE.epub"),
    "timed": ("has subtitles in XML", "convert them: ffmpeg -i FILE.ttml FILE.srt"),
    "evernote": ("is an export of Evernote", "export the notes as HTML, and train on these"),
    "postscript": ("is a PostScript document", "convert it to PDF: ps2pdf FILE.ps"),
    "kindle": ("is a Kindle book", "convert it to EPUB: ebook-convert FILE.azw3 FILE.epub"),
}
_OFFICE = rb"\[Content_Types\]\.xml|_rels/|docProps/|(word|xl|ppt)/.*\.(xml|rels)$"  # first in it
_OFFICE_PARTS = {b"word/": "docx", b"xl/": "sheet", b"ppt/": "slides"}
_MEDIA_TYPES = {
    b"application/epub+zip": "epub", b"opendocument.text": "odt",
    b"opendocument.spreadsheet": "sheet", b"opendocument.presentation": "slides",
}  # fmt: skip
_FRONT_MATTER = rb"---[ \t]*\r?\n([ \t]*(#[^\n]*)?\n)*(---|[\w\"'][^\n]*:)"
_HTML = rb"(?i)\s*(<\?xml[^>]*>\s*)?(<!--.{0,1000}?-->\s*)?<(!doctype\s+html|html[\s>])"
_ONE_FILE = (  # documents that are text to other programs
    (rb"%!PS", "postscript"),
    (rb"\s*(<\?xml[^>]*>\s*)?<FictionBook[\s>]", "fictionbook"),
    (rb"\s*(<\?xml[^>]*>\s*)?(<\?mso-application progid=\"Word\.|<office:document\s)", "flat"),
)
_MAIL = rb"(From |(Received|Return-Path|From|Date|Subject|Message-ID|MIME-Version|Delivered-To): ?)"
_TELEGRAM = (
    rb'\{\s*("about"\s*:\s*"(?:[^"\\]|\\.)*",\s*"(personal_information|profile_pictures|stories|'
    rb'contacts|frequent_contacts|(web_)?sessions|other_data|(left_)?chats)"\s*:[\s\[{]*"(about|'
    rb'list|user_id|date|photo)"|'
    rb'("name"\s*:[^\n]*\s*)?'
    rb'"type"\s*:\s*"(personal_chat|bot_chat|saved_messages|(private|public)_\w+)")'
)
_DISCORD = rb'\{\s*"guild"\s*:\s*\{'
# A date, a time and the end of both: "[31.12.23, 23:59:10] " of iOS, "12/31/23, 11:59 PM - ". Short
# words are before a time, such as "klo" and "下午", and after it, such as "p. m.", in any script.
# Three letters, but Malay's "PTG", are a time zone of a log.
WHATSAPP_STAMP = (
    r"[\u200e\u200f\ufeff]*(\[)?\d{1,4}\u200f?[./-] ?\d{1,2}\u200f?[./-] ?\d{1,4}"
    r"(?:\.| ?[^\W\d_]{1,2}\.)?([,،]\u200f?)?[ \u202f\xa0](?:[^\W\d_]{1,3}\.?[ \u202f\xa0]?)?"
    r"\d{1,2}[:.]\d{2}([:.]\d{2})?"
    r"(?:[ \u202f\xa0]?(?:PTG|[^\W\d_]{1,2}(?:\.[ \u202f\xa0]?[^\W\d_]{1,2})?\.?))?"
    r"(?(1)\] |(?: - |(?(2): |(?!))))"
)


def byte_order_mark(head: bytes) -> tuple[str, int]:
    """Return the codec that a byte order mark declares, and the bytes of the mark; "" and 0 if the
    text begins with none."""
    marks = (
        (codec, len(mark)) for mark, codec in _BYTE_ORDER_MARKS.items() if head.startswith(mark)
    )
    return next(marks, ("", 0))


def document_kind(name: str, head: bytes) -> str | None:
    """Return how a file is read as a document, or None if it is text, rows or anything else.

    `head` is the beginning of the file, 4 KB or more if it has them. Magic numbers count more than
    the name; the content of a file without suffix, and of stdin (`-`), decides alone.
    """
    suffix = PurePath(name).suffix.lower()
    by_name = _SUFFIXES.get(suffix)
    if head.startswith(b"%PDF-") or (by_name == "pdf" and b"%PDF-" in head[:1024]):
        return "pdf"
    if head.startswith(b"{\\rtf"):
        return "rtf"
    if head.startswith(_OLE):
        return "sheet" if by_name == "sheet" else "slides" if by_name == "slides" else "doc"
    if head[60:68] == b"BOOKMOBI":
        return "kindle"
    if head.startswith(_ZIP):
        return by_name or _zip_kind(head)
    text = head.removeprefix(b"\xef\xbb\xbf")
    if suffix in _MARKDOWN:
        return "markdown" if re.match(_FRONT_MATTER, text) else None
    if by_name in ("doc", "sheet", "slides", "kindle"):
        return by_name if b"\0" in head else None
    if by_name:
        return by_name
    if one_file := next((kind for mark, kind in _ONE_FILE if re.match(mark, text)), None):
        return one_file
    if suffix in (".json", "") and re.match(_TELEGRAM, text):
        return "telegram"
    if suffix in (".json", "") and re.match(_DISCORD, text):
        return "discord"
    if suffix in (".txt", "") and _is_whatsapp(name, text):
        return "whatsapp"
    if suffix or b"\0" in head:
        return None
    if re.match(_HTML, text):
        return "html"
    fields = re.findall(rb"(?m)^(From|Date|To|Subject|Message-ID): ", text[:4096])
    if re.match(_MAIL, text) and len(set(fields)) >= 3:
        return "mbox" if text.startswith(b"From ") else "mail"
    return "subtitles" if text.startswith(b"WEBVTT") else None


def _zip_kind(head: bytes) -> str | None:
    """Return which document a ZIP archive is, or None, by the names of its first members."""
    starts = [match.start() for match in re.finditer(_ZIP, head)]
    names = [
        head[i + 30 : i + 30 + int.from_bytes(head[i + 26 : i + 28], "little")] for i in starts
    ]
    if names[0] == b"mimetype":
        return next((kind for mark, kind in _MEDIA_TYPES.items() if mark in head[:200]), None)
    if not re.match(_OFFICE, names[0]):
        return None
    kinds = [kind for n in names for mark, kind in _OFFICE_PARTS.items() if n.startswith(mark)]
    return kinds[0] if kinds else None


def _is_whatsapp(name: str, head: bytes) -> bool:
    """Return whether the first line and two others, or all of fewer, have a time, and at least half
    of such lines a name."""
    lines = head.decode("utf-8", "ignore").splitlines()
    first = re.match(WHATSAPP_STAMP, lines[0]) if lines else None
    is_named = "whatsapp" in name.lower() or name.endswith("_chat.txt")
    # Lines of a log have no comma after the date, and seconds. Those of a diary may end in a colon.
    is_chat = first and not first[0].endswith(": ") and (first[2] or not (first[3] or first[1]))
    if not first or not (is_named or is_chat):
        return False
    stamps = [match for line in lines if (match := re.match(WHATSAPP_STAMP, line))]
    named = [match for match in stamps if ": " in match.string[match.end() :][:80]]
    return len(stamps) >= min(3, len(lines)) and len(named) * 2 >= len(stamps)
