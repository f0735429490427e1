"""Access control of a run's endpoint: checks the Host header and the token of every request."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from monitoring.http.addresses import is_loopback, without_port
from monitoring.http.endpoint import Endpoint

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ALWAYS_OPEN = frozenset(("/healthz",))
OPEN_ON_LOOPBACK = frozenset(("/metrics", "/sd"))
_NOT_HERE = "403: this run answers to loopback names only, such as 127.0.0.1 or localhost.\n"
_NO_TOKEN = "401: this asks for the run's token. Open the page's address in the run's endpoints.json.\n"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the first URL contains the token
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
}


class Guard:
    """Middleware for every route: rejects requests without access, and adds security headers."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        # Browsers send a cookie to all ports of a host, and another run may use another port.
        self._cookie = f"parallel3d_{endpoint.port}"

    def install(self, app: web.Application) -> None:
        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            return self._refusal(request) or await handler(request)

        async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
            for name, value in _HEADERS.items():
                response.headers.setdefault(name, value)

        app.middlewares.append(check)
        app.on_response_prepare.append(add_headers)

    def _refusal(self, request: web.Request) -> web.Response | None:
        """The response to send instead; None if the request may pass."""
        # DNS rebinding: a foreign page can make its own name resolve to loopback and read our answers. Beyond loopback,
        # everything except /healthz needs the token, which such a page does not have.
        if self._endpoint.is_loopback and not is_loopback(without_port(request.headers.get(hdrs.HOST, ""))):
            return web.Response(status=403, text=_NOT_HERE)
        if request.path in ALWAYS_OPEN or (self._endpoint.is_loopback and request.path in OPEN_ON_LOOPBACK):
            return None
        if self._fits(request.query.get("token", "")) and request.method in (hdrs.METH_GET, hdrs.METH_HEAD):
            return self._remember(request)
        scheme, _, bearer = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        if scheme.lower() == "bearer" and self._fits(bearer.strip()):
            return None
        if self._fits(request.cookies.get(self._cookie, "")):
            return None
        return web.Response(status=401, text=_NO_TOKEN, headers={hdrs.WWW_AUTHENTICATE: "Bearer"})

    def _fits(self, given: str) -> bool:
        """Compares in constant time, so that timing reveals nothing about the token."""
        return hmac.compare_digest(given.encode(errors="replace"), self._endpoint.token.encode())

    def _remember(self, request: web.Request) -> web.Response:
        """Move the token into a cookie, so that it does not stay in the URL or the browser's history."""
        others = [(name, value) for name, value in request.query.items() if name != "token"]
        # Exactly one leading slash: two would redirect to another host.
        address = request.rel_url.with_path("/" + request.path.lstrip("/")).with_query(others)
        response = web.Response(status=303, headers={hdrs.LOCATION: str(address)})
        response.set_cookie(
            self._cookie,
            self._endpoint.token,
            httponly=True,
            samesite="Strict",
            secure=self._endpoint.tls is not None,
        )
        return response
