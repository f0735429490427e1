"""Log lines: how they look, where they come from, whom they are told, and that nobody is hurt by them."""

from __future__ import annotations

import contextvars
import json
import logging
import os
import socket
import subprocess
import sys

import pytest
import structlog

import parallel3d
from parallel3d.runs.run_log import RunLog
from runtime.control import CONTROL_FD, MAX_MESSAGE_BYTES, RANK_PID, LauncherControl
from runtime.errors import Coords
from runtime.log_settings import (
    LOG_FORMAT,
    LOG_LEVEL,
    LogFormat,
    bind_rank,
    bind_step,
    log_environment,
    log_format,
    log_level,
)
from runtime.logs import make_logger
from tests.support.processes import ROOT
from tests.support.run_folders import BOTTLENECK


@pytest.fixture(autouse=True)
def own_context(monkeypatch):
    """What one test binds is not the next one's."""
    for name in (LOG_FORMAT, LOG_LEVEL, "NO_COLOR", CONTROL_FD, RANK_PID, "RANK"):
        monkeypatch.delenv(name, raising=False)


def lines_of(form: LogFormat, log, **options) -> list[str]:
    """What `log` has logged, in a context of its own."""
    lines: list[str] = []
    contextvars.copy_context().run(log, make_logger(form, write=lines.append, **options))
    return lines


def json_of(log, **options) -> list[dict]:
    strict = {"parse_constant": lambda name: pytest.fail(f"{name} is not JSON")}
    return [json.loads(line, **strict) for line in lines_of(LogFormat.JSON, log, **options)]


# How they look.


@pytest.mark.parametrize(
    ("is_terminal", "environment", "form"),
    [
        (True, {}, "colour"),
        (True, {"NO_COLOR": "1"}, "plain"),
        (True, {"NO_COLOR": ""}, "colour"),
        (True, {"TERM": "dumb"}, "plain"),
        (False, {}, "json"),
        (False, {LOG_FORMAT: "colour"}, "colour"),
        (True, {LOG_FORMAT: "json"}, "json"),
        (False, {LOG_FORMAT: "morse"}, "json"),
    ],
)
def test_the_form_follows_from_terminal_and_environment(is_terminal, environment, form):
    assert log_format(is_terminal, environment) == form


def test_ranks_are_told_what_their_launchers_stderr_is(tmp_path):
    ours, theirs = os.openpty()
    with (tmp_path / "file").open("wb") as file:
        assert log_environment(theirs, {}) == {LOG_FORMAT: "colour"}
        assert log_environment(file.fileno(), {}) == {LOG_FORMAT: "json"}
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize(
    ("name", "level"), [("", 20), ("debug", 10), ("WARNING", 30), ("nonsense", 20), ("notset", 20)]
)
def test_the_level_comes_from_the_environment(name, level):
    assert log_level({LOG_LEVEL: name}) == level
    assert log_level({}) == logging.INFO


def test_json_has_rank_coordinates_and_step_first():
    def log(logger):
        bind_rank(5, Coords(1, 0, 1))
        bind_step(7)
        logger.warning("careful", path="a b", z=None)

    (found,) = json_of(log)
    assert list(found) == ["time", "level", "event", "rank", "coords", "step", "path", "z"]
    assert found["coords"] == {"dp": 1, "tp": 0, "pp": 1}
    assert (found["rank"], found["step"], found["level"]) == (5, 7, "warning")


def test_for_people_it_is_one_readable_line():
    def log(logger):
        bind_rank(5, Coords(1, 0, 1))
        logger.info("saved", path="here", seconds=1.5)

    (plain,) = lines_of(LogFormat.PLAIN, log)
    assert "saved" in plain
    assert "rank=5 coords='dp=1 tp=0 pp=1' path=here seconds=1.5" in plain
    assert "\x1b" not in plain
    (coloured,) = lines_of(LogFormat.COLOUR, log)
    assert "\x1b[" in coloured


def test_errors_have_their_traceback():
    def log(logger):
        try:
            raise ArithmeticError("one too many")
        except ArithmeticError:
            logger.exception("it broke")

    (found,) = json_of(log)
    assert found["level"] == "error"
    assert "ArithmeticError: one too many" in found["exception"]
    assert "ArithmeticError: one too many" in lines_of(LogFormat.PLAIN, log)[0]


def test_what_json_cannot_say():
    class Odd:
        def __repr__(self):
            return "<odd>"

    deep: list = []
    deep.append(deep)
    (found,) = json_of(lambda log: log.info("x", a=float("nan"), b=[float("inf")], c={1: Odd()}, d=(1, 2), deep=deep))
    assert (found["a"], found["b"], found["c"], found["d"]) == ("nan", ["inf"], {"1": "<odd>"}, [1, 2])


def test_levels_below_are_left_out():
    def log(logger):
        logger.debug("a")
        logger.info("b")
        logger.error("c")

    assert [line["event"] for line in json_of(log)] == ["b", "c"]
    assert [line["event"] for line in json_of(log, level=logging.DEBUG)] == ["a", "b", "c"]


# Context.


def test_a_program_with_its_own_structlog_gets_the_same_context():
    def log():
        bind_rank(3, Coords(0, 1, 0))
        bind_step(2)
        return structlog.contextvars.get_contextvars()

    assert contextvars.copy_context().run(log) == {"rank": 3, "coords": {"dp": 0, "tp": 1, "pp": 0}, "step": 2}


def test_our_logger_leaves_a_programs_own_configuration_alone():
    before = structlog.get_config()
    parallel3d.logger().debug("x")
    assert not structlog.is_configured()
    assert structlog.get_config() == before


