"""A run's HTTP endpoint: a listening socket, the token that requests need, and TLS."""

from __future__ import annotations

import secrets
import socket
import ssl
from dataclasses import dataclass, field
from urllib.parse import quote

from monitoring.http.addresses import host_and_port, is_every_address, is_loopback
from monitoring.http.tokens import UnusableToken, read_token

_BACKLOG = 256  # more than the scrapers of a run, so that none is refused while the thread waits for a core


def new_token() -> str:
    return secrets.token_urlsafe(24)


def read_bearer_token(path: str) -> str:
    """Read a token that HTTP headers and URLs can carry. Raises OSError and UnusableToken."""
    try:
        token = read_token(path).decode("ascii")
    except UnicodeDecodeError:
        raise UnusableToken("a token is printable ASCII.") from None
    if not token.isprintable() or " " in token:
        raise UnusableToken("a token is one line of printable characters without spaces.")
    return token


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Raises OSError (SSLError is a subclass) if certificate and key can't be read or don't match."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key, password=lambda: "")  # otherwise OpenSSL prompts at the terminal
    return context


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Opened before any rank starts: the address is known early, and a port in use is reported early."""

    listener: socket.socket
    host: str
    port: int
    token: str = field(default_factory=new_token, repr=False)
    tls: ssl.SSLContext | None = None

    @staticmethod
    def open(host: str, port: int | None, token: str | None = None, tls: ssl.SSLContext | None = None) -> Endpoint:
        """port: None picks a free one. Raises OSError if it can't listen there."""
        # Numeric: where localhost is also an IPv6 address, another process could listen on that one.
        numeric = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
        # `::` accepts IPv4 too: clients use this host's name, which may resolve to either kind.
        both = family == socket.AF_INET6 and is_every_address(numeric) and socket.has_dualstack_ipv6()
        listener = socket.create_server((numeric, port or 0), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
        return Endpoint(listener, numeric, listener.getsockname()[1], token or new_token(), tls)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    @property
    def authority(self) -> str:
        """Host and port for clients."""
        return host_and_port(self.host, self.port)

    def url(self, path: str, with_token: bool = False) -> str:
        token = f"?token={quote(self.token, safe='')}" if with_token else ""
        return f"{self.scheme}://{self.authority}{path}{token}"

    def close(self) -> None:
        self.listener.close()
