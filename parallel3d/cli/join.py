"""`parallel3d join`: trains what a YAML file describes as one worker of a gradient server."""

from __future__ import annotations

import asyncio
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import aclosing, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monitoring.analysis.facts import Status
from monitoring.checks import or_null
from parallel3d.cli.process import on_signals, open_standard_fds
from parallel3d.cli.run_text import LiveLine
from parallel3d.cli.validate import parse_settings
from parallel3d.config import RunConfig, load_config, locate
from parallel3d.formatting import json_lines
from parallel3d.runs.lifecycle import exit_code
from parallel3d.runs.record import RunError, RunRecord
from runtime.errors import ConfigError, Parallel3DError, notes_of
from runtime.gradient_server.wire.link import split_address

if TYPE_CHECKING:
    import ssl

    from parallel3d.gradient_worker.joined_training import JoinedTraining
    from parallel3d.gradient_worker.worker import GradientWorker
    from parallel3d.planning.preflight import Locate

MakeWorker = Callable[[], "GradientWorker"]
GRACE_SECONDS = 3.0
"""For a step that is under way when a signal comes; other workers would have to make it again."""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("join")(join)


def join(
    address: Annotated[str, typer.Argument(help="The server's HOST:PORT.", show_default=False)],
    file: Annotated[Path, typer.Argument(help="The run's YAML file, the same on all workers.", show_default=False)],
    token_file: Annotated[
        Path | None, typer.Option(help="The file with the run's token.", show_default="none, as on one host")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as runtime.threads=1. Repeatable."),
    ] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="Speak TLS, and trust this certificate or authority.", show_default="no TLS")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option(help="By which this worker is known when it comes back.", show_default="a new one")
    ] = None,
    give_up: Annotated[float, typer.Option(min=0.0, help="Seconds to try to reach a server that is gone.")] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print losses and more as JSON at the end.")] = False,
) -> None:
    """Train as one worker of a gradient server (parallel3d serve-gradients), which hands out shares of each batch.

    Exit codes: 0 well, 3 bad configuration, 4 the server is gone or refuses, or training failed, 130 interrupted.
    """
    open_standard_fds()
    overrides = parse_settings(settings or [])
    split_address(address)
    config = load_config(file, overrides=overrides)
    token, tls = _token(token_file), _trusting(tls_ca)
    find = partial(locate, file, overrides)

    def make_worker() -> GradientWorker:
        from parallel3d.gradient_worker.worker import GradientWorker

        return GradientWorker(address, token=token, tls=tls, node_id=node_id, give_up_seconds=give_up)

    raise typer.Exit(_train(config, make_worker, find, as_json))


def _token(path: Path | None) -> bytes | None:
    from runtime.gradient_server.wire.auth import read_token

    return None if path is None else read_token(str(path))


def _trusting(path: Path | None) -> ssl.SSLContext | None:
    import ssl

    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigError(f"--tls-ca {path}: no certificate can be read: {error.strerror or error}.") from None


def _train(config: RunConfig, make_worker: MakeWorker, find: Locate, as_json: bool) -> int:
    from parallel3d.gradient_worker.joined_training import JoinedTraining, check_joinable
    from parallel3d.planning.preflight import check_before_start, placing
    from runtime.loop import run_on_uvloop

    # stdout is for data, not for what the user's factories print.
    with redirect_stdout(sys.stderr), placing(find):
        check_joinable(config)
        record, worker = RunRecord(config, check_before_start(config, find)), make_worker()
        joined = JoinedRun(JoinedTraining(config, worker), worker, record)
        run_on_uvloop(joined.work())
    print(joined.summary(), file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json_lines(joined.to_json()))
    return joined.exit_code


class JoinedRun:
    """One worker of a gradient server, from the join to its exit code."""

    def __init__(self, training: JoinedTraining, worker: GradientWorker, record: RunRecord) -> None:
        self.record, self._worker, self._training = record, worker, training
        self._live = LiveLine.on_stderr()
        self._signal: signal.Signals | None = None

    async def work(self) -> None:
        """Train to the end. Raises only ConfigError; any other failure is in the record."""
        self._handle_signals()
        record = self.record
        try:
            await self._train()
            made = record.steps[-1].step + 1 if record.steps else 0
            record.status = Status.COMPLETED if made >= record.config.train.steps else Status.STOPPED
        except asyncio.CancelledError:
            if self._signal is None:
                raise
        except ConfigError:
            raise
        except Exception as error:
            if not isinstance(error, Parallel3DError):
                traceback.print_exc()
            record.status = Status.FAILED
            record.error = RunError(f"{type(error).__name__}: {error}", step=self._worker.step, notes=notes_of(error))
        finally:
            self._live.close()
        if self._signal is not None and record.status is not Status.FAILED:
            record.status = Status.INTERRUPTED

    async def _train(self) -> None:
        async with self._training as training, aclosing(training.steps()) as steps:
            worker = self._worker
            print(f"worker {worker.worker_id} ({worker.node_id}) has joined", file=sys.stderr, flush=True)
            async for step in steps:
                self.record.steps.append(step)
                self._live.show(self.record, step)
                if self._signal is not None:
                    break

    def _handle_signals(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def interrupt(number: signal.Signals, task: asyncio.Task[Any] = task) -> None:
            is_first, self._signal = self._signal is None, self._signal or number
            if is_first and self._training.is_making:
                loop.call_later(GRACE_SECONDS, task.cancel)
            else:
                task.cancel()

        on_signals(interrupt)

    @property
    def exit_code(self) -> int:
        return exit_code(self.record.status, self._signal)

    def summary(self) -> str:
        """The text at the end."""
        record, steps = self.record, self.record.steps
        worker = self._worker.worker_id
        first = f"{record.status}: {len(steps)} steps" + ("" if worker is None else f" as worker {worker}")
        if steps:
            first += f", loss {steps[0].loss:.4f} to {steps[-1].loss:.4f}, {record.tokens_per_second:,.0f} tokens/s"
        why = self._worker.ended_because
        lines = [first, *([f"the server ended: {why}"] if why is not None else [])]
        return "\n".join([*lines, *([f"parallel3d: {record.error.message}"] if record.error is not None else [])])

    def to_json(self) -> dict[str, Any]:
        """What `--json` prints. tokens_per_sec: of all workers."""
        record, steps, worker = self.record, self.record.steps, self._worker
        return {
            "status": record.status,
            "error": record.error.message if record.error is not None else None,
            "server_ended": worker.ended_because,
            "worker_id": worker.worker_id,
            "node_id": worker.node_id,
            "joins": worker.num_joins,
            "first_step": steps[0].step if steps else None,
            "steps": len(steps),
            "tokens_per_sec": record.tokens_per_second,
            "final_loss": or_null(steps[-1].loss) if steps else None,
            "losses": [or_null(step.loss) for step in steps],
            "grad_norms": [or_null(step.grad_norm) for step in steps],
            "learning_rates": [step.learning_rate for step in steps],
            "step_seconds": [step.seconds for step in steps],
        }
