"""The HTTP endpoints of a run and of its ranks, as the configuration says, and the content of `endpoints.json`."""

from __future__ import annotations

import errno
import os
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from monitoring.http.endpoint import Endpoint, read_bearer_token, tls_context
from monitoring.http.service import Service
from monitoring.http.tokens import UnusableToken
from monitoring.prometheus.rank_metrics import RankFigures, RankMetrics
from parallel3d.config import RunConfig
from parallel3d.config.errors import ConfigProblems, problem_of_key
from parallel3d.planning.preflight import Locate, nowhere
from runtime.errors import ConfigError

if TYPE_CHECKING:
    from aiohttp import web

    from parallel3d.training.coordinator import Coordinator


def open_endpoint(config: RunConfig, locate: Locate = nowhere) -> Endpoint | None:
    """An endpoint that listens already; None if monitoring is disabled, or if no port is free.

    Raises ConfigError, which names the key at fault.
    """
    if not config.monitoring.enabled:
        return None
    try:
        return _open(config)
    except ConfigProblems as error:
        raise ConfigProblems([replace(each, place=locate(each.path)) for each in error.problems]) from error


def _open(config: RunConfig) -> Endpoint | None:
    keys = config.monitoring
    token, tls = _token(keys.token_file), _tls(keys.tls_certificate, keys.tls_key)
    try:
        return Endpoint.open(keys.host, keys.port, token, tls)
    except OSError as error:
        said = os.strerror(error.errno) if error.errno else str(error)  # its own text repeats the address
        if error.errno == errno.EADDRNOTAVAIL:
            remedy = "Give one of this host's, or 127.0.0.1."
            raise problem_of_key("monitoring.host", keys.host, "this host has no such address.", remedy) from error
        if keys.port is not None:
            message = f"{keys.host} can't be listened on at this port: {said}."
            raise problem_of_key(
                "monitoring.port", keys.port, message, "Give another, or null for a free one."
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
    """The page's address for stderr; None where there is no page.

    Without a token of `monitoring.token_file`, which outlives the run: stderr often goes into files that others read.
    """
    page: str | None = known.get("page")
    if page is None or config.monitoring.token_file is None:
        return page
    return f"{page.partition('?')[0]} (with its token: in endpoints.json)"


# Of a rank.


class Sender(Protocol):
    """The rank's reporter."""

    def send(self, kind: str, **fields: object) -> None: ...


@asynccontextmanager
async def serving_rank(coordinator: Coordinator, reporter: Sender) -> AsyncIterator[None]:
    """Serve this rank's own `/metrics` meanwhile, if `monitoring.per_rank` asks for it, and report where."""
    endpoint = _open_for_rank(coordinator.config)
    if endpoint is None:
        yield
        return
    service = Service("parallel3d-rank-endpoint", endpoint, lambda: _app(endpoint, coordinator))
    reporter.send("endpoint", target=endpoint.authority, scheme=endpoint.scheme)
    try:
        yield
    finally:
        await service.close()


def _open_for_rank(config: RunConfig) -> Endpoint | None:
    """With the run's token and TLS, on a free port. A problem of this host alone does not end the run."""
    keys = config.monitoring
    if not (keys.enabled and keys.per_rank):
        return None
    try:
        return open_endpoint(config.model_copy(update={"monitoring": keys.model_copy(update={"port": None})}))
    except ConfigError as error:
        print(f"parallel3d: this rank has no /metrics: {error}", file=sys.stderr)
        return None


def _app(endpoint: Endpoint, coordinator: Coordinator) -> web.Application:
    from monitoring.http.server import make_app

    return make_app(endpoint, RankMetrics(lambda: figures(coordinator)))


def figures(coordinator: Coordinator) -> RankFigures:
    """The rank's figures; may be called in any thread, while a step changes them."""
    performance, mesh, recorder = coordinator.performance(), coordinator.mesh, coordinator.recorder
    return RankFigures(
        num_steps=performance.num_steps,
        parts=performance.total,
        lag=mesh.loop_lag,
        collectives=mesh.collectives.totals(),
        memory=_memory(coordinator),
        dropped=recorder.dropped if recorder is not None else 0,
    )


def _memory(coordinator: Coordinator) -> dict[str, int]:
    try:
        return coordinator.memory()
    except RuntimeError:  # the first step is adding the optimizer's state meanwhile
        return {}
