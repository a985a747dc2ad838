"""E-books in EPUB 2 and 3: the pages in their reading order, without the table of contents."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import BinaryIO

from tgen.documents.html import add_page, decode_html
from tgen.documents.package import DAMAGED_HINT, Package
from tgen.documents.text_builder import TextBuilder
from tgen.errors import CorpusError

_FONT_SCRAMBLING = {"http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC"}
_DIGITS = re.compile(r"(\d+)")


def read_epub(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the text of a book; raises CorpusError if its pages are encrypted."""
    package = Package(file)
    encrypted = _encrypted(package)
    builder = TextBuilder(left_out)
    n_pages = 0
    for name in _pages(package):
        if name in encrypted:
            raise CorpusError(
                "is protected by DRM: its pages are encrypted",
                "use a copy without DRM",
            )
        builder.paragraph()
        add_page(decode_html(package.read(name)), builder, in_book=True)
        n_pages += 1
    if not n_pages:
        raise CorpusError("has no pages", DAMAGED_HINT)
    yield builder.finish()


def _pages(package: Package) -> list[str]:
    """Return the names of the pages: the spine of the book, else all pages by name."""
    book = ""
    if "META-INF/container.xml" in package:
        for kind, name, attributes in package.events("META-INF/container.xml"):
            if (kind, name) == ("start", "rootfile") and not book:
                book = package.resolve("", attributes.get("full-path", ""))
    if not book:
        pages = [
            name for name in package.names if name.lower().endswith((".xhtml", ".html", ".htm"))
        ]
        return sorted(pages, key=_by_numbers)
    items: dict[str, str] = {}
    contents: set[str] = set()  # the pages with the table of contents
    spine: list[str] = []
    for kind, name, attributes in package.events(book):
        link = attributes.get("href", "")
        if kind == "start" and name == "item" and link:
            page = package.resolve(book, link)
            items[attributes.get("id", "")] = page
            if "nav" in attributes.get("properties", "").split():
                contents.add(page)
        elif kind == "start" and name == "itemref":
            spine.append(attributes.get("idref", ""))
        elif kind == "start" and name == "reference" and attributes.get("type") == "toc":
            contents |= set() if "#" in link else {package.resolve(book, link)}  # a whole page
    pages = [items[number] for number in dict.fromkeys(spine) if number in items]
    return [page for page in pages if page not in contents]


def _by_numbers(name: str) -> list[str | int]:
    parts = _DIGITS.split(name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _encrypted(package: Package) -> set[str]:
    """Return the names of the encrypted files, apart from scrambled fonts."""
    names: set[str] = set()
    if "META-INF/encryption.xml" in package:
        method = ""
        for kind, name, attributes in package.events("META-INF/encryption.xml"):
            if kind == "start" and name == "EncryptionMethod":
                method = attributes.get("Algorithm", "")
            elif kind == "start" and name == "CipherReference" and method not in _FONT_SCRAMBLING:
                names.add(package.resolve("", attributes.get("URI", "")))
    return names
