"""The static files of the live page, which is at / for browsers: no key, no other origin.

The page shares the style sheet and the scripts of `tgen inspect --html`.
"""

from functools import cache
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from tgen.drawing import page as drawn
from tgen.serve import page as live
from tgen.serve.http_error import HttpError
from tgen.storage import files

PREFIX = "/tgen/page/"
_INDEX = "index.html"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_FILES = {
    path.name: path
    for package in (drawn, live)
    for path in Path(str(package.__file__)).parent.iterdir()
    if path.suffix in _TYPES
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # another version of tgen may run at this address tomorrow
    "Vary": "Accept",
}


def is_static(scope: Scope) -> bool:
    """Return whether a request is for one of the files, which need no key."""
    return scope["path"].startswith(PREFIX) or (scope["path"] == "/" and wants_page(scope))


def wants_page(scope: Scope) -> bool:
    """Return whether a client accepts HTML, as browsers do."""
    return "text/html" in Headers(scope=scope).get("accept", "")


async def get_page(request: Request) -> Response:
    """Return one of the files, by default the page itself; raises HttpError."""
    name = request.path_params.get("name", _INDEX)
    if name not in _FILES:
        raise HttpError(404, f"GET {request.url.path[:100]}: not found")
    path = _FILES[name]
    kind = f"{_TYPES[path.suffix]}; charset=utf-8"
    return Response(_read(path), headers=_HEADERS, media_type=kind)


_read = cache(files.read)
