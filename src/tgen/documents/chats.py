"""Exports of chats: WhatsApp's text, Telegram's and Discord's JSON. One line per message.

`kinds.py` recognizes them.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

from tgen.documents.kinds import WHATSAPP_STAMP
from tgen.documents.package import DAMAGED_HINT
from tgen.errors import CorpusError

_ATTACHMENT = re.compile(r"<[^<>\n]+>|[\w .-]+\.\w{2,4} \([^()\n]+\)")  # "<Media omitted>"
_MARKS = re.compile("[\u200e\u200f\u202a\u202c]")  # of direction, in front of names and numbers
# WhatsApp's own words in an iPhone's export: whole messages, or attachments after a caption.
_OWN_MESSAGE, _OWN_WORDS = re.compile("\u200e.*"), re.compile("\u200e<[^<>\n]+>$")
_EDITED = " <This message was edited>"
_DELETED = {"This message was deleted", "You deleted this message"}
_MAX_NAME = 60  # characters; a notice may have a colon, too
_DISCORD_MESSAGES = {"Default", "Reply"}


def read_whatsapp(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the chat: `name: message`. Notices, pictures and files are left out."""
    lines: list[str] = []
    begin = None  # of the next line if the message before goes on; None: it does not
    for line in text.split("\n"):
        stamp = re.match(WHATSAPP_STAMP, line)
        if not stamp:
            typed = _without_own_words(line)
            if _OWN_WORDS.fullmatch(line):
                left_out["attachment"] += 1
            elif begin is not None and (typed or not begin):
                lines.append(begin + typed)
                begin = ""
            continue
        name, colon, message = line[stamp.end() :].partition(": ")
        name = f"{_MARKS.sub('', name).strip()}: "
        typed = "" if _OWN_MESSAGE.match(message) else _without_own_words(message)
        is_notice = len(name) > _MAX_NAME + 2 or not colon or typed.rstrip(".") in _DELETED
        is_attachment = not typed or _ATTACHMENT.fullmatch(typed.strip())
        begin = None if is_notice else name if is_attachment else ""  # before a caption
        if is_notice or is_attachment:
            left_out["attachment" if message and not is_notice else "notice"] += 1
        else:
            lines.append(name + typed)
    yield "\n".join(lines).replace(_EDITED, "").strip()


def _without_own_words(line: str) -> str:
    return _OWN_WORDS.sub("", line).replace("\u200e", "").rstrip()


def read_telegram(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield each chat of an export, `name: message` per line."""
    export = _load(text)
    lists = [export.get(key, {}).get("list", []) for key in ("chats", "left_chats")]
    for chat in [export] if "messages" in export else chain(*lists):
        lines = []
        for message in chat["messages"]:
            parts = message.get("text", "")
            words = "".join(
                part if isinstance(part, str) else part["text"]
                for part in ([parts] if isinstance(parts, str) else parts)
            )
            if message.get("type") != "message":
                left_out["notice"] += 1
                continue
            left_out["attachment"] += any(key in message for key in ("photo", "file", "media_type"))
            if words.strip():
                lines.append(f"{message.get('from') or 'unknown'}: {words}")
        yield "\n".join(lines)


def read_discord(text: str, left_out: Counter[str]) -> Iterator[str]:
    """Yield the channel of an export by DiscordChatExporter, `name: message` per line."""
    lines = []
    for message in _load(text)["messages"]:
        if message.get("type", "Default") not in _DISCORD_MESSAGES:
            left_out["notice"] += 1
            continue
        left_out["attachment"] += len(message.get("attachments", ()))
        author = message.get("author", {})
        if message["content"].strip():
            name = author.get("nickname") or author.get("name") or "unknown"
            lines.append(f"{name}: {message['content']}")
    yield "\n".join(lines)


def _load(text: str) -> dict[str, Any]:
    try:
        export = json.loads(text)
    except ValueError as error:
        raise CorpusError(f"is damaged: its JSON has {error}", DAMAGED_HINT) from None
    return dict(export)
