"""Each reader: the text of a document, and what is left out."""

from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from support import documents
from support.documents import make_docx, make_epub, make_odt, make_pdf, paragraph
from tgen.corpus.steps import finish
from tgen.documents import convert
from tgen.documents.convert import convert_document
from tgen.documents.kinds import document_kind
from tgen.errors import CorpusError


@pytest.fixture
def read(tmp_path):
    def read_as(name, content, **options):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        kind = document_kind(name, path.read_bytes()[:4096])
        assert kind
        converted = finish(convert_document(path, kind, **options))
        text = converted.spool.read(0, 1 << 24).decode()
        return text, converted.left_out

    return read_as


def test_docx_keeps_paragraphs_lines_lists_tables_and_notes(read):
    item = "<w:p><w:pPr><w:numPr/></w:pPr><w:r><w:t>{}</w:t></w:r></w:p>"
    field = "".join(
        paragraph(f'<w:fldChar w:fldCharType="{kind}"/>', *rest)
        for kind, *rest in (
            ("begin", "<w:instrText> TOC \\o</w:instrText>"),
            ("separate", "A 1"),
            ("end",),
        )
    )
    table = "".join(
        f"<w:tr><w:tc>{paragraph(a)}</w:tc><w:tc>{paragraph(b)}</w:tc></w:tr>"
        for a, b in ("ab", "cd")
    )
    choice = f"<mc:Choice><w:txbxContent>{paragraph('box')}</w:txbxContent></mc:Choice>"
    box = f"<mc:Alternate>{choice}<mc:Fallback>{paragraph('box')}</mc:Fallback></mc:Alternate>"
    body = (
        paragraph("Contents", style="TOCHeading") + field + paragraph("Title", style="Heading1")
        + paragraph("One", "<w:br/>", "two", '<w:footnoteReference w:id="2"/>', " end ")
        + "<w:p><w:del><w:r><w:t>gone</w:t></w:r></w:del><w:r><w:t>in</w:t></w:r></w:p>"
        + item.format("x") + item.format("y") + f"<w:tbl>{table}</w:tbl><w:tbl><w:tr/></w:tbl>"
        + paragraph(box, "with", "<a:blip/>")
    )  # fmt: skip
    notes = f'<w:footnote w:id="2">{paragraph("A note")}</w:footnote>'
    text, left_out = read("a.docx", make_docx(body, footnotes=notes, header1=paragraph("no")))
    assert text == ("Title\n\nOne\ntwo end\n\nA note\n\nin\n\nx\ny\n\na\tb\nc\td\n\nwith\n\nbox")
    assert left_out == {"table without text": 1, "picture": 1}


def test_docx_joins_a_drop_cap_to_its_word(read):
    for kind, joint in (("drop", ""), ("margin", ""), ("none", "\n\n")):
        former = '<w:pPrChange><w:pPr><w:framePr w:dropCap="drop"/></w:pPr></w:pPrChange>'
        frame = f'<w:pPr><w:framePr w:dropCap="{kind}" w:lines="3"/>{former}</w:pPr>'
        body = f"{paragraph('a')}<w:p>{frame}<w:r><w:t>O</w:t></w:r></w:p>{paragraph('nce')}"
        text, _ = read("a.docx", make_docx(body + paragraph("b")))
        assert text == f"a\n\nO{joint}nce\n\nb"


def test_docx_without_hidden_text(read):
    hidden = "<w:rPr><w:b/><w:vanish{}/></w:rPr><w:t>{}</w:t>"
    old = "<w:rPr><w:rPrChange><w:rPr><w:vanish/></w:rPr></w:rPrChange></w:rPr><w:t>old</w:t>"
    mark = f"<w:p><w:pPr><w:rPr><w:vanish/></w:rPr></w:pPr><w:r>{old}</w:r></w:p>"
    equation = "<m:d><m:e><m:r><m:t>x</m:t></m:r></m:e></m:d>"
    body = paragraph("One", hidden.format("", " no") + "<w:tab/>", " two") + mark
    body += paragraph(hidden.format(' w:val="true"', "no")) + paragraph("three")
    body += f"<w:p><w:r>{hidden.format('', 'no')}</w:r>{equation}</w:p>"
    body += f"<w:p><w:pPr><w:rPr><w:vanish/></w:rPr></w:pPr>{equation}</w:p>"
    body += paragraph(hidden.format(' w:val="0"', "shown"))
    assert read("a.docx", make_docx(body))[0] == "One two\n\nold\n\nthree\n\n(x)\n\n(x)\n\nshown"


