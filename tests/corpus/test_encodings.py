"""Texts in other encodings and with other line breaks: read right, or with an honest note."""

import pytest

from tgen import corpus
from tgen.config.input_files import Reading
from tgen.corpus import encodings
from tgen.corpus.encodings import Changes, decode
from tgen.corpus.open_sources import ReadingReport, open_sources
from tgen.corpus.sources import Source
from tgen.corpus.steps import finish
from tgen.errors import CorpusError, UsageError

GERMAN = """Der Müller hört früh die Vögel über dem Fluß und öffnet das Tor.
Zwölf Bäume stehen schräg am Ufer, größer als die Häuser der Straße.
Später kommt ein Mädchen mit Körben voll süßer Äpfel und Nüsse.
"""
RUSSIAN = """Мельник рано слышит птиц над рекой и открывает ворота.
Двенадцать деревьев стоят на берегу, они выше домов на улице.
Потом приходит девочка с корзинами сладких яблок и орехов.
"""
JAPANESE = """粉屋は朝早く川の上の鳥の声を聞いて、門を開けます。
十二本の木が岸に立っていて、通りの家よりも高いです。
それから女の子が甘いりんごの籠を持ってやって来ました。
"""
CODECS = {
    GERMAN: ["cp1252", "iso-8859-15", "mac-roman", "cp850"],
    RUSSIAN: ["cp1251", "koi8-r", "mac-cyrillic", "cp866"],
    JAPANESE: ["shift_jis", "euc-jp", "iso2022_jp"],
}
UNICODE = ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]


def find_encoding(source, **options):
    return finish(encodings.find_encoding(source, **options))


def read(path, content, **options):
    path.write_bytes(content)
    result = corpus.read([str(path)], reading=Reading(**options))
    return b"".join(part[:] for document in result.documents for part in document), result.notes


@pytest.mark.parametrize("text", [GERMAN, RUSSIAN, JAPANESE], ids=["de", "ru", "ja"])
def test_encoding_is_detected_and_named(text, tmp_path):
    for codec in CODECS[text] + UNICODE:
        content, [note] = read(tmp_path / "text", text.encode(codec))
        assert content.decode() == text, codec
        assert note.startswith("1 text, ")


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_one_line_of_japanese_needs_no_byte_order_mark(tmp_path, codec):
    for text in (
        JAPANESE.replace("\n", ""),
        JAPANESE.replace("\n", "") + "\n",
        "カタカナの文\u3000です",
    ):
        content, notes = read(tmp_path / "text", text.encode(codec))
        assert content.decode() == text
        assert notes == [f"1 text, {codec}, by its form"]


def test_plain_text_is_the_file_itself(tmp_path):
    for content in (GERMAN.encode(), b"plain\n\tascii \x1b[1mbold\x1b[0m a lone \r here\n"):
        (tmp_path / "text").write_bytes(content)
        source = Source("text", tmp_path / "text")
        *_, opened = open_sources([str(tmp_path / "text")], ReadingReport(), reading=Reading())
        assert isinstance(opened, Source)
        assert opened.path == tmp_path / "text"
        assert find_encoding(source).is_plain
        assert read(tmp_path / "text", content) == (content, [])


def test_korean_in_seven_bits_is_recognized(tmp_path):
    words = "방앗간 주인은 새소리를 듣고 문을 엽니다.\n" * 3
    text, notes = read(tmp_path / "text", words.encode("iso2022_kr"))
    assert (text.decode(), notes) == (words, ["1 text, iso2022_kr, by its form"])


def test_uncertain_bytes_stay_with_a_note(tmp_path):
    for content in (b"caf\xe9", b"x" * 3000 + b"\xe9" + b"y" * 3000, "é".encode() * 500 + b"\xff"):
        text, [note] = read(tmp_path / "text", content)
        assert text == content
        assert "are not UTF-8" in note
        assert "--encoding NAME" in note


def test_encoding_of_the_user_is_for_texts_that_are_not_utf8(tmp_path):
    text, notes = read(tmp_path / "a", b"caf\xe9\x81", encoding="cp437")
    assert (text.decode(), notes) == (
        "caféü".replace("é", "Θ"),
        ["1 text, cp437, as --encoding says"],
    )
    text, notes = read(tmp_path / "a", "café".encode(), encoding="cp437")
    assert (text.decode(), notes) == ("café", ["1 text, utf-8, although --encoding is cp437"])
    for name in ("utf-16-le", "utf-32-be"):
        text, notes = read(tmp_path / "a", b"plain words, even", encoding=name)
        assert text == b"plain words, even"
        assert notes == [f"1 text, utf-8, although --encoding is {name}"]
        for words in ("plain words", "あおい"):
            assert read(tmp_path / "a", words.encode(name), encoding=name)[0].decode() == words
    text, notes = read(tmp_path / "a", b"x" * 200 + b"\x81\xe9", encoding="cp1252")
    assert text.decode() == "x" * 200 + "\ufffdé"
    assert "1 character of" in notes[-1] or "1 character of" in notes[0]
    with pytest.raises(CorpusError, match="cannot be read as ascii"):
        read(tmp_path / "a", b"caf\xe9", encoding="ascii")
    for name in ("no-such", "rot13", "idna", "a\0b"):
        with pytest.raises(UsageError, match="encoding"):
            Reading(encoding=name)