async def test_every_rank_of_a_process_has_its_own_context():
    async def main() -> list[dict]:
        found = []
        async with parallel3d.mesh(dp=2) as mesh:
            found.append(structlog.contextvars.get_contextvars())
            found.append(await mesh.compute(structlog.contextvars.get_contextvars))
        return found

    ranks = await parallel3d.in_process(main, 2)
    for rank, found in enumerate(ranks):
        assert found == [{"rank": rank, "coords": {"dp": rank, "tp": 0, "pp": 0}}] * 2
    assert "rank" not in structlog.contextvars.get_contextvars()


# The control channel.


@pytest.fixture
def channel(monkeypatch):
    """This process is rank 2 of a launcher, whose end this is."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    monkeypatch.setenv(CONTROL_FD, str(theirs.fileno()))
    monkeypatch.setenv(RANK_PID, str(os.getpid()))
    monkeypatch.setenv("PARALLEL3D_STORE_FD", "0")
    monkeypatch.setenv("RANK", "2")
    with ours, theirs:
        yield LauncherControl(ours)


def test_a_ranks_records_go_to_its_launcher_too(channel, capsys):
    parallel3d.logger("mine", colour="blue").info("saved", kind="odd", size=3)
    (told,) = channel.messages()
    shown = json.loads(capsys.readouterr().err)
    assert told == {**{k: v for k, v in shown.items() if k != "kind"}, "kind": "log", "kind_": "odd"}
    assert (told["rank"], told["logger"], told["colour"], told["size"]) == (2, "mine", "blue", 3)


def test_a_long_record_still_fits_a_message(channel, capsys):
    parallel3d.logger().info("x" * 10 * MAX_MESSAGE_BYTES, numbers=list(range(50_000)))
    (told,) = channel.messages()
    assert told["event"].endswith("… (655,360 letters)")
    assert len(capsys.readouterr().err) > 10 * MAX_MESSAGE_BYTES, "stderr has all of it"


def test_a_launcher_that_does_not_read_holds_nobody_up(channel, capsys):
    log = parallel3d.logger()
    for number in range(5000):
        log.info("again", number=number, padding="x" * 500)
    assert len(capsys.readouterr().err.splitlines()) == 5000
    told = list(channel.messages(10_000))
    assert 0 < len(told) < 5000
    assert [each["number"] for each in told] == list(range(len(told)))


def test_a_launcher_that_is_gone(channel, capsys):
    channel.connection.close()
    parallel3d.logger().info("still here")
    assert "still here" in capsys.readouterr().err


def test_whoever_is_told_may_fail():
    def fail(record):
        raise ZeroDivisionError

    assert [line["event"] for line in json_of(lambda log: log.info("x"), on_record=fail)] == ["x"]


@pytest.mark.parametrize("closed", ["stderr", "pipe"])
def test_nobody_reads_stderr(closed):
    end = "sys.stderr = None" if closed == "stderr" else "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2)"
    source = f"import sys; {end}; import parallel3d; parallel3d.logger().info('x'); print('alive', flush=True)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.stdout == "alive\n"


def test_structlog_is_not_loaded_before_somebody_logs():
    modules = "runtime.launch.launch, runtime.log_settings, parallel3d.runs.run_log, parallel3d.cli.run"
    source = f"import parallel3d, {modules}, sys; print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("False\n", "")


# The run's own lines.


class Notes:
    def __init__(self) -> None:
        self.records: list[dict] = []

    def note(self, record):
        self.records.append(record)


@pytest.fixture
def run_log():
    notes, shown = Notes(), []
    return RunLog(notes, shown.append), notes.records, shown


def test_a_run_logs_its_start_and_its_end(run_log):
    log, records, shown = run_log
    log.note_status("running", "")
    log.note_status("failed", "rank 1 failed")
    assert [(each["level"], each["event"]) for each in records] == [
        ("info", "the run started"),
        ("error", "the run ended"),
    ]
    assert (records[1]["status"], records[1]["error"]) == ("failed", "rank 1 failed")
    assert shown == [], "whoever has started it says so"


def test_slow_ranks_are_warned_of(run_log):
    log, records, shown = run_log
    slow = {"rank": 3, "score": 0.51234, "compared_with": "peers", "since_step": 4, "host": None}
    log.note("stragglers", [{"state": "found", **slow}])
    log.note("stragglers", [{"state": "gone", **slow}])
    (warning, end) = records
    assert (warning["level"], warning["event"], warning["straggler"]) == ("warning", "rank 3 is slow", 3)
    assert (warning["score"], warning["compared_with"], warning["since_step"]) == (0.512, "peers", 4)
    assert "host" not in warning
    assert (end["level"], end["event"]) == ("info", "rank 3 is no longer slow")
    assert len(shown) == 1


@pytest.mark.parametrize(("severity", "level"), [("medium", "info"), ("high", "warning"), ("critical", "warning")])
def test_bottlenecks_are_told_with_their_remedy(run_log, severity, level):
    log, records, shown = run_log
    log.note("bottlenecks", [{"state": "found", **BOTTLENECK, "severity": severity}, {"state": "gone", **BOTTLENECK}])
    found, gone = records
    assert (found["level"], found["event"]) == (level, BOTTLENECK["message"])
    assert (found["bottleneck"], found["key"], found["value"]) == ("too_few_microbatches", "pipeline.microbatches", "8")
    assert found["remedy"] == BOTTLENECK["remedy"]
    assert gone["event"] == "a bottleneck is gone"
    assert len(shown) == (level == "warning")


def test_other_news_are_not_logged(run_log):
    log, records, _ = run_log
    for kind in ("step", "parts", "log"):
        log.note(kind, {"event": "x"})
    assert records == []
