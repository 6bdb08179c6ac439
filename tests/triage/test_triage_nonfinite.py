"""The first non-finite value is named: operator, module, phase, sample, micro-batch; or what brought it in."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from triage_models import BAD_STEP, Gate, Net, fingerprint, fit

from lightning_sentinel import IncidentResponse, NonFiniteTracer, RankTelemetry
from lightning_sentinel.context import context_of
from lightning_sentinel.triage.nonfinite import trace_nonfinite

# kind of fault: options of the fit, operator, phase, what must stand in the sentence
FAULTS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "square root": ("root", {}, "aten.sqrt.default", "forward"),
    "square root, accumulation": ("root", {"accumulate_grad_batches": 3}, "aten.sqrt.default", "forward"),
    "square root, manual": ("root", {"manual": True}, "aten.sqrt.default", "forward"),
    "where branch": ("where", {}, "aten.div.Tensor", "backward, SqrtBackward0"),
    "masked row": ("masked row", {}, "aten._softmax.default", "forward"),
    "kernel": ("kernel", {}, "aten.scalar_tensor.default", "backward, NanBackwardBackward"),
    "decay": ("decay", {}, "aten.exp.default", "forward"),
    "fp16": ("fp16 overflow", {"fp16": True}, "aten.addmm.default", "forward"),
    "fp16, manual": ("fp16 overflow", {"fp16": True, "manual": True}, "aten.addmm.default", "forward"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_origin_is_named_and_the_trace_leaves_no_trace(name: str) -> None:
    kind, options, operator, phase = FAULTS[name]
    options = dict(options)
    manual, accumulate = options.pop("manual", False), options.get("accumulate_grad_batches", 1)
    prints = []
    for tracing in (False, True):
        module, gate = Net(kind, manual), Gate(trace_nonfinite if tracing else None)
        prints.append(fingerprint(fit(module, [gate], kind=kind, **options), module))
    assert prints[0] == prints[1]
    report = gate.results[0]
    assert report.step == BAD_STEP
    guilty = "blocks.1.mixer.wide" if kind == "fp16 overflow" else "blocks.1.mixer"
    assert (report.kind, report.name, report.module, report.phase) == ("operator", operator, guilty, phase)
    assert report.samples == (f"s{BAD_STEP * accumulate * 4 + 2}",)
    assert (report.rank, report.ranks, report.micro_batch) == (0, (0,), 0)
    assert report.value is not None
    assert report.value["nonfinite"] >= 1


def test_the_range_that_overflowed_is_evidence() -> None:
    gate = Gate(trace_nonfinite)
    fit(Net("decay"), [gate], kind="decay")
    [report] = gate.results
    assert report.inputs[0]["nonfinite"] == 0
    assert report.inputs[0]["finite_max"] == pytest.approx(465.0)  # 31 x 15 nats of decay against the mask
    assert report.line.startswith("_decay:")


@pytest.mark.parametrize(("what", "kind"), [("parameter", "parameter"), ("buffer", "buffer"), ("batch", "batch")])
def test_values_that_were_given_to_the_step_are_told_from_made_ones(what: str, kind: str) -> None:
    class Spoil(Gate):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2 and what == "batch":
                batch["x"][1, 0] = float("nan")
            elif batch_idx == 2 and what == "parameter":
                pl_module.head.weight.data[0, 3] = float("inf")
            elif batch_idx == 2:
                pl_module.blocks[0].norm.running_var[3] = float("nan")
                pl_module.blocks[0].norm.eval()

    gate = Spoil(trace_nonfinite)
    fit(Net(), [gate], steps=3)
    report = gate.results[0]
    names = {"parameter": "head.weight", "buffer": "blocks.0.norm.running_var", "batch": "x"}
    assert (report.step, report.kind, report.name) == (2, kind, names[what])
    assert report.samples == (("s9",) if what == "batch" else ())
    assert report.reproduced


class Once(Gate):
    """A module whose output is not finite in one forward and never again."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self.fired = 0

        def hook(module: Any, args: Any, output: Any) -> Any:
            if trainer.global_step == BAD_STEP and not self.fired:
                self.fired += 1
                return output / torch.zeros_like(output)
            return output

        pl_module.blocks[2].mixer.register_forward_hook(hook)


