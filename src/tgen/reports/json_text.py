"""Conversion of text, which need not be UTF-8, to JSON values."""

import base64


def json_text(data: bytes, name: str = "text") -> dict[str, str]:
    """Return {name: text}, and {name_bytes: base64} too where the bytes are not valid UTF-8.

    For `text` that second key is `bytes`.
    """
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        bytes_name = "bytes" if name == "text" else f"{name}_bytes"
        encoded = base64.b64encode(data).decode()
        return {name: data.decode(errors="replace"), bytes_name: encoded}
