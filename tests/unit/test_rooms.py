"""Who may import whom: layers, the rooms inside them, and where torch is not wanted."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

LAYERS = ("monitoring", "runtime", "process_groups", "parallel3d")
"""Each may import those before it."""

ROOMS = {
    "monitoring": """
        checks, dashboards, events, http, text, verify:
        analysis, http.page: events
        messages: checks events
        analysis.rules: analysis
        live: analysis analysis.rules events http messages
        prometheus: analysis analysis.rules events live
        assemble: analysis analysis.rules http live prometheus
    """,
    "runtime": """
        control, cores, errors, signals, threads:
        environment, gradient_server.wire, log_settings: errors
        loop: errors signals
        launch: control cores errors log_settings
        logs: control environment log_settings
        gradient_server, gradient_server.client: errors gradient_server.wire logs
    """,
    "process_groups": """
        arena, arguments, call, reduction, topology:
        counters: arena
        torch_internals, work: call
        call_queue: call counters
        pipes, tensor_exchange: work
        strategies: call call_queue reduction
        transport: call call_queue pipes tensor_exchange
        in_process: call reduction strategies transport
        issuing: arguments call call_queue transport work
        repeated: call call_queue issuing work
        shared_memory: arena call call_queue counters pipes reduction strategies tensor_exchange torch_internals
        torch_backend: call call_queue counters shared_memory strategies torch_internals transport
        group: arguments call issuing pipes repeated tensor_exchange transport work
        formation: arena arguments group shared_memory strategies topology torch_backend
        rendezvous: arena call counters formation group shared_memory topology torch_backend transport
        manager: call formation group in_process rendezvous
    """,
    "parallel3d": """
        exit_codes, formatting, pipeline.schedules, shadows, torch_internals:
        config: formatting pipeline.schedules
        seeding: torch_internals
        data: config seeding
        models: config pipeline.schedules seeding torch_internals
        rank_mesh: config seeding
        gradients: rank_mesh torch_internals
        tensor: config gradients models torch_internals
        optim: config gradients rank_mesh torch_internals
        pipeline.simulation: pipeline.schedules
        pipeline: gradients pipeline.schedules pipeline.simulation rank_mesh
        planning: config data models pipeline.schedules pipeline.simulation tensor
        training: config data gradients models optim pipeline pipeline.schedules pipeline.simulation planning
            rank_mesh seeding tensor torch_internals
        gradient_worker: config data gradients models optim pipeline pipeline.schedules rank_mesh seeding training
        reports.drawing: pipeline.schedules pipeline.simulation
        reports: config pipeline.schedules pipeline.simulation reports.drawing
        runs: config data exit_codes formatting planning rank_mesh reports training
        benchmarks: formatting
        cli: benchmarks config exit_codes formatting gradient_worker pipeline.schedules pipeline.simulation planning
            reports reports.drawing runs tensor training
        __main__: cli
    """,
}
"""By layer: a room, or a module outside all rooms, and what it may import of its own layer: only lines above it.
`parallel3d` itself may import all and be imported by all: its names are loaded when first used."""
NOT_SHIPPED = {"tests", "bench", "examples"}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import hides where it leads"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if is_module(name) else str(node.module)


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def files(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found
    return found


def room_of(module: str) -> str:
    """Without its layer: `pipeline.schedules` of `parallel3d.pipeline.schedules.gpipe`; empty for a layer itself."""
    inside = module.partition(".")[2]
    is_package = (ROOT / module.replace(".", "/")).is_dir()
    return inside if is_package or "." not in inside else inside.rpartition(".")[0]


def allowed(layer: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for line in ROOMS[layer].replace("\n            ", " ").strip().splitlines():
        rooms, _, targets = line.strip().partition(":")
        found |= {room.strip(): set(targets.split()) for room in rooms.split(",")}
    return found


def edges(layer: str) -> Iterator[tuple[str, str, str]]:
    """The import line, the importing room and the imported room of every import inside a layer."""
    for path in files(layer):
        relative = path.relative_to(ROOT)
        source = room_of(".".join(relative.with_suffix("").parts).removesuffix(".__init__"))
        for line, name in imports(path):
            if name.partition(".")[0] == layer and source and (target := room_of(name)) and target != source:
                yield f"{relative}:{line} imports {name}", source, target


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_only_those_below_it(layer):
    forbidden = set(LAYERS[LAYERS.index(layer) + 1 :]) | NOT_SHIPPED
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in files(layer)
        for line, name in imports(path)
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", LAYERS)
def test_a_room_imports_only_what_it_may(layer):
    rooms = allowed(layer)
    wrong = [line for line, source, target in edges(layer) if target not in rooms.get(source, ())]
    assert wrong == []


@pytest.mark.parametrize("layer", LAYERS)
def test_every_allowed_import_is_made(layer):
    made = {(source, target) for _, source, target in edges(layer)}
    assert {(room, target) for room, targets in allowed(layer).items() for target in targets} - made == set()


@pytest.mark.parametrize("layer", LAYERS)
def test_rooms_stand_below_what_they_import(layer):
    order = list(allowed(layer))
    wrong = [
        f"{room} is above {target}"
        for room, targets in allowed(layer).items()
        for target in targets
        if order.index(target) >= order.index(room)
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", LAYERS)
def test_no_room_is_crowded(layer):
    for folder in {path.parent for path in files(layer)}:
        assert len(list(folder.glob("*.py"))) <= 21, folder


@pytest.mark.parametrize(
    "package",
    [
        "monitoring",
        "runtime",
        "parallel3d/config",
        "parallel3d/cli",
        "parallel3d/reports/drawing",
        "parallel3d/pipeline/simulation",
        "parallel3d/pipeline/schedules",
        "process_groups/topology.py",
        *(f"process_groups/strategies/{name}.py" for name in ("program", "algorithms")),
    ],
)
def test_no_torch_is_imported_where_none_is_needed(package):
    path = ROOT / package
    for file in [path] if path.is_file() else files(package):
        for line, name in imports(file):
            assert name.partition(".")[0] != "torch", f"{file}:{line}"


@pytest.mark.parametrize(
    "statement",
    [
        "import parallel3d",
        "import parallel3d.config",
        "import parallel3d.cli.main",
        "import parallel3d.pipeline.simulation",
        "import parallel3d.reports.drawing.page",
        "import parallel3d.pipeline.schedules.layer_split",
        "import parallel3d.pipeline.schedules.build",
        "from parallel3d import RunConfig, ConfigError, PeerLost, run, start",
        "import parallel3d.cli.run, parallel3d.cli.run_text",
        "import parallel3d.cli.verify, monitoring.verify",
        "import parallel3d.cli.report, parallel3d.reports.text, parallel3d.reports.run_reader, parallel3d.reports.html",
        "import runtime.logs; from parallel3d import logger",
        "import process_groups.topology",
        "import process_groups.strategies.algorithms",
        "import runtime.launch.launch, monitoring.prometheus.run_metrics",
        "import parallel3d.cli.serve_gradients, parallel3d.cli.join, monitoring.prometheus.gradient_server_metrics",
        "from runtime.gradient_server import server; from runtime.gradient_server.client import worker",
        "from runtime.gradient_server.wire import auth, link, messages",
    ],
)
def test_torch_is_not_loaded_by_the_way_either(statement):
    source = f"{statement}; import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("False\n", "")