def test_docx_keeps_brackets_signs_and_raised_parts_of_equations(read):
    run = "<m:r><m:t>{}</m:t></m:r>"
    inside = f"<m:e>{run.format('x')}</m:e>"
    call = f"{run.format('f')}<m:d><m:dPr/>{inside}</m:d>"
    size = f'<m:d><m:dPr><m:begChr m:val="|"/><m:endChr m:val="|"/></m:dPr>{inside}</m:d>'
    part = f"<m:f><m:num>{run.format('a')}</m:num><m:den>{run.format('b')}</m:den></m:f>"
    sums = "".join(
        f"<m:nary><m:naryPr>{sign}</m:naryPr>{inside}</m:nary>"
        for sign in ('<m:chr m:val="\u2211"/>', "")
    )
    raised = f"<m:sup>{run.format('2')}</m:sup><m:sub/>{run.format('y')}"
    equation = f"<m:oMath>{call}{size}{part}{sums}{raised}</m:oMath>"
    symbol = '<w:r><w:sym w:font="Wingdings" w:char="F04A"/></w:r>'
    text, left_out = read("a.docx", make_docx(f"<w:p>{equation}{symbol}</w:p>"))
    assert text == "f(x)|x|a/b\u2211x\u222bx^2y"
    assert left_out == {"symbol": 1}
    nested = size.replace(inside, f"<m:e><m:d>{inside}</m:d></m:e>")
    contents = paragraph(nested, part, style="TOC1")
    assert read("b.docx", make_docx(contents + paragraph(nested)))[0] == "|(x)|"


def test_odt_keeps_paragraphs_lines_lists_tables_and_notes(read):
    cell = "<table:table-cell><text:p>{}</text:p></table:table-cell>"
    row = f"<table:table-row>{cell.format('a')}{cell.format('b')}</table:table-row>"
    body = (
        "<text:table-of-content><text:p>no</text:p></text:table-of-content><text:h>Title</text:h>"
        "<text:p>One <text:span>\n of</text:span><text:line-break/>two<text:note>"
        "<text:note-citation>1</text:note-citation><text:note-body><text:p>A note</text:p>"
        "</text:note-body></text:note><text:s text:c='2'/>end</text:p>"
        "<text:list><text:list-item><text:p>x</text:p></text:list-item>"
        f"<text:list-item><text:p>y</text:p></text:list-item></text:list><table:table>{row}{row}"
        "</table:table><text:p><draw:frame><draw:image/><draw:image/></draw:frame></text:p>"
    )
    text, left_out = read("a.odt", make_odt(body))
    assert text == "Title\n\nOne of\ntwo  end\n\nA note\n\nx\ny\n\na\tb\na\tb"
    assert left_out == {"picture": 1}


def test_epub_follows_the_spine_without_contents(read):
    page = "<?xml version='1.0'?><html><head><title>T</title></head><body><h1>{}</h1></body></html>"
    pages = {
        "nav.xhtml": "<body><p>no</p></body>",
        "z.xhtml": page.format("One"),
        "a%20b.xhtml": page.format("Two"),
    }
    content = make_epub(pages, **{"OPS/a b.xhtml": page.format("Two")})
    assert read("a.epub", content) == ("One\n\nTwo", {})
    assert read("renamed.zip", content)[0] == "One\n\nTwo"


def test_html_without_navigation_and_scripts(read):
    text, left_out = read("a.html", documents.HTML)
    expected = "Head\n\nOne two,\nline.\n\na\nb\n\nc\td\ne\tf\n\n  code\n\nx\n\np\nq"
    assert text == expected
    assert left_out == {"picture": 1, "table without text": 1}
    assert read("page", documents.HTML)[0] == expected
    latin = '<meta charset="iso-8859-1"><p>caf\xe9 \x80</p>'.encode("latin-1")
    assert read("b.htm", latin)[0] == "caf\xe9 €"
    layout = "<table><tr><td>left<td>One.<br><br>Two.</table>"
    assert read("c.html", layout)[0] == "left\n\nOne.\n\nTwo."
    cells = "<table><tr><td><p>a</p><p>b</p><td>c<br>d<tr><td>e</table>"
    assert read("e.html", cells)[0] == "a\n\nb\n\nc d\n\ne"
    assert read("f.html", cells.replace("<p>b</p>", ""))[0] == "a\tc d\ne"
    assert read("d.html", "<div><div>a</div><div>b</div></div><div>c</div>")[0] == "a\nb\n\nc"


