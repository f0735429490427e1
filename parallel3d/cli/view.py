"""`parallel3d view`: serves a run's page from its folder; for a running one, prints the address of its own page."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from parallel3d import exit_codes
from runtime.errors import InvalidCall

if TYPE_CHECKING:
    from monitoring.http.endpoint import Endpoint
    from parallel3d.reports.folder_view import FolderView
    from parallel3d.reports.run_reader import FinishedRun


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("view")(view)


def view(
    folder: Annotated[Path, typer.Argument(help="The run's folder, such as runs/<run_id>.", show_default=False)],
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of this host only.", show_default="a free one")
    ] = None,
    opens: Annotated[bool, typer.Option("--open", help="Open it in the browser too.")] = False,
) -> None:
    """Show a run in the browser: prints the page's address, and serves it until Ctrl-C.

    A run that still goes on has a page of its own: then its address is printed, and that is all.
    """
    from parallel3d.reports.run_reader import read_run

    try:
        if (address := _live_page(read_run(folder))) is not None:
            _print_address(address, opens)
            return
        raise typer.Exit(_serve(folder, port, opens))
    except InvalidCall as error:
        print(f"parallel3d view: {error}", file=sys.stderr)
        raise typer.Exit(exit_codes.ERROR) from None


def _live_page(run: FinishedRun) -> str | None:
    """The address of a running run's own page; None if there is none."""
    address = run.endpoints.get("page")
    is_address = isinstance(address, str) and address.startswith(("http://", "https://")) and address.isprintable()
    return address if is_address and run.status == "running" else None


def _serve(folder: Path, port: int | None, opens: bool) -> int:
    from monitoring.http.endpoint import Endpoint
    from parallel3d.reports.folder_view import FolderView

    source = FolderView(folder)
    try:
        endpoint = Endpoint.open("127.0.0.1", port)
    except OSError as error:
        raise InvalidCall(f"port {port} can't be listened on: {error.strerror}. Give another, or none.") from None
    with endpoint.listener:
        asyncio.run(_answer(source, endpoint, opens))
    return 0


async def _answer(source: FolderView, endpoint: Endpoint, opens: bool) -> None:
    """Serve until a signal comes, which is no error: Ctrl-C is how this verb ends."""
    from aiohttp import web

    from monitoring.http.guard import Guard
    from monitoring.http.page import page_routes
    from monitoring.http.server import serve

    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    app = web.Application()
    Guard(endpoint).install(app)
    app.add_routes(page_routes(source))
    runner = await serve(app, endpoint)
    watching = asyncio.create_task(source.watch())
    try:
        _print_address(endpoint.url("/", with_token=True), opens)
        await ended.wait()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        source.feed.close()
        await runner.cleanup()


def _print_address(address: str, opens: bool) -> None:
    print(address, flush=True)
    if opens:
        import webbrowser

        webbrowser.open(address)
