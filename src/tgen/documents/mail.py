"""Mail: the bodies of messages without quotes and signatures."""

import re
from collections import Counter
from collections.abc import Iterator
from email import message_from_bytes, policy
from email.message import EmailMessage, MIMEPart
from typing import BinaryIO

from tgen.documents.html import add_page, decode_html, read_html
from tgen.documents.text_builder import TextBuilder

_FORWARD = re.compile(  # everything from here on was written by others
    r"\s*(-{3,} ?(original message|forwarded message|ursprüngliche nachricht|message d'origine|"
    r"mensaje original|original-nachricht).*|_{20,}|from: .+|von: .+|de\s?: .+)",
    re.I,
)
_SENT_FROM = re.compile(
    r"(sent from my|von meinem|gesendet von|envoyé de(puis)? mon|enviado desde) .*", re.I
)
_INTRODUCTION = re.compile(
    r".*(\d[:h]\d\d|\b(19|20)\d\d|\d[./-]\d+[./-]\d|@|"  # a time, a date or an address
    r"\bwrote|schrieb|écrit|escribió|escreveu|scritto|schreef|skrev|написал).*[::]",
    re.I,
)
_HEADER = re.compile(
    r"\s*(sent|date|to|gesendet|datum|an|envoyé|à|enviado|para|cc|subject)\s?: ", re.I
)


def read_mail(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the body of a message."""
    yield _body(file.read(), left_out)


def read_mbox(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the body of each message of a mailbox, of which one at a time is in RAM."""
    message: list[bytes] = []
    is_after_blank = True
    for line in file:
        if is_after_blank and line.startswith(b"From ") and message:
            yield _body(b"".join(message[1:]), left_out)
            message.clear()
        is_after_blank = line in (b"\n", b"\r\n")
        quoted = line.startswith(b">") and line.lstrip(b">").startswith(b"From ")
        message.append(line[1:] if quoted else line)
    if message:
        yield _body(b"".join(message[1:]), left_out)


def read_mhtml(file: BinaryIO, left_out: Counter[str]) -> Iterator[str]:
    """Yield the page that a browser saved with its pictures in the form of a message."""
    body = _parse(file.read()).get_body(("html",))
    if body is not None:
        yield from read_html(_payload(body), left_out, body.get_content_charset())


def _parse(data: bytes) -> EmailMessage:
    message = message_from_bytes(data, policy=policy.default)
    assert isinstance(message, EmailMessage)
    return message


def _payload(part: MIMEPart) -> bytes:
    payload = part.get_payload(decode=True)
    return payload if isinstance(payload, bytes) else b""


def _body(data: bytes, left_out: Counter[str]) -> str:
    message = _parse(data)
    is_mixed = message.get_content_type() == "multipart/mixed"
    parts = list(message.iter_parts()) if is_mixed else [message]
    bodies = [_find_body(part) for part in parts]
    n_attachments = bodies.count(None) if is_mixed else sum(1 for _ in message.iter_attachments())
    left_out["attachment"] += n_attachments
    texts = [_part_text(body, left_out) for body in bodies if body is not None]
    text = "\n\n".join(filter(None, texts))
    left_out["message without text"] += not text
    return text


def _find_body(part: MIMEPart) -> MIMEPart | None:
    """Return the text of a message or of one of its parts, such as that after a picture."""
    if part.get_content_disposition() == "attachment" or part.get_filename():
        return None
    body = part.get_body(("plain", "html"))
    if body is not None and not _payload(body).strip():  # beside a page that has the text
        body = part.get_body(("html", "plain"))
    return body


def _part_text(body: MIMEPart, left_out: Counter[str]) -> str:
    """Return the text of a part without quotes and signature."""
    text = decode_html(_payload(body), body.get_content_charset())
    if body.get_content_subtype() == "html":
        builder = TextBuilder(left_out)
        text = re.sub(r"(?i)<blockquote", "<p>&gt;</p><template", text)  # a quote
        add_page(re.sub(r"(?i)</blockquote", "</template", text), builder)
        text = builder.finish()
    elif body.get_param("format") == "flowed":
        is_joined = str(body.get_param("delsp", "")).lower() == "yes"
        text = re.sub(r"(?m)(?<!^--) \r?\n(?!>|-- \r?$)", "" if is_joined else " ", text)
    return _own_words(text.replace("\r\n", "\n").replace("\r", "\n"))


def _own_words(text: str) -> str:
    """Return a body without quotes, the lines that introduce them, and the signature."""
    kept: list[str] = []
    lines = text.split("\n")
    last = max((i for i, line in enumerate(lines) if line.strip()), default=0)
    for i, line in enumerate(lines):
        following = i < last and lines[i + 1].strip()
        if line.rstrip() == "--" and (line != "--" or following or i == last):
            break
        if _SENT_FROM.fullmatch(line.strip()) and not following:
            break
        if _FORWARD.fullmatch(line) and (
            line.lstrip()[:1] in "-_" or any(map(_HEADER.match, lines[i + 1 : i + 3]))
        ):
            break
        if line.startswith(">"):
            _drop_introduction(kept)
            continue
        kept.append(line.rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip("\n")


def _drop_introduction(kept: list[str]) -> None:
    """Remove the line before a quote, "On ..., ... wrote:", of up to three lines, if it is that."""
    while kept and not kept[-1]:
        kept.pop()
    first = next((i for i in range(len(kept) - 1, -1, -1) if not kept[i]), -1) + 1
    if len(kept) - first <= 3 and _INTRODUCTION.fullmatch(" ".join(kept[first:])):
        del kept[first:]
    if kept and kept[-1]:
        kept.append("")
