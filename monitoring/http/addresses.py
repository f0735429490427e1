"""Listening addresses: loopback or not, and how to write them in a URL."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether only this host can reach it. False for every name except localhost: names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_every_address(host: str) -> bool:
    """Whether it is a wildcard such as 0.0.0.0, which one can listen on but not connect to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """`host:port` for a URL; a wildcard address becomes this host's name."""
    name = socket.gethostname() if is_every_address(host) else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def without_port(authority: str) -> str:
    """The host in a request's Host header."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