@pytest.mark.parametrize(
    ("label", "codec", "shown"),
    [
        ("gb2312", "gb18030", "朱镕基"),
        ("x-sjis", "cp932", "髙①"),
        ("Shift_JIS", "cp932", "髙①"),
        ("Windows-31J", "cp932", "髙①"),
        ("euc-kr", "cp949", "똠방"),
        ("windows-874", "cp874", "ไทย"),
        ("iso-8859-8-i", "iso-8859-8", "שלום"),
        ("iso-8859-9", "cp1254", "ş€"),
        ("no-such", "cp1252", "é€"),
        ("base64", "cp1252", "é€"),
    ],
)
def test_html_is_decoded_as_browsers_do(read, label, codec, shown):
    page = f'<meta charset="{label}"><p>{shown}</p>'.encode(codec)
    assert read("a.html", page)[0] == shown
    head = f"Subject: x\nContent-Type: text/plain; charset={label}\n\n"
    assert read("a.eml", head.encode() + shown.encode(codec))[0] == shown


def test_html_keeps_the_signs_of_equations(read):
    row = "<mrow><mi>n</mi><mo>+</mo><mn>1</mn></mrow>"
    power = f"<msup>\n <mi>c</mi>\n <mn>2</mn>\n</msup><mfrac>{row}<mn>2</mn></mfrac>"
    limits = "<munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover>"
    root = "<msqrt><msub><mi>x</mi><mi>i</mi></msub></msqrt>"
    page = f"<p>If <math>{power}</math> or <math>{limits}{root}<br></math>, <sup>2</sup> b.</p>"
    assert read("a.html", page)[0] == "If c^2n+1/2 or ∑_i^n√x_i\n, ² b."
    assert read("b.html", f"<math><mrow>{power}<p><i>a</i> <b>b</b>")[0] == "c^2n+1/2\n\na b"
    matrix = "<mtr>\n<mtd><mn>1</mn></mtd>\n<mtd><mn>2</mn></mtd></mtr>" * 2
    assert read("c.html", f"<math><mtable>{matrix}</mtable></math>")[0].split() == [*"1212"]
    words = "<mi>x</mi><mtext>if</mtext><mtext>&nbsp;</mtext><mi>y</mi>"
    assert read("d.html", f"<math>{words}</math>")[0] == "xif\u00a0y"


def test_html_without_what_a_browser_hides(read):
    for hidden in ("hidden", 'style="display: none !important"', 'style="visibility:hidden"'):
        for tag in ("p", "h1", "article", "b", "ul", "table", "div"):
            page = f"<p>a</p><{tag} {hidden}>no <i>no</i></{tag}><p>b</p>"
            assert read("a.html", page)[0] == "a\n\nb", page
        items = f"<ul><li>a<li {hidden}>no<ul><li>no</ul><li>b<li {hidden}>no</ul>c"
        assert read("a.html", items)[0] == "a\nb\n\nc"
        terms = f"<dl><dt {hidden}>no<dd>a<dd {hidden}>no</dl><p>b"
        assert read("a.html", terms)[0] == "a\n\nb"
        cells = f"<tr><td>a<td {hidden}>no<table><tr><td>no</table><td>b<td {hidden}>no</tr>"
        table = f"<table>{cells}<tr {hidden}><td>no<tr><td>c<tbody {hidden}><tr><td>no</table>d"
        assert read("a.html", table)[0] == "a\tb\nc\n\nd"
        assert read("a.html", f"<body {hidden}><p {hidden}>no<p>a")[0] == "a"
    assert read("a.html", "<dialog>no</dialog>a<dialog open>b</dialog>")[0] == "ab"
    assert read("a.html", "<ruby>\u6f22<rt>kan<rt>ji</ruby>\u5b57")[0] == "\u6f22\u5b57"


def test_html_without_marks_of_footnotes_and_page_numbers(read):
    page = (
        '<p><span class="pagenum"><a id="p3">[3]</a></span>One<a class="footnote-ref" href="#n">1'
        '</a>, <a href="#x">2</a><p>two<sup><a href="#n">1</a></sup></p><aside><p><sup>'
        '<a href="#m">1</a></sup> note <a href="#m" class="back">\u21a9\ufe0e</a></p></aside>'
    )
    assert read("a.html", page)[0] == "One, 2\n\ntwo\n\nnote"
    assert read("b.html", '<a class="fn" href="#method.new">new</a>()')[0] == "new()"
    assert read("c.html", 'a<sup>[<a class="fnref" href="#n">1</a>]</sup>')[0] == "a"
    page = '<div>a<p class="pageno">1</div>b<p class="pageno">2<p>c'
    assert read("d.html", page)[0] == "a\nb\n\nc"
    assert read("e.html", 'a<a href="#m">\u21a9\ufe0f<br></a>b')[0] == "a\nb"


def test_html_keeps_raised_and_lowered_numbers(read):
    page = (
        "<p><sup>14</sup>C, x<sup>2</sup>, 10<sup>\u22123 </sup>m, H<sub>2</sub>O, SO<sub>4</sub>"
        "<sup>2-</sup>, 1<sup>st</sup>, x<sup>n+1</sup>, a<sub><a href='#n'>1</a></sub>"
    )
    expected = "¹⁴C, x², 10⁻³ m, H₂O, SO₄²⁻, 1st, xn+1, a₁"
    assert read("a.html", page)[0] == expected
    assert read("b.html", "<p>a<p><sup>1</sup> note")[0] == "a\n\n¹ note"


