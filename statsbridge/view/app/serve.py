"""The page's server: on 127.0.0.1 only, on a free port."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ...errors import ConfigError
from .security import HOST

if TYPE_CHECKING:
    from werkzeug.serving import BaseWSGIServer

    from .page import Page


def make_server(page: Page, port: int = 0) -> BaseWSGIServer:
    """A server of `page`, bound but not serving yet; `serve_forever()` runs it, `shutdown()` from a thread ends it.

    `port`: 0 for a free one. Raises ConfigError where it cannot be had.
    """
    from werkzeug.serving import WSGIRequestHandler
    from werkzeug.serving import make_server as bind

    class Quiet(WSGIRequestHandler):
        # One connection for many answers.
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:
            pass

    # Werkzeug ends the process itself where a port is taken.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"port {port} cannot be had: {reason}. Leave out --port for a free one") from error
    return bind(HOST, port, page.server, threaded=True, request_handler=Quiet)


def address(page: Page, server: BaseWSGIServer, run: str = "") -> str:
    """What to open in a browser: the address with its token."""
    where = f"&run={quote(run)}" if run else ""
    return f"http://{HOST}:{server.server_port}/?token={page.guard.token}{where}"
