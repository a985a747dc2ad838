"""The body of a request, which may be compressed, within its limits of size and time."""

import asyncio
import zlib

from starlette.requests import Request

from tgen.serve.http_error import HttpError, bad_request

_GZIP = 31  # zlib's number for gzip with the largest window
_ENCODINGS = ("gzip", "x-gzip")


async def read_body(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """Return the body, expanded if it is compressed; raise HttpError if it is too large, as sent or
    expanded, too slow or damaged."""
    too_large = HttpError(413, f"the body is too large (limit {max_bytes:,} bytes)")
    encoding = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if encoding not in ("", "identity", *_ENCODINGS):
        message = f"the Content-Encoding {encoding[:60]!r} is not supported, only gzip"
        raise HttpError(415, message, headers={"Accept-Encoding": "gzip"})
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} seconds"
        raise HttpError(408, message, headers={"Connection": "close"}) from None
    if encoding not in _ENCODINGS:
        return bytes(body)
    expanded = await asyncio.to_thread(_expand, body, max_bytes)
    if len(expanded) > max_bytes:
        raise too_large
    return expanded


def _expand(body: bytearray, max_bytes: int) -> bytes:
    """Return at most one byte more than `max_bytes`; raise HttpError for anything but one whole
    gzip file."""
    inflater = zlib.decompressobj(_GZIP)
    try:
        expanded = inflater.decompress(body, max_bytes + 1)
    except zlib.error:
        raise bad_request("the body is not in the format gzip") from None
    if len(expanded) <= max_bytes and not inflater.eof:
        raise bad_request("the body is the beginning of a gzip file")
    if inflater.unused_data:
        raise bad_request("the body has more than one gzip file")
    return expanded
