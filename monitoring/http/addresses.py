"""Addresses that are listened on: which ones only this host reaches, and how they are written in a URL."""

from __future__ import annotations

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether nobody but this host can reach it. A name other than localhost might be anybody's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_every_address(host: str) -> bool:
    """Such as 0.0.0.0, which is listened on but never connected to."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def host_and_port(host: str, port: int) -> str:
    """As a URL has it, by the name under which others know this host where it listens on all addresses."""
    name = socket.gethostname() if is_every_address(host) else host
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def without_port(authority: str) -> str:
    """The host of a request's Host header."""
    if authority.startswith("["):
        return authority[1:].partition("]")[0]
    return authority.partition(":")[0]