@pytest.mark.parametrize(("boundaries", "named"), [("auto", "blocks.2"), (["blocks.*"], "blocks.2.mixer"), ([], "")])
def test_a_value_that_does_not_come_again_is_named_by_the_boundaries(boundaries: Any, named: str) -> None:
    gate, tracer = Once(trace_nonfinite), NonFiniteTracer(boundaries)
    fit(Net(), [tracer, gate])  # the fault's hook is registered after the tracer's
    assert gate.fired == 1
    report = gate.results[0]
    assert (report.kind, report.reproduced) == ("not_reproduced", False)
    assert (report.module, report.rank, report.step) == (named, 0, BAD_STEP)


def test_without_boundaries_the_rank_is_still_known() -> None:
    gate = Once(trace_nonfinite)
    fit(Net(), [gate])
    assert (gate.results[0].kind, gate.results[0].module, gate.results[0].ranks) == ("not_reproduced", "", (0,))


def test_flags_change_nothing_in_a_healthy_run() -> None:
    prints = []
    for callbacks in ([], [NonFiniteTracer()]):
        module = Net()
        prints.append(fingerprint(fit(module, [*callbacks, Gate()]), module))
    assert prints[0] == prints[1]


def test_alone_with_telemetry_the_tracer_traces_by_itself() -> None:
    module, tracer = Net("root"), NonFiniteTracer()
    trainer = fit(module, [tracer, RankTelemetry()], kind="root", steps=4)
    assert [(r.step, r.module, r.samples) for r in tracer.reports] == [(BAD_STEP, "blocks.1.mixer", ("s14",))]
    assert context_of(trainer).record.has_nonfinite


def test_behind_telemetry_it_traces_as_well() -> None:
    tracer = NonFiniteTracer()
    fit(Net("root"), [RankTelemetry(), tracer], kind="root", steps=4)
    assert [r.module for r in tracer.reports] == ["blocks.1.mixer"]


def test_anomaly_mode_gives_the_forward_lines_of_a_backward() -> None:
    tracer = NonFiniteTracer(anomaly=True)
    fit(Net("where"), [tracer, RankTelemetry()], kind="where", steps=4)
    [report] = tracer.reports
    assert report.module == "blocks.1.mixer"
    assert any("z.sqrt()" in line for line in report.origin.traceback)


class Events:
    """A journal in memory."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int, dict[str, Any]]] = []

    def write(self, event: str, *, step: int, attempt: int, tokens: int, **fields: Any) -> None:
        self.lines.append((event, step, fields))

    def flush(self) -> None:
        return None

    def of(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        return [(step, fields) for event, step, fields in self.lines if event == name]


class Listens(L.Callback):
    """Stands first and takes the place of the journal."""

    def __init__(self) -> None:
        self.events = Events()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        context_of(trainer).journal = self.events


class HidesIt(Net):
    """From ``start`` to ``end`` a block's output holds an infinity for one sample, which nothing uses."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.start, self.end = start, end
        self.blocks[1].mixer.register_forward_hook(self.spoil)
        self.blocks[1].register_forward_hook(lambda m, args, output: output.nan_to_num(0.0, 0.0, 0.0))

    def spoil(self, module: Any, args: Any, output: Any) -> Any:
        if self.start <= self.trainer.global_step < self.end:
            keep = torch.ones_like(output)
            keep[1, 0] = 0.0
            return torch.where(keep > 0, output, math.inf)
        return output


@pytest.mark.parametrize("first", ["tracer", "telemetry", "alone"])
@pytest.mark.parametrize("every_n", [1, 2])
def test_a_value_that_reaches_neither_loss_nor_gradient_is_an_alarm(first: str, every_n: int) -> None:
    tracer, telemetry, listens = NonFiniteTracer(["blocks.*"], every_n), RankTelemetry(), Listens()
    callbacks = {"tracer": [tracer, telemetry], "telemetry": [telemetry, tracer], "alone": [tracer]}[first]
    trainer = fit(HidesIt(3, 6), [listens, *callbacks], steps=8)
    [(step, fields)] = listens.events.of("finding")
    found = fields["finding"]
    assert step == found["step"] == (3 if every_n == 1 else 4)
    assert (found["kind"], found["severity"]) == ("nonfinite_activation", "alarm")
    assert found["culprits"] == ("module:blocks.1.mixer",)
    assert found["evidence"]["boundaries"] == ["blocks.1.mixer"]
    assert found["evidence"]["samples"] == [f"s{i}" for i in range(4 * step, 4 * step + 4)]
    assert context_of(trainer).incidents == []
    assert tracer.reports == []


