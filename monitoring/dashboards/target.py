"""Where Prometheus finds a run's `/metrics`, and what it has to show there."""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

DEFAULT_PORT = 9847
"""Free in Prometheus' list of ports that exporters take."""
_PORTS = range(1, 65536)


@dataclass(frozen=True, slots=True)
class Target:
    """The run's one endpoint."""

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    tls: bool = False
    token_file: str | None = None
    """As Prometheus finds it; relative to its configuration file."""
    ca_file: str | None = None
    """The root that the endpoint's certificate leads to, in PEM. None: those that the system trusts."""

    @staticmethod
    def parse(text: str, *, token_file: str | None = None, ca_file: str | None = None) -> Target:
        """`host:port`, or a URL such as `https://node1:9847`. Raises ValueError with what is wrong and a remedy."""
        parts = urlsplit(text if "//" in text else f"http://{text}")
        if parts.scheme not in ("http", "https"):
            raise ValueError(f"{text!r}: Prometheus asks by http or https, not by {parts.scheme}.")
        if parts.path not in ("", "/", "/metrics") or parts.query or parts.fragment or parts.username is not None:
            raise ValueError(f"{text!r}: give host and port only; a run's path is always /metrics.")
        host, port = parts.hostname, _port(parts.netloc)
        if not host or port is None:
            raise ValueError(f"{text!r}: give host and port, such as 127.0.0.1:{DEFAULT_PORT}.")
        return Target(host, port, parts.scheme == "https", token_file, ca_file)

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}"

    @property
    def is_local(self) -> bool:
        """Whether the run listens on loopback only."""
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def _port(place: str) -> int | None:
    """urlsplit raises for some wrong ports and takes 0; here both are None."""
    text = place.rpartition("]")[2].rpartition(":")[2]
    return int(text) if text.isascii() and text.isdigit() and int(text) in _PORTS else None
