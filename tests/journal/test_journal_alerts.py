"""The webhook: what it sends, and that nothing at its other end holds training up."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from docs_pages import Block
from sentinel_kit import free_port
from test_run_journal import Incidents, Model, trainer

from lightning_sentinel import RunJournal
from lightning_sentinel.alerts import Webhook, alert_of
from lightning_sentinel.journal import redact


class Receiver:
    """A server that answers with the given codes in turn, the last one for ever; 0 hangs."""

    def __init__(self, *codes: int) -> None:
        self.codes, self.bodies, self.times = list(codes), [], []
        self.release = threading.Event()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.headers["Content-Type"] == "application/json"
                receiver.times.append(time.monotonic())
                receiver.bodies.append(json.loads(body))
                code = receiver.codes.pop(0) if len(receiver.codes) > 1 else receiver.codes[0]
                if code == 0:
                    receiver.release.wait(60)
                    return
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/s3cr3t"

    def close(self) -> None:
        self.release.set()
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Receiver]]:
    monkeypatch.setenv("no_proxy", "*")
    made: list[Receiver] = []

    def make(*codes: int) -> Receiver:
        made.append(Receiver(*codes))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()


def test_a_run_tells_of_its_incident(tmp_path: Path, serve: Callable[..., Receiver], documented: list[Block]) -> None:
    receiver = serve(200)
    journal = RunJournal(tmp_path / "run", report=False, webhook=receiver.url, config={"webhook": receiver.url})
    trainer(tmp_path, journal, Incidents(2, 4)).fit(Model())
    assert [(b["event"], b["step"], b["incident"], b["status"]) for b in receiver.bodies] == [
        ("incident.opened", 2, 1, "open"),
        ("incident.closed", 4, 1, "recovered"),
    ]
    assert receiver.bodies[0]["text"] == (
        f"Incident 1 opened at step 2: the loss jumped. Look: lightning-sentinel report {tmp_path}/run"
    )
    (block,) = documented
    shown = json.loads(block.take())
    assert {*shown} == {*receiver.bodies[0]}
    here = {"run_dir": f"{tmp_path}/run", "host": socket.gethostname()}
    assert {k: str(v).replace("/runs/a", f"{tmp_path}/run") for k, v in (shown | here).items()} == {
        k: str(v) for k, v in receiver.bodies[0].items()
    }
    assert receiver.bodies[0]["host"] == socket.gethostname()
    assert "s3cr3t" not in (tmp_path / "run" / "journal" / "rank-00000.jsonl").read_text()


def test_a_run_that_fails_tells_how(tmp_path: Path, serve: Callable[..., Receiver]) -> None:
    receiver = serve(204)
    journal = RunJournal(tmp_path / "run", report=False, webhook=receiver.url)
    with pytest.raises(RuntimeError):
        trainer(tmp_path, journal).fit(Model(fail_at=3))
    [body] = receiver.bodies
    assert (body["event"], body["status"]) == ("run.ended", "failed")
    assert body["text"].startswith("The run ended as failed at step 3 with RuntimeError. Look: ")
    assert "hunter2" not in json.dumps(body)


@pytest.mark.parametrize("kind", ["hangs", "refuses"])
def test_nobody_at_the_other_end_never_stops_training(
    tmp_path: Path, serve: Callable[..., Receiver], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = serve(0).url if kind == "hangs" else f"http://127.0.0.1:{free_port()}/hook"
    # One try waits longer than the whole test may take: a step that waited for it would be seen.
    journal = RunJournal(tmp_path / "run", report=False, webhook=url, webhook_timeout_seconds=50, webhook_retries=0)
    steps: list[float] = []

    class Clock(Incidents):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            super().on_train_batch_end(trainer)
            steps.append(time.monotonic())

    with caplog.at_level(logging.WARNING, logger="lightning_sentinel"):
        fit = trainer(tmp_path, journal, Clock(2, 4))
        fit.fit(Model())
    assert fit.global_step == 6
    assert steps[-1] - steps[0] < 40
    [told] = [r.message for r in caplog.records if "alerts did not reach" in r.message]
    reason = "no answer within 5 s" if kind == "hangs" else "ConnectionRefusedError"
    assert told == f"2 of 2 alerts did not reach the webhook at 127.0.0.1: {reason}"


def test_no_answer_in_time_is_a_try_that_failed(serve: Callable[..., Receiver]) -> None:
    receiver = serve(0, 200)
    hook = Webhook(receiver.url, timeout_seconds=0.3, retries=1, backoff_seconds=0.05)
    hook.send({"text": "a"})
    hook.close(wait_seconds=30)
    assert [b["text"] for b in receiver.bodies] == ["a", "a"]
    assert receiver.times[1] - receiver.times[0] > 0.3
    assert (hook.sent, hook.last_error) == (1, "")


def test_it_tries_again_with_growing_pauses(serve: Callable[..., Receiver]) -> None:
    receiver = serve(503, 429, 200)
    hook = Webhook(receiver.url, backoff_seconds=0.2)
    hook.send({"text": "a"})
    hook.close(wait_seconds=30)
    assert (hook.sent, hook.dropped, len(receiver.bodies)) == (1, 0, 3)
    first, second = receiver.times[1] - receiver.times[0], receiver.times[2] - receiver.times[1]
    assert first >= 0.2
    assert second >= 0.4


def test_a_refusal_is_final_and_said_once(serve: Callable[..., Receiver], caplog: pytest.LogCaptureFixture) -> None:
    receiver = serve(404)
    hook = Webhook(receiver.url, backoff_seconds=0.01)
    for n in range(3):
        hook.send({"text": str(n)})
    hook.close(wait_seconds=30)
    assert (hook.sent, hook.dropped, len(receiver.bodies)) == (0, 3, 3)  # one try each
    assert [r.message for r in caplog.records] == [
        "An alert did not reach the webhook at 127.0.0.1: HTTP 404. Training goes on.",
        "3 of 3 alerts did not reach the webhook at 127.0.0.1: HTTP 404",
    ]


def test_a_full_queue_drops_and_counts(serve: Callable[..., Receiver]) -> None:
    hook = Webhook(serve(0).url, timeout_seconds=50, retries=0, capacity=2)
    begun = time.monotonic()
    for n in range(20):
        hook.send({"text": str(n)})
    assert time.monotonic() - begun < 10
    hook.close(wait_seconds=0.1)
    assert hook.dropped >= 17  # one is on its way, two wait


def test_what_is_worth_an_alert() -> None:
    run = Path("/runs/a")
    assert alert_of("step", 1, {}, run) is None
    assert alert_of("incident.updated", 1, {"incident": {"number": 1}}, run) is None
    assert alert_of("run.ended", 1, {"status": "finished"}, run) is None
    stopped = alert_of("action.stop", 9, {"incident": 4, "reason": "budget spent"}, run)
    assert stopped is not None
    assert stopped["text"] == "Training is stopped at step 9: budget spent. Look: lightning-sentinel report /runs/a"


@pytest.mark.parametrize("url", ["", "hooks.example/x", "ftp://host/x", "file:///etc/passwd", "https://"])
def test_an_address_that_is_none_is_refused_at_the_start(url: str) -> None:
    with pytest.raises(ValueError, match="webhook must be an address"):
        RunJournal(webhook=url)


def test_addresses_are_secrets() -> None:
    assert redact({"webhook": "https://h.example/x", "webhook_retries": 3, "slack_webhook_url": "https://y"}) == {
        "webhook": "[redacted]",
        "webhook_retries": 3,
        "slack_webhook_url": "[redacted]",
    }
    text = "python train.py callbacks.run_journal.webhook=https://hooks.example/T0/B1/xyz seed=1"
    assert redact(text) == "python train.py callbacks.run_journal.webhook=https://hooks.example/[redacted] seed=1"
    assert redact("posted to https://hooks.slack.com/services/T0/B1/xyz") == (
        "posted to https://hooks.slack.com/services/[redacted]"
    )
