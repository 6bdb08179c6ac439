"""An alert to a webhook: a small JSON message by HTTP POST, from a background thread, which never holds training up.

The message has a ``text`` that chat services (Slack, Mattermost, ...) show as it is, and the same as fields::

    {"text": "Incident 3 opened at step 1200: ...", "event": "incident.opened", "step": 1200, "attempt": 0, "incident": 3,
     "status": "open", "run_dir": "/runs/a", "host": "node-07", "command": "lightning-sentinel report /runs/a"}

Sent are ``incident.opened`` and ``incident.closed``, ``action.stop``, and ``run.ended`` of a run that did not finish.
"""

from __future__ import annotations

import logging
import queue
import random
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .journal import redact, to_json

log = logging.getLogger("lightning_sentinel")

# Answers that may be another one a little later; any other 4xx is the sender's fault and stays so.
RETRY_STATUS = frozenset({408, 425, 429})


class Webhook:
    """Sends messages to one address, one after the other, from its own thread.

    Args:
        url: ``http://`` or ``https://``. It is a secret: no message or journal line repeats more of it than the host.
        timeout_seconds: For the connection and for each wait for an answer.
        retries: Further tries after the first one, each after twice the pause of the one before.
        backoff_seconds: First pause; up to a quarter is added at random, so that many runs do not knock at once.
        capacity: Messages that wait at most; beyond that the newest is dropped and counted.

    Raises:
        ValueError: For an address that is none, or a number out of its bounds.

    Example:
        >>> Webhook("hooks.example/T0")
        Traceback (most recent call last):
        ValueError: webhook must be an address that begins with http:// or https:// and names a host.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float = 5.0,
        retries: int = 3,
        backoff_seconds: float = 1.0,
        capacity: int = 64,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("webhook must be an address that begins with http:// or https:// and names a host.")
        self.host = parts.hostname
        self.timeout_seconds, self.retries, self.backoff_seconds = timeout_seconds, retries, backoff_seconds
        self.sent = 0
        self.dropped = 0
        self.last_error = ""
        self._url = url
        self._queue: queue.Queue[bytes] = queue.Queue(capacity)
        self._stop = threading.Event()
        self._idle = threading.Condition()
        self._pending = 0
        self._told = False
        self._thread: threading.Thread | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message. Returns at once and never raises."""
        body = to_json(redact(dict(message))).encode()
        with self._idle:
            self._pending += 1
        try:
            self._queue.put_nowait(body)
        except queue.Full:
            self._done(dropped="too many messages wait")
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="lightning-sentinel-webhook", daemon=True)
            self._thread.start()

    def close(self, wait_seconds: float = 5.0) -> None:
        """Wait that long at most for what is queued, then give up on it."""
        deadline = time.monotonic() + wait_seconds
        with self._idle:
            while self._pending and (left := deadline - time.monotonic()) > 0:
                self._idle.wait(left)
            unsent = self._pending
        self._stop.set()
        if unsent:
            self.last_error = self.last_error or f"no answer within {wait_seconds:g} s"
        if unsent or self.dropped:
            log.warning(
                "%d of %d alerts did not reach the webhook at %s: %s",
                unsent + self.dropped,
                unsent + self.dropped + self.sent,
                self.host,
                self.last_error,
            )

    # ------------------------------------------------------------------------------------------------ its own thread

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                body = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            self._done(dropped=self._deliver(body))

    def _deliver(self, body: bytes) -> str:
        """Try until it is there or the tries are spent; why it is not there, or nothing."""
        pause, error = self.backoff_seconds, ""
        for attempt in range(self.retries + 1):
            if attempt and self._stop.wait(pause * (1 + 0.25 * random.random())):  # not the training's generators
                break
            if attempt:
                pause *= 2
            error, again = self._post(body)
            if not error or not again:
                break
        return error

    def _post(self, body: bytes) -> tuple[str, bool]:
        """One try: what went wrong, and whether another one may help."""
        request = urllib.request.Request(
            self._url, data=body, method="POST", headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_seconds):
                return "", False
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}", error.code >= 500 or error.code in RETRY_STATUS
        except (OSError, ValueError) as error:  # refused, timed out, no such host, a broken answer
            reason = getattr(error, "reason", error)
            return f"{type(reason).__name__ if isinstance(reason, Exception) else reason}", True
        except Exception as error:  # http.client's own: whatever happens here must not end the thread
            return type(error).__name__, True

    def _done(self, *, dropped: str) -> None:
        if dropped:
            self.dropped, self.last_error = self.dropped + 1, dropped
            if not self._told:
                self._told = True
                log.warning("An alert did not reach the webhook at %s: %s. Training goes on.", self.host, dropped)
        else:
            self.sent += 1
        with self._idle:
            self._pending -= 1
            self._idle.notify_all()


def alert_of(event: str, step: int, fields: Mapping[str, Any], run_dir: Path) -> dict[str, Any] | None:
    """The message about an event of the journal; None where nobody need be told.

    Example:
        >>> found = {"number": 3, "status": "open", "findings": [{"message": "the loss is 40 nats"}]}
        >>> alert_of("incident.opened", 1200, {"incident": found}, Path("/runs/a"))["text"]
        'Incident 3 opened at step 1200: the loss is 40 nats. Look: lightning-sentinel report /runs/a'
    """
    command = f"lightning-sentinel report {run_dir}"
    message: dict[str, Any] = {"event": event, "step": step}
    incident = fields.get("incident")
    if event in ("incident.opened", "incident.closed") and isinstance(incident, Mapping):
        verdict = incident.get("verdict") or {}
        message |= {"incident": incident.get("number"), "status": incident.get("status")}
        message["culprits"] = list(verdict.get("culprits") or ())
        if event == "incident.opened":
            found = (incident.get("findings") or [{}])[0].get("message", "")
            text = f"Incident {incident.get('number')} opened at step {step}: {found}"
        else:
            text = (
                f"Incident {incident.get('number')} {incident.get('status')} at step {step}: {incident.get('closing')}"
            )
    elif event == "action.stop":
        message["incident"] = incident
        text = f"Training is stopped at step {step}: {fields.get('reason')}"
    elif event == "run.ended" and fields.get("status") not in (None, "finished"):
        message["status"] = fields["status"]
        text = f"The run ended as {fields['status']} at step {step}"
        if fields.get("exception"):
            text += f" with {fields['exception']}"
    else:
        return None
    text = f"{text.rstrip('.')}. Look: {command}"
    return {"text": text, **message, "run_dir": str(run_dir), "host": socket.gethostname(), "command": command}
