"""Chromium without a window, driven through a pipe by its DevTools protocol."""

import contextlib
import json
import os
import select
import shutil
import subprocess

PATH = shutil.which("chromium") or shutil.which("chromium-browser")
"""The program; None if there is none."""
PATIENCE = 100
"""Seconds to wait for an answer."""


class Page:
    """A page in the browser: what its console says, and what scripts in it return."""

    def __init__(self, browser, session):
        self.browser, self.session = browser, session
        self.complaints, self.events = [], set()

    def send(self, method, **params):
        """Send a command and return its result; events that come before it are heard."""
        number = self.browser.write(method, params, self.session)
        while True:
            message = self.browser.read()
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.hear(message)

    def wait_for(self, method):
        """Wait for an event."""
        if method not in self.events:
            while (message := self.browser.read()).get("method") != method:
                self.hear(message)

    def hear(self, message):
        """Keep exceptions and the entries of the console."""
        self.events.add(message.get("method"))
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
            self.complaints.append(message["params"])
        if message.get("method") == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"])

    def run(self, script):
        """Return what an asynchronous function of this body returns."""
        whole = f"(async () => {{ {script} }})()"
        done = self.send(
            "Runtime.evaluate", expression=whole, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")


class Browser:
    """The process, and its pages one after the other."""

    def __init__(self, folder):
        self.folder, self.number, self.rest = folder, 0, b""
        theirs_in, self.out = os.pipe()
        self.back, theirs_out = os.pipe()
        words = [PATH, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        words += [f"--user-data-dir={folder}/profile", "about:blank"]
        # It reads commands from descriptor 3 and answers to 4. Other shells know digits 0-9 alone.
        line = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", line, "bash", *words],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)

    def write(self, method, params, session=None):
        """Send a command and return its number."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        message |= {"sessionId": session} if session else {}
        os.write(self.out, json.dumps(message).encode() + b"\0")
        return self.number

    def read(self):
        """Return the next answer or event."""
        while b"\0" not in self.rest:
            assert select.select([self.back], [], [], PATIENCE)[0], "the browser does not answer"
            part = os.read(self.back, 1 << 20)
            assert part, "the browser has ended"
            self.rest += part
        text, _, self.rest = self.rest.partition(b"\0")
        return json.loads(text)

    def open(self, html, *, width=1100, height=900, dark=False, fragment=""):
        """Return a page of this text, loaded in a window of this size."""
        path = self.folder / "page.html"
        path.write_text(html, "utf-8")
        top = Page(self, None)
        target = top.send("Target.createTarget", url="about:blank")["targetId"]
        session = top.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 700}
        page.send("Emulation.setDeviceMetricsOverride", **size)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.send("Page.navigate", url=path.as_uri() + fragment)
        page.wait_for("Page.loadEventFired")
        return page

    def close(self):
        """End the process."""
        with contextlib.suppress(OSError):
            self.write("Browser.close", {})
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self.out)
            os.close(self.back)
