"""Controls a headless Chromium by the DevTools protocol over pipes, without a network port."""

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW_TO_GET = (
    "no Chromium is installed; Debian has it: apt-get install --no-install-recommends chromium"
)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
READS, WRITES = 3, 4  # file descriptors of --remote-debugging-pipe
SECONDS = 60.0  # timeout of a command, and of waiting for content of a page
SETTLE_SECONDS = 4.0
POLL_SECONDS = 0.2
SHOWN = "location.href + document.body?.innerText"
VISIBLE = "[...document.querySelectorAll('body *')].filter(e => e.offsetParent)"


def find_chromium() -> str | None:
    """Returns the path of an installed Chromium or Chrome."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """The only page of a browser.

    Args:
      commands: File descriptor to which protocol commands are written.
      answers: File descriptor from which answers are read.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.commands, self.answers = commands, answers
        self.rest = b""
        self.number = 0
        self.session: dict[str, str] = {}
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def resize(self, width: int, height: int) -> Self:
        size = {"width": width, "height": height}
        self._send("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        return self

    def prefer(self, scheme: str) -> Self:
        """Sets prefers-color-scheme: light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._send("Emulation.setEmulatedMedia", features=[feature])
        return self

    def open(self, address: str) -> None:
        """Loads an address, even if it differs from the current one only after #."""
        self._send("Page.navigate", url="about:blank")
        self._send("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Returns the value of a script."""
        done = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_until(self, script: str) -> Any:
        """Returns the value of a script as soon as it is truthy."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.run(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{script} must become true within {SECONDS:g} s, got {self.run(SHOWN)}"
                )
            time.sleep(POLL_SECONDS)
        return found

    def wait_for(self, *words: str) -> str:
        """Returns the visible text as soon as it contains all words."""
        text = "(document.body?.innerText ?? '')"
        return str(self.wait_until(f"{json.dumps(words)}.every(e => {text}.includes(e)) && {text}"))

    def click(self, words: str) -> None:
        """Clicks the innermost element with exactly this text as soon as it is visible."""
        found = f"{VISIBLE}.findLast(e => e.textContent.trim() == {json.dumps(words)})"
        self.wait_until(f"(e => e && (e.click(), true))({found})")

    def address_of(self, words: str) -> str:
        """Returns the address of the link with exactly this text as soon as it exists."""
        said = f"e => e.innerText == {json.dumps(words)}"
        return str(self.wait_until(f"[...document.links].find({said})?.href"))

    def picture(self) -> bytes:
        """Returns the page as PNG once two captures are equal, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last = b""
        while last != (last := self._capture()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return last

    def _capture(self) -> bytes:
        return base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"])

    def _send(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of a command; ignores events."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.commands, json.dumps(command).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            if not select.select([self.answers], [], [], SECONDS)[0]:
                raise TimeoutError(f"Chromium must answer within {SECONDS:g} s, got no answer")
            if not (part := os.read(self.answers, 1 << 20)):
                raise RuntimeError("Chromium must keep running, but it closed its pipe")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def open_browser(chromium: str) -> Iterator[Page]:
    """Runs a browser with a new profile until the block ends."""
    reads, commands = os.pipe()
    answers, writes = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        actions: list[tuple[Any, ...]] = [
            (os.POSIX_SPAWN_DUP2, reads, READS),
            (os.POSIX_SPAWN_DUP2, writes, WRITES),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ]
        command = [chromium, *FLAGS, f"--user-data-dir={profile}"]
        process = os.posix_spawn(chromium, command, os.environ, file_actions=actions)
        os.close(reads)
        os.close(writes)
        try:
            yield Page(commands, answers)
        finally:
            os.close(commands)
            os.close(answers)
            os.kill(process, signal.SIGKILL)  # a hanging browser ignores closed pipes
            os.waitpid(process, 0)