def test_pdf_joins_lines_and_removes_what_repeats(read):
    prose = [
        "ple text, well-known and as wide as others",
        "are, and this one is the last.",
    ]
    verse = ["The moon rose up", "And all was still", "A lamp burned low"]

    first = "The {} line of a paragraph that is exam-"
    names = ["sixth", "seventh", "eighth", "ninth"]

    def page(number):
        lines = [(50, 700, 10, first.format(names[number]))]
        lines += [(50, 760, 10, f"A book, chapter {number // 2}"), (300, 30, 10, str(number + 7))]
        lines += [(50, 688 - 12 * i, 10, line) for i, line in enumerate(prose)]
        lines += [(50, 640 - 12 * i, 10, line) for i, line in enumerate(verse)]
        return [*lines, (50, 560, 16, f"A well-known {names[number]}")]

    text, left_out = read("a.pdf", make_pdf([*map(page, range(4)), None]))
    joined = (
        "The {0} line of a paragraph that is example text, well-known and as wide as others are, "
        "and this one is the last.\n\nThe moon rose up\nAnd all was still\nA lamp burned low"
        "\n\nA well-known {0}"
    )
    assert text == "\n\n".join(map(joined.format, names))
    assert left_out == {"page without text": 1, "header or footer line": 8}


@pytest.mark.skipif(find_spec("cryptography") is not None, reason="then pypdf reads such files")
def test_pdf_in_aes_names_the_package_that_reads_it(read):
    keys = {"O": "o" * 48, "U": "u" * 48, "OE": "o" * 32, "UE": "u" * 32, "Perms": "p" * 16}
    values = "".join(f"/{key}({value})" for key, value in keys.items())
    filters = "/CF<</StdCF<</CFM/AESV3/Length 32>>>>/StmF/StdCF/StrF/StdCF"
    trailer = f"/Encrypt<</Filter/Standard/V 5/R 6/Length 256{filters}{values}/P -4>>/ID[(a)(a)]"
    content = make_pdf([[(50, 700, 10, "x")]], trailer=trailer)
    with pytest.raises(CorpusError, match="encrypted with AES, which needs the package") as error:
        read("a.pdf", content)
    assert "pip install cryptography" in error.value.hint


def test_pdf_headers_are_those_of_three_pages_within_four(read):
    pages = [[(50, 700, 10, f"Line {chr(97 + i) * 3}")] for i in range(12)]
    for i in (0, 4, 8):  # seen from 0 and 8, two are near
        pages[i].insert(0, (50, 760, 10, "A book"))
    text, _ = read("a.pdf", make_pdf(pages))
    assert text.count("A book") == 2


def test_pdf_joins_indented_lines_only_of_hanging_paragraphs(read):
    width = "word " * 6 + "as wide as the others"
    hanging, dialogue = [], []
    for y in (700, 600, 500):
        hanging += [(50, y, 10, "-a, --all"), (80, y - 12, 10, f"Has {width}")]
        hanging += [(80, y - 24, 10, f"And {width} di-"), (80, y - 36, 10, "vided.")]
        hanging += [(50, y - 53, 10, "-b short"), (50, y - 70, 10, "-c short")]
        dialogue += [(65, y, 10, f"One {width}?"), (65, y - 12, 10, f"Two {width}")]
        dialogue += [(50, y - 24, 10, f"and {width}"), (50, y - 36, 10, "end.")]
        dialogue += [(65, y - 48, 10, f"Six {width}"), (50, y - 60, 10, "end.")]
    text, _ = read("a.pdf", make_pdf([hanging]))
    item = f"-a, --all\n\nHas {width} And {width} divided.\n\n-b short\n\n-c short"
    assert text == "\n\n".join([item] * 3)
    text, _ = read("b.pdf", make_pdf([dialogue]))
    item = f"One {width}?\n\nTwo {width} and {width} end.\n\nSix {width} end."
    assert text == "\n\n".join([item] * 3)


def test_pdf_composes_accents_but_no_keys(read):
    keys, words = r"\303C, \303X", r"f\303ete, \303Ile, \310uber"  # of the standard encoding
    text, _ = read("a.pdf", make_pdf([[(50, 700, 10, f"{keys}: {words}")]]))
    assert text == "ˆC, ˆX: fête, Île, über"


