"""Who may see the page: a browser on this machine, or at the end of a tunnel to it, that was given the token."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    from flask import Flask, Response
    from flask.testing import FlaskClient

HOST = "127.0.0.1"
LOCAL_HOSTS = frozenset({HOST, "localhost", "::1"})
TOKEN = "token"
_READING = frozenset({"GET", "HEAD"})
_WRITING = frozenset({"POST"})
_FROM_US = frozenset({"same-origin", "none"})


def _secret() -> str:
    return secrets.token_urlsafe(32)


@dataclass(slots=True)
class Guard:
    """Refuses every request, of pages, assets and callbacks alike, that does not show it comes from who was let in.

    `token`: what the address must hold once; a cookie of the same secret, that no script can read and no other site can
    have sent, stands for it from then on. `scripts`: hashes of the only inline scripts that may run.
    """

    token: str = field(default_factory=_secret)
    # Cookies do not tell ports apart: two pages on one machine must not overwrite each other's.
    cookie: str = field(default_factory=lambda: f"statsbridge-{secrets.token_hex(4)}")
    scripts: Sequence[str] = ()

    def install(self, server: Flask) -> None:
        """Put the guard before and behind all that `server` does. To be called before anything else is added to it."""
        server.before_request(self.refusal)
        server.after_request(self.add_headers)

    def refusal(self) -> Response | tuple[str, int, dict[str, str]] | None:
        """The answer to the request in progress where it is not to be served; None where it is."""
        from flask import request

        plain = {"Content-Type": "text/plain; charset=utf-8"}
        if _host_of(f"//{request.host}") not in LOCAL_HOSTS:
            return "statsbridge: this page is served to 127.0.0.1 and localhost only\n", 403, plain
        if request.method not in _READING | _WRITING:
            return "statsbridge: only GET and POST\n", 405, plain
        origin = request.headers.get("Origin")
        foreign = origin is not None and origin != f"{request.scheme}://{request.host}"
        if request.method in _WRITING:
            # A browser says with each POST where it comes from.
            foreign |= origin is None or request.headers.get("Sec-Fetch-Site", "none") not in _FROM_US
        if foreign:
            return "statsbridge: another site's page asked for this\n", 403, plain
        given = request.args.getlist(TOKEN)
        if given and self._is_token(given[0]) and request.method in _READING:
            return self._let_in()
        if given or not self._is_token(request.cookies.get(self.cookie, "")):
            return "statsbridge: open the whole address that `statsbridge view` printed, with its token\n", 403, plain
        return None

    def let_in(self, client: FlaskClient) -> FlaskClient:
        """A client of our own, with the cookie."""
        client.set_cookie(self.cookie, self.token, domain=HOST)
        return client

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def _let_in(self) -> Response:
        """Set the cookie, and load the page again without the token: it then stays in no history and no screenshot.

        No redirect by the server: after a link from another site it would be sent without the cookie.
        """
        from flask import Response, request
        from markupsafe import escape

        rest = [(name, value) for name, value in request.args.items(multi=True) if name != TOKEN]
        target = f"/?{urlencode(rest)}" if rest else "/"
        page = (
            f'<!doctype html><meta http-equiv="refresh" content="0;url={escape(target)}"><title>statsbridge</title>'
            '<link rel="icon" href="data:,">'
        )
        response = Response(page, mimetype="text/html")
        response.set_cookie(self.cookie, self.token, httponly=True, samesite="Strict")
        return response

    def add_headers(self, response: Response) -> Response:
        """What a browser must not do with any answer of ours."""
        scripts = " ".join(("'self'", *self.scripts))
        response.headers["Content-Security-Policy"] = (
            # Plotly and Mantine write style attributes; nothing of theirs needs eval.
            f"default-src 'none'; script-src {scripts}; style-src 'self' 'unsafe-inline'; connect-src 'self'; "
            "img-src 'self' data: blob:; font-src 'self' data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
        )
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        if response.mimetype in {"application/json", "text/html"}:
            response.headers["Cache-Control"] = "no-store"
        return response


def _host_of(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
