"""Where a run is served, as its configuration says: the endpoint, and what `endpoints.json` tells of it."""

from __future__ import annotations

import errno
import os
import ssl
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from monitoring.http.endpoint import Endpoint, read_bearer_token, tls_context
from monitoring.http.tokens import UnusableToken
from parallel3d.config import RunConfig
from parallel3d.config.errors import ConfigProblems, problem_of_key
from parallel3d.planning.preflight import Locate, nowhere


def open_endpoint(config: RunConfig, locate: Locate = nowhere) -> Endpoint | None:
    """The endpoint, which listens already; None where the run is not watched, or no port is free for it.

    Raises ConfigError, which names the key at fault.
    """
    if not config.monitoring.enabled:
        return None
    try:
        return _open(config)
    except ConfigProblems as error:
        raise ConfigProblems([replace(each, place=locate(each.path)) for each in error.problems]) from error


def _open(config: RunConfig) -> Endpoint | None:
    watched = config.monitoring
    token, tls = _token(watched.token_file), _tls(watched.tls_certificate, watched.tls_key)
    try:
        return Endpoint.open(watched.host, watched.port, token, tls)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)  # its own text tells the address again
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "Give one of this host's, or 127.0.0.1."
            raise problem_of_key("monitoring.host", watched.host, "this host has no such address.", remedy) from error
        if watched.port is not None:
            message = f"{watched.host} can't be listened on at this port: {said}."
            raise problem_of_key(
                "monitoring.port", watched.port, message, "Give another, or null for a free one."
            ) from error
        print(f"parallel3d: the run has no /metrics and no page: {said}", file=sys.stderr)
        return None


def _token(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return read_bearer_token(path)
    except UnusableToken as error:
        message, remedy = str(error), error.remedy
    except OSError as error:
        message, remedy = f"it can't be read: {error.strerror}.", "Give a file with the token in it."
    raise problem_of_key("monitoring.token_file", path, message, remedy)


def _tls(certificate: str | None, key: str | None) -> ssl.SSLContext | None:
    if certificate is None or key is None:
        return None
    for name, path in (("tls_certificate", certificate), ("tls_key", key)):
        try:
            with open(path, "rb"):
                pass
        except OSError as error:
            message = f"it can't be read: {error.strerror}."
            raise problem_of_key(f"monitoring.{name}", path, message, "Give a file in PEM.") from error
    try:
        return tls_context(certificate, key)
    except (OSError, ValueError) as error:
        message = f"with tls_key {key} it is no pair that TLS can use: {error}."
        remedy = "Give a certificate and its own key, in PEM and without a passphrase."
        raise problem_of_key("monitoring.tls_certificate", certificate, message, remedy) from error


def endpoints(run_id: str, endpoint: Endpoint | None, per_rank: bool = False) -> dict[str, Any]:
    """The content of `endpoints.json`."""
    known: dict[str, Any] = {"run_id": run_id, "pid": os.getpid()}
    if endpoint is not None:
        known |= {
            "metrics": endpoint.url("/metrics"),
            "page": endpoint.url("/", with_token=True),
            **({"sd": endpoint.url("/sd")} if per_rank else {}),
            "token": endpoint.token,
        }
    return known


def page_to_show(known: Mapping[str, Any], config: RunConfig) -> str | None:
    """The page's address for stderr, which often goes into files that others read: without a token that outlives the
    run. None where there is no page."""
    page: str | None = known.get("page")
    if page is None or config.monitoring.token_file is None:
        return page
    return f"{page.partition('?')[0]} (with its token: in endpoints.json)"