def test_pdf_keeps_items_of_lists(read):
    width = "word " * 6 + "as wide as the others"
    texts = [f"1. A {width}", f"2. See {width}", f"12. {width}", f"3. {width}", f"\xb7 {width}"]
    lines = [(50, 700 - 12 * i, 10, text) for i, text in enumerate(["x", *texts, "x", "x", "x"])]
    text, _ = read("a.pdf", make_pdf([lines]))
    numbered = [texts[0], f"{texts[1]} {texts[2]}", texts[3]]
    assert text.split("\n")[1:-2] == [*numbered, f"• {width} x"]


def test_bullets_of_symbol_fonts_are_characters(read):
    text, _ = read("a.docx", make_docx(paragraph("\uf0b7 x") + paragraph("\uf0d8 y \uf8ff")))
    assert text == "• x\n\n➢ y \uf8ff"
    assert read("a.rtf", rb"{\rtf1 \u-3913 ?\tab x}")[0] == "•\tx"
    width = "word " * 6 + "as wide as the others"
    lines = [(50, 700 - 12 * i, 10, f"\xb7 {width} {i}") for i in range(9)]
    file = make_pdf([lines]).replace(
        b"/BaseFont/Courier>>", b"/BaseFont/Courier/Encoding<</Differences[183/uniF0B7]>>>>"
    )
    assert read("a.pdf", file)[0] == "\n".join(f"• {width} {i}" for i in range(9))


def test_pdf_counts_word_spacing_in_the_width_of_text(read):
    for show in ("(They all li) Tj", "[(They) 0 ( all li)] TJ"):
        line = f") Tj Q 5 Tw (a b) Tj 29 0 Td q 1 Tw Q {show} 76 0 Td 0 Tw (ved) Tj 30 0 Td (here"
        line += ") Tj -135 -12 Td (now"
        assert read("a.pdf", make_pdf([[(50, 700, 10, line)]]))[0] == "a b They all lived here now"


def test_rtf_keeps_paragraphs_lines_and_tables(read):
    text, left_out = read("a.rtf", documents.RTF)
    assert text == "Café — one\n\nVerse\nline\n\nlink\n\na\tb\nc\td\n\nEnd."
    assert left_out == {"picture": 1, "footnote": 1}


def test_rtf_keeps_the_text_after_pictures(read):
    picture = rb"{\pict{\*\picprop{\sp{\sn a}{\sv 1}}}\pngblip\bliptag1{\*\blipuid 01}89504e47}"
    binary = rb"{\pict{\*\picprop{\sn a}}\wmetafile8\bin6 }}{\{a}"
    for control in (rb"\binfsxn7 ", rb"C:\\bin ", binary):
        text, left_out = read("a.rtf", rb"{\rtf1 a\par " + control + picture + rb"\par b\par}")
        assert text.replace("C:\\bin", "").split() == ["a", "b"]
        assert left_out == {"picture": 1 + (control == binary)}


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        (rb"\mac\ansicpg10000{\fonttbl{\f0\fcharset256 Times;}}\f0", rb"Caf\'8e"),
        (rb"\mac{\fonttbl{\f0 Times;}}\f0", rb"Caf\'8e"),
        (rb"\pc", rb"Caf\'82"),
        (rb"\ansi\ansicpg0", rb"Caf\'e9"),
        (rb"\ansi\ansicpg1252", b"Caf\xe9"),
        (rb"\ansi\ansicpg65001{\fonttbl{\f0\fcharset0 Arial;}}\f0", "Café".encode()),
    ],
)
def test_rtf_in_other_code_pages(read, head, shown):
    assert read("a.rtf", rb"{\rtf1" + head + b" " + shown + b"}")[0] == "Café"


def test_rtf_in_character_sets_of_macs(read):
    fonts = rb"\ansicpg10001{\fonttbl{\f0\fcharset78 Hira;}{\f1\fcharset89 H;}}"
    text, _ = read("a.rtf", rb"{\rtf1\mac" + fonts + rb"\f0 \'82\'b1 \f1 \'8b}")
    assert text == "こ č"


def test_rtf_leaves_out_deleted_text_and_text_boxes(read):
    box = rb"{\shp{\*\shpinst{\sp{\sn a}{\sv 2}}{\shptxt \pard box\par}}{\shprslt box}}"
    deleted = rb"{\rtlch\af0\deleted\revauthdel1 {\*\bkmkstart b}{\b gone}, too}"
    text, left_out = read("a.rtf", rb"{\rtf1 a" + box + deleted + rb"{\b b}}")
    assert (text, left_out) == ("ab", {"text box": 1})
    assert read("b.rtf", rb"{\rtf1 a\deleted b\deleted0  c\par d}")[0] == "a c\n\nd"
    assert read("c.rtf", rb"{\rtf1 C:\\deleted files}")[0] == r"C:\deleted files"