@pytest.mark.parametrize("name", ["utf-16", "U16", "utf-32"])
@pytest.mark.parametrize("text", [GERMAN, RUSSIAN, JAPANESE], ids=["de", "ru", "ja"])
def test_byte_order_is_found_if_the_user_does_not_name_it(tmp_path, text, name):
    for order in ("le", "be"):
        codec = f"utf-{name[-2:]}-{order}"
        content, notes = read(tmp_path / "text", text.encode(codec), encoding=name)
        assert (content.decode(), notes) == (text, [f"1 text, {codec}, as --encoding says"])
    plain, notes = read(tmp_path / "text", b"plain ASCII", encoding=name)
    assert (plain, notes) == (b"plain ASCII", [f"1 text, utf-8, although --encoding is {name}"])


@pytest.mark.parametrize("codec", ["utf-16", "utf-32"])
def test_bytes_that_a_marked_encoding_lacks_are_replaced_and_counted(tmp_path, codec):
    content, notes = read(tmp_path / "text", GERMAN.encode(codec) + b"\n")
    assert content.decode() == GERMAN + "\ufffd"
    assert any("1 character of" in note for note in notes)
    damaged = GERMAN.encode(codec) + b"\xff\xdf" * 99 + b"\n"
    with pytest.raises(CorpusError, match="cannot be read as utf-"):
        read(tmp_path / "text", damaged)


@pytest.mark.parametrize("codec", ["utf-8-sig", "utf-16", "utf-32"])
def test_replacement_characters_of_the_text_itself_are_not_counted(tmp_path, codec):
    text = "\ufffd \ufffd \ufdd0\n" * 9
    content, [note] = read(tmp_path / "text", text.encode(codec))
    assert content.decode() == text
    assert note.startswith("1 text, ")


def test_line_breaks_become_lf(tmp_path):
    for content in (b"one\r\ntwo\r\n\r\nthree \r four\r\n", b"one\rtwo\r\rthree\r"):
        text, [note] = read(tmp_path / "a", content)
        is_old_mac = b"\n" not in content
        assert text == content.replace(b"\r" if is_old_mac else b"\r\n", b"\n")
        assert note == "1 text with CRLF or CR at the end of lines, read as LF"
    assert read(tmp_path / "a", content, read_as="bytes") == (content, [])


def test_byte_order_marks_of_joined_files_are_left_out(tmp_path):
    marked = GERMAN.encode("utf-8-sig")
    note = "1 text with byte order marks inside, left out"
    assert read(tmp_path / "a", b"a\n" + marked * 2) == (f"a\n{GERMAN * 2}".encode(), [note])
    wide = GERMAN.encode("utf-16")
    assert read(tmp_path / "a", wide * 2)[0] == (GERMAN * 2).encode()


def test_blocks_change_nothing(monkeypatch, tmp_path):
    contents = [
        GERMAN.encode(),
        GERMAN.replace("\n", "\r\n").encode("utf-16"),
        b"\xef\xbb\xbfa\r\nb",
    ]
    contents += [JAPANESE.encode("iso2022_jp"), b"a\r\r\nb\rc", b"a\nb\r\xef\xbb\xbf\nc\xef\xbb"]
    whole = [read(tmp_path / "a", content) for content in contents]
    for size in (5, 7):
        monkeypatch.setattr(encodings, "_BLOCK", size)
        assert [read(tmp_path / "a", content) for content in contents] == whole


def test_bytes_that_are_not_utf8_are_noted_anywhere(monkeypatch):
    for size in (7, 100, 1000):
        monkeypatch.setattr(encodings, "_BLOCK", size)
        for content in ("é" * 50 + "x" * 150, "x" * 99 + "日本" + "x" * 150):
            whole = content.encode()
            assert find_encoding(Source("a", whole)) == (*encodings.Encoding()[:5], False)
            assert find_encoding(Source("a", whole + b"\xff" + b"x" * 49)).share
            assert find_encoding(Source("a", whole + b"\xe6")).share


def test_utf8_before_another_encoding_is_not_detected(tmp_path):
    content = ("Un café. " + "plain words " * 99).encode() + (GERMAN * 9).encode("cp1252")
    text, [note] = read(tmp_path / "a", content)
    assert text == content
    assert "are not UTF-8" in note


def test_earlier_detection_counts_less_than_the_user_and_utf8():
    source = Source("a", GERMAN.encode("cp1252"))
    assert find_encoding(source, known="cp850").codec == "cp850"
    assert find_encoding(source, known="cp850", given="mac-roman").codec == "mac-roman"
    assert find_encoding(Source("a", GERMAN.encode()), known="cp850").is_plain


def test_user_says_utf8(tmp_path):
    for name in ("utf8", "utf-8-sig"):
        assert read(tmp_path / "a", "café".encode(), encoding=name) == ("café".encode(), [])
        text, [note] = read(tmp_path / "a", GERMAN.encode("cp1252"), encoding=name)
        assert text == GERMAN.encode("cp1252")
        assert "% of the bytes" in note


def test_wrong_detection_ends_in_a_note(monkeypatch, tmp_path):
    content = GERMAN.encode("cp1252") + b"\x81" * 3  # not in cp1252
    monkeypatch.setattr(encodings, "_SAMPLE", len(GERMAN))
    text, [note] = read(tmp_path / "a", content)
    assert text == content
    assert "perhaps cp1252" in note
    with pytest.raises(UnicodeDecodeError):
        list(decode(Source("a", content), encodings.Encoding("cp1252"), Changes()))
