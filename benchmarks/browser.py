"""A headless Chromium, driven by the DevTools protocol over pipes: it opens no port."""

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
READS, WRITES = 3, 4  # the descriptors of --remote-debugging-pipe
SECONDS = 60.0  # for an answer, and for a page to show what it is to show
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
      orders: Where commands of the protocol are written to.
      answers: Where it answers.
    """

    def __init__(self, orders: int, answers: int) -> None:
        self.orders, self.answers = orders, answers
        self.rest = b""
        self.number = 0
        self.session: dict[str, str] = {}
        target = self._order("Target.createTarget", url="about:blank")["targetId"]
        attached = self._order("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}

    def resize(self, width: int, height: int) -> Self:
        size = {"width": width, "height": height}
        self._order("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        return self

    def open(self, address: str) -> None:
        """Opens an address; a new one, even if only what follows # has changed."""
        self._order("Page.navigate", url="about:blank")
        self._order("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Returns what a script evaluates to."""
        done = self._order("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{script}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def wait_until(self, script: str) -> Any:
        """Returns what a script evaluates to, once that is true."""
        deadline = time.monotonic() + SECONDS
        while not (found := self.run(script)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{script} is not true of {self.run(SHOWN)}")
            time.sleep(POLL_SECONDS)
        return found

    def wait_for(self, *words: str) -> str:
        """Returns the visible text once all words are in it."""
        text = "(document.body?.innerText ?? '')"
        return str(self.wait_until(f"{json.dumps(words)}.every(e => {text}.includes(e)) && {text}"))

    def click(self, words: str) -> None:
        """Clicks the innermost thing that says exactly this, once it is there."""
        found = f"{VISIBLE}.findLast(e => e.textContent.trim() == {json.dumps(words)})"
        self.wait_until(f"(e => e && (e.click(), true))({found})")

    def address_of(self, words: str) -> str:
        """Returns where the link leads that says exactly this, once it is there."""
        said = f"e => e.innerText == {json.dumps(words)}"
        return str(self.wait_until(f"[...document.links].find({said})?.href"))

    def picture(self) -> bytes:
        """Returns the page as PNG, once two in a row are the same; some pages never rest."""
        deadline = time.monotonic() + SETTLE_SECONDS
        last = b""
        while last != (last := self._capture()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return last

    def _capture(self) -> bytes:
        return base64.b64decode(self._order("Page.captureScreenshot", format="png")["data"])

    def _order(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the answer to a command; events are passed over."""
        self.number += 1
        order = {"id": self.number, "method": method, "params": params, **self.session}
        os.write(self.orders, json.dumps(order).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            if not select.select([self.answers], [], [], SECONDS)[0]:
                raise TimeoutError("Chromium does not answer")
            if not (part := os.read(self.answers, 1 << 20)):
                raise RuntimeError("Chromium has ended")
            self.rest += part
        message, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def open_browser(chromium: str) -> Iterator[Page]:
    """Runs a browser that knows nothing of earlier ones until the block ends."""
    reads, orders = os.pipe()
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
            yield Page(orders, answers)
        finally:
            os.close(orders)
            os.close(answers)
            os.kill(process, signal.SIGKILL)  # one that hangs does not end with its pipe
            os.waitpid(process, 0)