def test_rtf_is_read_in_time_whatever_its_links_are(read, monkeypatch):
    monkeypatch.setattr(convert, "SECONDS_PER_MB", 0)
    monkeypatch.setattr(convert, "SECONDS", 3)
    link = rb'{\field{\*\fldinst{HYPERLINK "http://x.y"} }{\fldrslt link}}'
    assert read("a.rtf", rb"{\rtf1 " + link * 12000 + b"}")[0] == "link" * 12000


def test_html_is_read_in_time_however_deep_its_tables_are(read, monkeypatch):
    monkeypatch.setattr(convert, "SECONDS_PER_MB", 0)
    monkeypatch.setattr(convert, "SECONDS", 3)
    cell = "<table><tr><td>" + "word " * 20
    assert read("a.html", cell * 6000)[0].split() == ["word"] * 120_000
    text = read("b.html", cell * 60 + "</table>" * 60 + "<p>after")[0]
    assert text.endswith("\n\nafter")


def test_markdown_without_front_matter_is_no_document(read):
    assert document_kind("a.md", b"# Title\n\n---\na: b\n") is None
    assert document_kind("a.md", b"---\n\nText after a rule\n") is None
    assert read("a.md", "---\r\ntitle: x\r\n---\r\n\r\n# A\r\n\r\n\r\n\r\nb") == (
        "# A\n\n\n\nb",
        {"front matter": 1},
    )
    assert read("b.md", "---\ntitle: x\nno end")[0] == "---\ntitle: x\nno end"
    scenes = "---\n\nShe said: go.\n\nHe went.\n\n---\n\nThe end."
    assert read("c.md", scenes) == (scenes, {})
    yaml = "---\n# x\na b: [c,\n]\n\nd:\n- e\n  f\n...\n"
    assert read("d.md", f"{yaml}g") == ("g", {"front matter": 1})


def test_notebook_has_cells_without_outputs(read):
    assert read("a.ipynb", documents.NOTEBOOK) == ("# A\ntext\n\nx = 1", {"cell output": 1})


def test_mail_has_bodies_without_quotes_and_signatures(read):
    assert read("a.eml", documents.MAIL) == ("Hi,\n\nyes.\n\nMine.", {})
    text = "Hi,\n\nyes.\n\nMine.<|endoftext|>Hi,\n\nFrom no.\n\nMine."
    assert read("a.mbox", documents.MBOX) == (text, {})
    assert read("inbox", documents.MBOX)[0] == text
    head = documents.MAIL[: documents.MAIL.index("Content-Type")]
    forward = f"{head}\nOwn.\n\n-----Original Message-----\nFrom: x\n\nOther."
    assert read("b.eml", forward)[0] == "Own."
    own = ["See point 3:\n\n> x\n", "Sent from my heart,\nthis is", "A:\n\n--\n\nb\n"]
    for text in own:
        expected = text.replace("> x\n", "").strip()
        assert read("g.eml", f"{head}\n{text}")[0] == expected
    for text in ("--\nB", "-- \n\nB", "--\n\n", "Sent from my phone\n\n> x"):
        assert read("g.eml", f"{head}\nA\n{text}")[0] == "A"
    for text in ("Le 3 mai 2024, B :", "On 3/5/24, B said:", "B <b@x>:", "B, 12:30:", "B wrote:"):
        assert read("g.eml", f"{head}\nA\n\n{text}\n> x\n")[0] == "A"
    quote = "<blockquote>Other<blockquote>x</blockquote></blockquote>"
    page = f"<p>Own.</p><div>On 1 May, A wrote:</div>{quote}"
    assert read("c.eml", f"{head}Content-Type: text/html\n\n{page}")[0] == "Own."
    page = '<p>Own.</p><div dir="ltr" class="gmail_signature"><div>A<br>B</div></div>'
    assert read("e.eml", f"{head}Content-Type: text/html\n\n{page}")[0] == "Own."
    flowed = f"{head}Content-Type: text/plain; format=flowed\n\na \nb\n-- \nc"
    assert read("d.eml", flowed)[0] == "a b"
    parts = ["text/plain\n\na", "message/rfc822\n\nFrom: x\n\nb", "text/plain\n\nc"]
    mixed = "".join(f"--x\nContent-Type: {part}\n" for part in parts)
    mail = f"{head}Content-Type: multipart/mixed; boundary=x\n\n{mixed}--x--"
    assert read("f.eml", mail) == ("a\n\nc", {"attachment": 1})


def test_saved_page_is_read_from_its_message(read):
    page = "--x\nContent-Type: text/html\nContent-Transfer-Encoding: quoted-printable\n\n<p>a=C3=A9"
    head = 'From: <Saved by Blink>\nContent-Type: multipart/related; boundary="x"\n\n'
    assert read("a.mhtml", f"{head}{page}<p>&gt; b\n--x--")[0] == "aé\n\n> b"


