"""Kinds of files without text, known by their first bytes."""

from tgen.documents.kinds import document_kind

_MAGIC = (  # position, bytes, kind
    (0, b"\x89PNG", "a PNG picture"),
    (0, b"\xff\xd8\xff", "a JPEG picture"),
    (0, b"GIF8", "a GIF picture"),
    (8, b"WEBP", "a WebP picture"),
    (0, b"II*\0", "a TIFF picture"),
    (0, b"MM\0*", "a TIFF picture"),
    (0, b"8BPS", "a Photoshop picture"),
    (8, b"WAVE", "a WAV recording"),
    (0, b"ID3", "an MP3 recording"),
    (0, b"\xff\xfb", "an MP3 recording"),
    (0, b"fLaC", "a FLAC recording"),
    (0, b"OggS", "an Ogg recording"),
    (4, b"ftyp", "an MP4 video or picture"),
    (0, b"\x1aE\xdf\xa3", "a Matroska video"),
    (8, b"AVI ", "an AVI video"),
    (0, b"\x7fELF", "an executable"),
    (0, b"MZ\x90", "a Windows executable"),
    (0, b"\xcf\xfa\xed\xfe", "a macOS executable"),
    (0, b"\xca\xfe\xba\xbe", "a Java class or macOS executable"),
    (0, b"\0asm", "a WebAssembly program"),
    (0, b"!<arch>\n", "a Debian package or library"),
    (0, b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Microsoft Office document (.doc, .xls, .ppt)"),
    (0, b"%PDF-", "a PDF"),
    (0, b"{\\rtf", "an RTF document"),
    (0, b"SQLite format 3\0", "an SQLite database"),
    (0, b"\x89HDF\r\n", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"ARROW1", "an Arrow table"),
    (0, b"7z\xbc\xaf'\x1c", "a 7-Zip archive"),
    (0, b"Rar!\x1a\x07", "a RAR archive"),
    (0, b'\x04"M\x18', "an LZ4 file"),
    (0, b"\x1f\x9d", "a file of compress (.Z)"),
    (0, b"LZIP", "an lzip file"),
    (0, b"MSCF", "a Windows cabinet"),
    (0, b"wOFF", "a font"),
    (0, b"wOF2", "a font"),
    (0, b"OTTO", "a font"),
    (0, b"\0\1\0\0\0", "a font"),
    *((0, b"\x80" + bytes([version]), "a Python pickle") for version in range(2, 6)),
)
_OFFICE = "a Microsoft Office document (.docx, .xlsx, .pptx)"
_ZIPPED = (  # name of a ZIP file's first member, kind
    (b"[Content_Types].xml", _OFFICE),
    (b"_rels/.rels", _OFFICE),
    (b"mimetypeapplication/epub", "an EPUB book"),
    (b"mimetypeapplication/vnd.oasis", "an OpenDocument file (.odt, .ods, .odp)"),
)
GGUF, SAFETENSORS = "a GGUF model", "a safetensors file"


def binary_kind(head: bytes, n_bytes: int) -> str | None:
    """Return what a file of `n_bytes` with these first bytes is, or None if it may be text."""
    if head.startswith(b"GGUF") and b"\0" in head[:16]:
        return GGUF
    if head[8:9] == b"{" and b"\0" in head[:8] and int.from_bytes(head[:8], "little") < n_bytes:
        return SAFETENSORS
    if head.startswith(b"PK\x03\x04"):
        first = head[30:230]
        if b"/data.pkl" in first:
            return "PyTorch weights"
        is_office = document_kind("", head) in ("docx", "sheet", "slides")
        by_name = (kind for start, kind in _ZIPPED if first.startswith(start))
        return next(by_name, _OFFICE if is_office else None)
    is_binary = b"\0" in head
    for position, magic, kind in _MAGIC:
        if head.startswith(magic, position) and (is_binary or not _is_word(magic)):
            return kind
    return None


def _is_word(magic: bytes) -> bool:
    """Return whether a text may start with these bytes."""
    return magic.isascii() and magic.rstrip().isalnum()