def test_an_alarm_is_stated_again_after_it_was_gone() -> None:
    class Twice(HidesIt):
        def spoil(self, module: Any, args: Any, output: Any) -> Any:
            self.start = 2 if self.trainer.global_step < 4 else 5
            self.end = self.start + 1
            return super().spoil(module, args, output)

    listens = Listens()
    fit(Twice(2, 3), [listens, NonFiniteTracer(["blocks.*"], every_n=1), RankTelemetry()], steps=8)
    assert [step for step, _ in listens.events.of("finding")] == [2, 5]


def test_a_value_that_reaches_the_loss_is_left_to_the_trace() -> None:
    listens, tracer = Listens(), NonFiniteTracer()
    fit(Net("root"), [listens, tracer, RankTelemetry()], kind="root", steps=4)
    kinds = [f["finding"]["kind"] for _, f in listens.events.of("finding")]
    assert "nonfinite_activation" not in kinds
    assert len(tracer.reports) == 1


class Skips(L.Callback):
    """Keeps updates that are not finite out of the weights."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if any(not p.grad.isfinite().all() for p in pl_module.parameters() if p.grad is not None):
            optimizer.zero_grad()


@pytest.mark.parametrize(("accumulate", "manual"), [(1, False), (2, False), (1, True)])
def test_the_step_after_a_non_finite_one_is_armed_where_nothing_is_replayed(accumulate: int, manual: bool) -> None:
    class Again(Net):
        """The gradient of the square root at zero, in every step from the bad one to the next."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["x"][:, -1] = float(self.trainer.global_step in (3, 4))
            return super().training_step(batch, batch_idx)

    prints, listens, tracer = [], Listens(), NonFiniteTracer(anomaly=True, replay=False)
    for callbacks in ([RankTelemetry(), Skips()], [listens, tracer, RankTelemetry(), Skips()]):
        module = Again("where", manual)
        trainer = fit(module, callbacks, steps=8, accumulate_grad_batches=accumulate)
        prints.append(fingerprint(trainer, module)[:-1])  # the last is where the capture sits
    assert prints[0] == prints[1]
    assert tracer.reports == []
    (first, found), (second, finite) = listens.events.of("triage.anomaly")
    assert (first, found["found"], second, finite["found"]) == (4, True, 5, False)
    assert found["node"] == "SqrtBackward0"
    assert "z.sqrt()" in found["lines"][-1]
    assert (found["micro_batch"], found["boundary"]) == (0, "")
    assert not torch.is_anomaly_enabled()


def test_an_armed_step_also_names_the_first_bad_boundary() -> None:
    class Again(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            batch["x"][:, -1] = float(self.trainer.global_step >= 3)
            return super().training_step(batch, batch_idx)

    listens = Listens()
    tracer = NonFiniteTracer(["blocks.*.mixer"], anomaly=True, replay=False, max_traces=1)
    callbacks = [listens, tracer, RankTelemetry(), Skips()]
    fit(Again("root"), callbacks, steps=7)
    [(step, found)] = listens.events.of("triage.anomaly")  # as often as max_traces says
    assert (step, found["boundary"]) == (4, "blocks.1.mixer")


def test_without_a_replay_the_verdict_is_open() -> None:
    tracer = NonFiniteTracer(replay=False)
    callbacks = [tracer, RankTelemetry(), IncidentResponse("guard")]
    trainer = fit(Net("root"), callbacks, kind="root", steps=5)
    [incident] = context_of(trainer).incidents
    assert str(incident.verdict.kind) == "undetermined"
    assert incident.verdict.sentence == (
        "The step could not be replayed: NonFiniteTracer was told not to replay (replay=False)."
    )


def test_state_that_is_not_finite_is_found_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    class Spoilt(Net):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight.data[0, 1] = float("nan")
            self.register_buffer("mask", torch.full((2, 2), float("-inf")))  # intended

    found: list[Any] = []

    class Look(Gate):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            found.extend(context_of(trainer).scratch["start_findings"])
            super().on_before_optimizer_step(trainer, pl_module, optimizer)

    with caplog.at_level("WARNING", logger="lightning_sentinel"):
        fit(Spoilt(), [NonFiniteTracer(), Look()], steps=1)
    [finding] = found
    assert finding.culprits == ("parameter:head.weight",)
    message = "The parameter head.weight holds 1 non-finite of 16 values before the first step; expected none."
    assert finding.message.startswith(message)
    assert message in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"boundaries": "layers.*"}, r"boundaries is 'layers.\*', expected 'auto' or a list of module path patterns"),
        ({"every_n": 0}, "every_n must be at least 1 or None, found 0"),
        ({"max_traces": -1}, "max_traces must be at least 0, found -1"),
    ],
)
def test_options_out_of_bounds(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NonFiniteTracer(**options)
