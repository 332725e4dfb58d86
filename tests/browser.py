"""A headless Chromium for tests: a minimal client of its DevTools protocol, over a pair of pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = "chromium", "chromium-browser", "google-chrome", "chrome"
OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
# Chromium reads commands from descriptor 3 and writes to descriptor 4. Copied twice, neither end is in the way.
LAUNCH = (
    "import os, sys; r, w = (os.dup(int(fd)) for fd in sys.argv[1:3]);"
    "r, w = os.dup(r), os.dup(w); os.dup2(r, 3); os.dup2(w, 4); os.execvp(sys.argv[3], sys.argv[3:])"
)
WAIT = 30.0


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One Chromium with a profile of its own; used as a context manager."""

    def __init__(self, executable: str, profile: Path) -> None:
        read_end, self._to = os.pipe()
        self._from, write_end = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", LAUNCH, str(read_end), str(write_end), executable, *OPTIONS),
                *(f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=(read_end, write_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._received = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(WAIT)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._to)
            os.close(self._from)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + WAIT
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from], [], [], max(0.0, until - time.monotonic()))
            assert ready, "Chromium did not answer in time"
            chunk = os.read(self._from, 1 << 20)
            assert chunk, "Chromium has ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> "Page":
        """Open a file in a new page of this size and wait until it is drawn."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, target, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        page.send("Page.navigate", url=file.as_uri())
        page.wait_for("location.protocol === 'file:' && document.readyState === 'complete'")
        page.settle()
        return page


class Page:
    """One page of a browser."""

    def __init__(self, browser: Browser, target: str, session: str) -> None:
        self.browser, self.target, self.session = browser, target, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        until = time.monotonic() + WAIT
        while not self.run(expression):
            assert time.monotonic() < until, f"never true: {expression}"

    def settle(self) -> None:
        """Wait until what has changed is drawn."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def click(self, selector: str) -> None:
        """Press the mouse on the middle of the element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def screenshot(self, file: Path, full: bool = True) -> None:
        answer = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        file.write_bytes(base64.b64decode(answer["data"]))

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """What has happened on this page, of these kinds."""
        self.run("0")  # What was on its way has come with the answer.
        return [
            e["params"] for e in self.browser.events if e.get("sessionId") == self.session and e["method"] in methods
        ]

    def complaints(self) -> list[str]:
        """Everything on the console, and errors that were not caught."""
        found = self.events("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in found]

    def requests(self) -> list[str]:
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]