def test_mail_in_several_parts_is_whole(read):
    def mail(kind, *parts):
        bodies = "".join(f"--x\nContent-{part}\n" for part in parts)
        return f"Subject: x\nContent-Type: multipart/{kind}; boundary=x\n\n{bodies}--x--\n"

    text, html = "Type: text/plain\n\n{}", "Type: text/html\n\n<p>{}</p>"
    picture, file = "Type: image/png\n\nx", 'Disposition: inline; filename="a.txt"\n\nno'
    footer = text.format("_" * 47 + "\nA mailing list")
    parts = [text.format("One"), picture, text.format("two\n-- \nMe"), file, footer]
    assert read("a.eml", mail("mixed", *parts)) == ("One\n\ntwo", {"attachment": 2})
    assert read("b.eml", mail("alternative", text.format(" "), html.format("a")))[0] == "a"
    assert read("c.eml", mail("alternative", text.format("b"), html.format("a")))[0] == "b"
    assert read("d.eml", mail("mixed", html.format("a"), footer))[0] == "a"
    assert read("e.eml", mail("mixed", html.format("a"), text.format("b")))[0] == "a\n\nb"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('<?xml version="1.0"?>\n<FictionBook xmlns="x">', "is a FictionBook"),
        ('<?xml version="1.0"?>\n<office:document xmlns:x="y">', "in one XML file"),
        ("%!PS-Adobe-3.0\n", "is a PostScript document"),
    ],
)
def test_documents_that_look_like_text_are_named(read, content, words):
    with pytest.raises(CorpusError, match=words):
        read("a.x", content)


@pytest.mark.parametrize(
    ("name", "words"), [("a.ttml", "has subtitles in XML"), ("a.enex", "an export of Evernote")]
)
def test_xml_that_is_no_text_is_named(read, name, words):
    with pytest.raises(CorpusError, match=words):
        read(name, '<?xml version="1.0"?>\n<x/>')


def test_rolling_captions_have_each_line_once(read):
    def cue(*lines):
        return "\n".join(["1", "00:00:01,000 --> 00:00:02,000", *lines, "", ""])

    texts = ["a b", "c d", "e f", "g h"]
    rolling = "".join(cue(a, b) + cue(b, " ") for a, b in pairwise(texts))
    assert read("a.srt", rolling)[0] == "\n".join(texts)
    song = "".join(cue(text) for text in ("Oh", "Oh", "la la", "la la", "Oh", "Yes", "Yes"))
    assert read("a.srt", song)[0].split("\n") == ["Oh", "Oh", "la la", "la la", "Oh", "Yes", "Yes"]


def test_subtitles_have_no_times_and_tags(read):
    assert read("a.srt", documents.SRT) == ("One\ntwo\nx", {})
    assert read("a.vtt", documents.VTT) == ("hello you\n& all", {})
    joined = (
        "1\n0:0:1.0 --> 0:0:2.0\n7\n2\n00:00:03,000 --> 00:00:04,000\nx\n00:05.0 --> 00:06.0\ny"
    )
    assert read("b.srt", joined) == ("7\nx\ny", {})
    assert read("a.srt", documents.SRT.replace("\r", "\r\r")) == ("One\ntwo\nx", {})
    captions = "0:00:01.000,0:00:02.500\nHi, 1\nyou\n\n0:00:03.000,0:00:04.000\nx\n"
    assert read("a.sbv", captions) == ("Hi, 1\nyou\nx", {})
    assert read("a.ass", documents.ASS) == ("Hi, you\nall\ny", {"drawing": 1})
    assert read("a.ssa", documents.ASS.replace("Layer", "Marked")) == (
        "Hi, you\nall\ny",
        {"drawing": 1},
    )


def test_chats_have_one_line_per_message(read):
    text = "Anna: Hi: you\nmore\nBob: Ok"
    assert read("_chat.txt", documents.WHATSAPP) == (text, {"attachment": 2, "notice": 1})
    assert read("x.txt", documents.ANDROID) == ("Anna: Hi\n+1 23: Ok", {"attachment": 1})
    text = "Bob: see x.y\nAnna: a\nb \ufffd"
    assert read("result.json", documents.TELEGRAM) == (text, {"notice": 1, "attachment": 1})
    chats = f'"chats": {{"list": [{documents.TELEGRAM}]}}'
    left = chats.replace('"chats"', '"left_chats"')
    export = f'{{"about": "Die \\"Daten\\".", {chats}, {left}}}'
    assert read("result.json", export)[0] == f"{text}<|endoftext|>{text}"
    assert read("c.json", documents.DISCORD) == ("A: hi\nb: yo", {"notice": 1, "attachment": 1})


