"""Small documents of each format, made with the standard library."""

import io
import json
import zipfile
import zlib

NS = 'xmlns:w="w" xmlns:a="a" xmlns:m="m" xmlns:mc="mc" xmlns:text="t" xmlns:table="ta"'


def make_zip(files):
    """Return an archive of the files {name: text or bytes}."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            is_stored = name == "mimetype"  # as the formats want it
            method = zipfile.ZIP_STORED if is_stored else zipfile.ZIP_DEFLATED
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return content.getvalue()


def make_docx(body, **parts):
    """Return a .docx with the elements of the body, and other parts by their short names."""
    files = {"word/document.xml": f"<w:document {NS}><w:body>{body}</w:body></w:document>"}
    files |= {f"word/{name}.xml": f"<w:{name} {NS}>{xml}</w:{name}>" for name, xml in parts.items()}
    return make_zip({"[Content_Types].xml": "<Types/>"} | files)


def paragraph(*runs, style=""):
    """Return a paragraph of a .docx; runs are texts or elements."""
    properties = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    texts = [run if run.startswith("<") else f"<w:t>{run}</w:t>" for run in runs]
    return f"<w:p>{properties}{''.join(f'<w:r>{text}</w:r>' for text in texts)}</w:p>"


def make_odt(body):
    """Return an .odt with the elements of the body."""
    xml = f"<office:document-content xmlns:office='o' xmlns:draw='d' {NS}><office:body>"
    return make_zip(
        {
            "mimetype": "application/vnd.oasis.opendocument.text",
            "content.xml": f"{xml}{body}</office:body></office:document-content>",
        }
    )


def make_epub(pages, **files):
    """Return an .epub with the pages {name: XHTML} in their order, the first is its contents."""
    items = "".join(
        f'<item id="i{i}" href="{name}" {"" if i else "properties=" + chr(34) + "nav" + chr(34)}/>'
        for i, name in enumerate(pages)
    )
    spine = "".join(f'<itemref idref="i{i}"/>' for i in range(len(pages)))
    container = '<container><rootfiles><rootfile full-path="OPS/b.opf"/></rootfiles></container>'
    book = f"<package><manifest>{items}</manifest><spine>{spine}</spine></package>"
    stored = {f"OPS/{name}": page for name, page in pages.items()}
    return make_zip(
        {"mimetype": "application/epub+zip", "META-INF/container.xml": container}
        | {"OPS/b.opf": book}
        | stored
        | files
    )


def make_pdf(pages, *, trailer="", tree=None):
    """Return a PDF; each page is a list of (x, y, size, text), or None for one without content."""
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"",
        b"<</Type/Font/Subtype/Type1/BaseFont/Courier>>",
    ]
    kids = []
    for lines in pages:
        kids.append(f"{len(objects) + 1} 0 R")
        content = "".join(f"BT /F {s} Tf {x} {y} Td ({t}) Tj ET\n" for x, y, s, t in lines or [])
        data = zlib.compress(content.encode("latin-1"))
        font = "/Resources<</Font<</F 3 0 R>>>>" if lines else ""
        stream = f"/Contents {len(objects) + 2} 0 R" if lines else ""
        objects.append(f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]{font}{stream}>>".encode())
        if lines:
            head = f"<</Length {len(data)}/Filter/FlateDecode>>stream\n".encode()
            objects.append(head + data + b"\nendstream")
    objects[1] = (tree or f"<</Type/Pages/Count {len(pages)}/Kids[{' '.join(kids)}]>>").encode()
    file, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, item in enumerate(objects, 1):
        offsets.append(len(file))
        file += b"%d 0 obj %b endobj\n" % (number, item)
    table = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    start = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}trailer"
    end = f"<</Size {len(objects) + 1}/Root 1 0 R{trailer}>>\nstartxref\n{len(file)}\n%%EOF\n"
    return bytes(file) + (start + end).encode()


RTF = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}{\header Head\par}Caf\'e9 \u8212? one\par "
    rb"Verse\line line{\footnote A note}\par {\pict\pngblip 8950}{\field{\*\fldinst{HYPERLINK "
    rb'"http://x.y"}}{\fldrslt link}}\par \trowd a\cell b\cell\row\trowd c\cell d\cell\row '
    rb"End.\par}"
)
HTML = (
    "<!DOCTYPE html><html><head><title>T</title><style>s</style></head><body><header>H</header>"
    "<nav><a>N</a></nav><h1>Head</h1><p>One\n two<sup><a href='#f'>1</a></sup>,<br>line.</p>"
    "<script>x()</script><ul><li>a<li>b</ul><table><tr><td>c<td>d<tr><td>e<td>f</table><table></table>"
    "<img src=x><pre>  code\n\nx</pre><div>p</div><div>q</div><footer>F</footer></body></html>"
)
NOTEBOOK = json.dumps(
    {
        "cells": [
            {"cell_type": "markdown", "source": ["# A\n", "text"]},
            {"cell_type": "code", "source": "x = 1", "outputs": [{"text": "no"}]},
        ],
        "nbformat": 4,
    }
)
MAIL = (
    "From: a@b.c\nTo: d@e.f\nSubject: s\nDate: Tue, 3 Mar 2020 10:00:00 +0000\n"
    'MIME-Version: 1.0\nContent-Type: text/plain; charset="utf-8"\n\nHi,\n\nyes.\n\n'
    "On Mon, Bob <b@c.d>\nwrote:\n> quoted\n> more\n\nMine.\n-- \nAnna\n"
)
MBOX = f"From a@b.c Tue\n{MAIL}\nFrom b@c.d Wed\n{MAIL.replace('yes', '>From no')}"
SRT = (
    "1\r\n00:00:01,000 --> 00:00:02,000\r\n<i>One</i>\r\ntwo\r\n\r\n"
    "2\r\n00:01:00,5 --> 00:01:01,5\r\nx\r\n"
)
VTT = (
    "WEBVTT\n\nNOTE no\n\n00:00.000 --> 00:02.000 align:start\nhello<00:00.500><c> you</c>\n\n"
    "00:02.000 --> 00:02.010\nhello you\n\n00:02.010 --> 00:04.000\nhello you\n&amp; all\n"
)
ASS = (
    "[Script Info]\n; x\n\n[V4+ Styles]\nFormat: Name, Fontname\nStyle: Default,Arial\n\n[Events]\n"
    "Format: Layer, Start, End, Style, Text\n"
    "Dialogue: 0,0:00:01.00,0:00:02.00,Default,Hi, {\\i1}you{\\i0}\\Nall\n"
    "Comment: 0,0:00:01.00,0:00:02.00,Default,note\n"
    "Dialogue: 0,0:00:01.00,0:00:02.00,Default,{\\an7\\p1}m 0 0 l 9 0{\\p0}\n"
    "Dialogue: 0,0:00:03.00,0:00:04.00,Default,{\\pos(1,2)}y\\h\n"
)
WHATSAPP = (
    "[31.12.23, 23:59:10] Anna: \u200eencrypted\n[31.12.23, 23:59:11] Anna: Hi: you\nmore\n"
    "\u200e[1.1.24, 00:00:01] Bob: \u200eimage omitted\n[1.1.24, 00:00:02] Bob: Ok\n"
    "[1.1.24, 00:00:02] Bob joined\n"
)
ANDROID = (
    "12/31/23, 11:59\u202fPM - Anna: Hi\n12/31/23, 11:59\u202fPM - Bob: <Media omitted>\n"
    "1/1/24, 12:00\u202fAM - +1 23: Ok <This message was edited>\n"
)
TELEGRAM = json.dumps(
    {
        "name": "Bob",
        "type": "personal_chat",
        "id": 1,
        "messages": [
            {"id": 1, "type": "service", "action": "x", "text": ""},
            {
                "id": 2,
                "type": "message",
                "from": "Bob",
                "text": ["see ", {"type": "link", "text": "x.y"}],
            },
            {"id": 3, "type": "message", "from": "Anna", "text": "", "photo": "p.jpg"},
            {"id": 4, "type": "message", "from": "Anna", "text": "a\nb \ud800"},
        ],
    },
    indent=1,
)
DISCORD = json.dumps(
    {
        "guild": {"id": "1", "name": "g"},
        "channel": {"name": "c"},
        "messages": [
            {"type": "Default", "content": "hi", "author": {"name": "a", "nickname": "A"}},
            {"type": "GuildMemberJoin", "content": "joined", "author": {"name": "b"}},
            {"type": "Reply", "content": "yo", "author": {"name": "b"}, "attachments": [{}]},
        ],
    }
)
