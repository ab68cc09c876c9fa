"""Headless Chromium over the DevTools protocol, with the network cut: what a page drew, said and asked for."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless=new",
    "--no-sandbox",  # Chromium refuses its sandbox to root, as which CI runs
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--window-size=1280,900",
    # No name resolves and what needs none meets a closed port: nothing can leave, and an attempt is an error.
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--proxy-server=127.0.0.1:9",
    "--proxy-bypass-list=<-loopback>",
]
START_S = 60  # a busy machine of two cores needs its time


class Page:
    """One page. `errors`: uncaught exceptions, console errors, policy violations, dialogs. `blocked`: URLs that its own
    policy stopped."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []
        self.asked: dict[str, str] = {}
        self.blocked: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and return its result; events that come in between are noted."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message.get("result", {})
            self._note(message.get("method", ""), message.get("params", {}))

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details.get("text"))))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            words = (str(arg.get("value", arg.get("description", ""))) for arg in params["args"])
            self.errors.append(f"console.{params['type']}: {' '.join(words)}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['source']}: {params['entry']['text']}")
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {params['message']}")
            self._socket.send(
                json.dumps(
                    {"id": next(self._ids), "method": "Page.handleJavaScriptDialog", "params": {"accept": False}}
                )
            )
        elif method == "Network.requestWillBeSent":
            self.asked[params["requestId"]] = params["request"]["url"]
        elif method == "Network.loadingFailed" and params.get("blockedReason") == "csp":
            self.blocked.append(self.asked[params["requestId"]])

    @property
    def requests(self) -> list[str]:
        """Every URL that the page asked for, whether or not it got it."""
        return list(self.asked.values())

    def forget(self) -> None:
        """Begin the notes anew."""
        self.errors.clear()
        self.asked.clear()
        self.blocked.clear()

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def open(self, path: Path, until: str = "document.documentElement.dataset.drawn === 'all'") -> float:
        """Open a file, wait until the expression holds, and return the seconds that took."""
        began = time.perf_counter()
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self.evaluate(f"document.readyState === 'complete' && ({until})"):
            if time.perf_counter() - began > START_S:
                raise TimeoutError(f"{path}: not {until} after {START_S} s; errors: {self.errors}")
            time.sleep(0.02)
        return time.perf_counter() - began

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(chromium: str, profile: Path) -> Any:
    """A page of a fresh Chromium whose profile is the empty folder `profile`; ended with all its processes."""
    import websocket

    process = subprocess.Popen(
        [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    socket = None
    try:
        address = _page_address(process, profile)
        socket = websocket.create_connection(
            address, timeout=START_S, suppress_origin=True, http_no_proxy=["127.0.0.1"]
        )
        yield Page(socket)
    finally:
        if socket is not None:
            socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _page_address(process: subprocess.Popen[bytes], profile: Path) -> str:
    port_file, end = profile / "DevToolsActivePort", time.monotonic() + START_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"Chromium ended with {process.returncode} before it could be reached")
        if port_file.exists() and port_file.read_text().strip():
            port = port_file.read_text().split()[0]
            with contextlib.suppress(OSError):
                targets = json.load(opener.open(f"http://127.0.0.1:{port}/json/list", timeout=START_S))
                for target in targets:
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
        time.sleep(0.05)
    raise TimeoutError(f"Chromium opened no page in {START_S} s")