def test_what_people_wrote_into_a_whatsapp_chat_stays(read):
    android = "12/31/23, 11:59 PM - "
    chat = f"{android}Ann: IMG-1.jpg (file attached)\na caption\n\nwith lines\n"
    chat += f"{android}Bob: <Media omitted>\n{android}Bob: You deleted this message\nx\n"
    chat += f"{android}Cy: <Media omitted>\n"
    expected = "Ann: a caption\n\nwith lines", {"attachment": 3, "notice": 1}
    assert read("a.txt", chat) == expected
    stamp = "[01/01/24, 12:00:00 AM] "
    chat = f"{stamp}Ann: see \u200e<attached: 1.jpg>\n{stamp}Bob: a \u200eשלום\u200e b\n"
    chat += f"{stamp}Bob: ok\nfine \u200e<This message was edited>\n"
    chat += f"{stamp}Bob: \u200eThis message was deleted.\n"
    chat += f"{stamp}Ann: call\n\u200e+49 151\n\n\u200e<attached: 2.jpg>\nsoon\n"
    expected = (
        "Ann: see\nBob: a שלום b\nBob: ok\nfine\nAnn: call\n+49 151\n\nsoon",
        {"attachment": 2},
    )
    assert read("_chat.txt", chat) == expected


@pytest.mark.parametrize(
    "stamp",
    [
        "31.12.2023 klo 23.59 - ",
        "31/12/23 11:59 p. m. - ",
        "31/12/23, 11:59 PTG - ",
        "2023/12/31 \u4e0b\u534811:59 - ",
        "2023. 12. 31. \uc624\ud6c4 11:59 - ",
        "[31.12.2023 \u0433., 23:59:10] ",
        "\u0661\u200f/\u0661/\u0662\u0663\u060c \u0661\u0661:\u0665\u0669 \u0645 - ",
        "31.12.17, 23:59:10: ",
    ],
)
def test_whatsapp_has_the_dates_of_many_languages(read, stamp):
    chat = f"{stamp}encrypted\n{stamp}A: hi\nmore\n{stamp}B: yo\n"
    name = "_chat.txt" if stamp.endswith(": ") else "a.txt"
    assert read(name, chat) == ("A: hi\nmore\nB: yo", {"notice": 1})


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("a.txt", b"[2024-01-01 12:00:00] INFO: x: y\n" * 9),
        ("a.txt", b"12/31/2023 23:59:59 - INFO: x\n" * 9),
        ("a.txt", b"12.31.2023, 23:59: Meeting: x\n" * 9),
        ("a.txt", b"2024-01-01 12:00 UTC - server: x\n" * 9),
        ("a.txt", b"<!DOCTYPE html><html>"),
        ("a.json", b'{"messages": [{"role": "user", "content": "x"}]}'),
        ("a.json", b'[{"name": "x", "type": "y"}]'),
        ("a.json", b'{"about": "Tales", "stories": [{"title": "x"}]}'),
        ("a.zip", b"PK\x03\x04 a.txt"),
        ("a.py", b"---\na: b"),
        ("-", b"From here on, it is a text.\nTo: the reader\n"),
        ("a.doc", b"plain text"),
        ("README", b""),
    ],
)
def test_other_text_is_no_document(name, head):
    assert document_kind(name, head) is None


def test_archive_is_a_document_by_its_first_members():
    word, other = {"word/document.xml": ""}, {"xl/a.xml": "", "word/a": ""}
    for files, kind in (
        ({"_rels/.rels": ""} | word, "docx"),
        ({"docProps/app.xml": ""} | other, "sheet"),
        (word | {"[Content_Types].xml": ""}, "docx"),
        ({"password/a.txt": "x", "b/word/c": "xl/"}, None),
        ({"word/": "", "word/a.txt": "application/epub+zip"}, None),
        ({"a.txt": "", "mimetype": "application/epub+zip"} | word, None),
    ):
        assert document_kind("a.zip", documents.make_zip(files)) == kind


def test_text_in_another_encoding_needs_its_name(read):
    content = documents.SRT.replace("One", "é").encode("cp1252")
    with pytest.raises(CorpusError, match="is not UTF-8") as error:
        read("a.srt", content)
    assert "--encoding" in error.value.hint
    assert read("a.srt", content, encoding="cp1252")[0] == "é\ntwo\nx"
    assert read("a.html", "<p>Größe".encode("utf-32"))[0] == "Größe"
    assert read("a.srt", documents.SRT.encode("utf-16"))[0] == "One\ntwo\nx"


def test_open_file_is_read_like_a_path(tmp_path):
    from tgen.storage import files

    spool = files.open_temporary(None)
    spool.append(make_docx(paragraph("text")))
    converted = finish(convert_document(spool, "docx", name="-"))
    assert converted.spool.read(0, 100) == b"text"
    assert Path(tmp_path).is_dir()
