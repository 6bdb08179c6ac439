"""``lightning-sentinel scan``: the usual logs, what is wrong with them, and what comes out."""

import json
import threading
import time

import numpy as np
import pytest

from lightning_sentinel import scan
from lightning_sentinel.cli import main as cli


def curve(n=400, spike=None, shift=None, seed=0):
    losses = 2.0 + 2.0 * (1 + np.arange(n)) ** -0.5 + 0.03 * np.random.default_rng(seed).standard_normal(n)
    if spike is not None:
        losses[spike] += 3.0
    if shift is not None:
        losses[shift:] += 0.6
    return losses.tolist()


def write_csv(path, losses, header="step,loss", steps=None):
    steps = range(len(losses)) if steps is None else steps
    path.write_text(header + "\n" + "".join(f"{s},{v}\n" for s, v in zip(steps, losses, strict=True)))
    return path


def test_a_healthy_log(tmp_path, capsys):
    assert cli(["scan", str(write_csv(tmp_path / "a.csv", curve()))]) == 0
    text = capsys.readouterr().out
    assert "csv, 400 rows, steps 0 to 399 (step=step, loss=loss, grad_norm=-, loss_scale=-)" in text
    assert "nothing found" in text


def test_a_spike_through_the_command_line(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", curve(spike=300))
    assert cli(["scan", str(path)]) == 1
    text = capsys.readouterr().out
    assert "incident 1: spike at step 300 (since step 300, quiet since step 327)" in text
    assert "robust sigma above the expected" in text


def test_json_for_machines(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", curve(shift=300))
    assert cli(["scan", str(path), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == 1
    assert data["found"] is True
    [file] = data["files"]
    assert (file["rows"], file["first_step"], file["last_step"], file["restarts"]) == (400, 0, 399, [])
    [incident] = file["incidents"]
    assert incident["severity"] == "incident"
    assert "level_shift" in incident["kinds"]
    assert incident["since_step"] == pytest.approx(300, abs=10)


@pytest.mark.parametrize(
    ("header", "columns"),
    [
        ("iteration,train/loss", "step=iteration, loss=train/loss"),
        ("global_step,val_loss,train_loss", "step=global_step, loss=train_loss"),
        ("Step,Training Loss", "step=Step, loss=Training Loss"),
        ("x,my_loss_value,gnorm", "step=-, loss=my_loss_value, grad_norm=gnorm"),
    ],
)
def test_columns_are_guessed_and_shown(tmp_path, capsys, header, columns):
    names = header.split(",")
    loss_at = next(
        i for i, n in enumerate(names) if n in ("train/loss", "train_loss", "Training Loss", "my_loss_value")
    )
    lines = [header]
    for step, loss in enumerate(curve(60)):
        cells = [str(step)] + ["1.0"] * (len(names) - 1)
        cells[loss_at] = str(loss)
        lines.append(",".join(cells))
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    assert cli(["scan", str(path)]) == 0
    assert columns in capsys.readouterr().out


def test_a_column_can_be_set_and_a_wrong_one_is_named(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", curve(60), header="when,badness")
    assert cli(["scan", str(path)]) == 2
    assert "found no loss among the columns 'when', 'badness'; name it with --loss COLUMN." in capsys.readouterr().err
    assert cli(["scan", str(path), "--loss", "badnes"]) == 2
    assert "found no column 'badnes' among 'when', 'badness'; nearest: 'badness'." in capsys.readouterr().err
    assert cli(["scan", str(path), "--loss", "badness", "--step", "when"]) == 0


def test_broken_lines_are_numbered_and_skipped(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", curve(60))
    lines = path.read_text().split("\n")
    lines[10] = "9,what"
    lines[20] = "19,2.0,5"
    lines[30] = "inf,2.0"
    path.write_text("\n".join(lines))
    assert cli(["scan", str(path)]) == 0
    text = capsys.readouterr().out
    assert "57 rows" in text
    assert "skipped  line 11: found 'what', expected a number; skipped" in text
    assert "skipped  line 21: found 3 cells, expected 2; skipped" in text
    assert "skipped  line 31: the step is inf; skipped" in text


def test_empty_files(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("")
    assert cli(["scan", str(tmp_path / "a.csv")]) == 2
    assert "a.csv is empty: found no line, expected a header and rows." in capsys.readouterr().err
    assert cli(["scan", str(tmp_path / "missing.csv")]) == 2
    assert "There is no" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nan", "NaN", "inf", "-Infinity"])
def test_a_loss_that_is_no_number(tmp_path, text):
    losses = curve(60)
    path = tmp_path / "a.csv"
    path.write_text("step,loss\n" + "".join(f"{i},{text if i == 5 else v}\n" for i, v in enumerate(losses)))
    result = scan.scan(path)
    assert [(e.opened_step, str(e.kind)) for e in result.episodes] == [(5, "nonfinite_loss")]
    assert result.rows == 60


def test_an_empty_cell_is_a_row_of_something_else(tmp_path):
    path = tmp_path / "metrics.csv"  # as Lightning writes it: validation rows have no training loss
    lines = ["epoch,step,train_loss_step,val_loss"]
    for i, loss in enumerate(curve(80)):
        lines.append(f"0,{i},{loss},")
        if i % 20 == 19:
            lines.append(f"0,{i},,{loss + 9}")
    path.write_text("\n".join(lines) + "\n")
    result = scan.scan(path)
    assert (result.rows, result.episodes, result.problems) == (80, [], [])
    assert result.columns.loss == "train_loss_step"


def test_steps_that_go_back_are_a_restart(tmp_path, capsys):
    losses = curve(300)
    steps = [*range(200), *range(150, 250)]
    losses[205] += 3.0
    path = write_csv(tmp_path / "a.csv", losses, steps=steps)
    assert cli(["scan", str(path)]) == 1
    assert "restart  the steps go back to 150" in capsys.readouterr().out
    [episode] = scan.scan(path).episodes
    assert episode.opened_step == 155
    assert episode.findings[0].restart_aligned


def test_json_lines(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"config": {"lr": 1e-3}})]
    lines += [json.dumps({"step": i, "loss": v, "grad_norm": 1.0}) for i, v in enumerate(curve(spike=300))]
    lines.insert(50, "{broken")
    path.write_text("\n".join(lines))
    result = scan.scan(path)
    assert result.format == "jsonl"
    assert result.rows == 400
    assert [(p.line, p.reason) for p in result.problems] == [(51, "is not JSON; skipped")]
    assert [e.opened_step for e in result.episodes] == [300]


def test_trainer_state(tmp_path):
    path = tmp_path / "trainer_state.json"
    history = [{"step": i, "loss": v, "grad_norm": 1.0} for i, v in enumerate(curve(spike=300))]
    history.insert(100, {"step": 100, "eval_loss": 99.0})
    path.write_text(json.dumps({"log_history": history, "global_step": 400}, indent=2))
    result = scan.scan(path)
    assert (result.format, result.rows, [e.opened_step for e in result.episodes]) == ("json", 400, [300])


def test_the_suites_own_journal(tmp_path):
    from lightning_sentinel.journal import Journal

    journal = Journal(tmp_path, 0)
    for i, loss in enumerate(curve(spike=300)):
        journal.write("step", step=i, attempt=0, tokens=i, loss=loss, grad_norm=1.0, loss_scale=1.0)
    journal.close()
    result = scan.scan(tmp_path)
    assert (result.format, result.rows, [e.opened_step for e in result.episodes]) == ("journal", 400, [300])


def test_tensorboard_files(tmp_path):
    pytest.importorskip("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for i, loss in enumerate(curve(spike=300)):
            writer.add_scalar("train/loss", loss, i)
            writer.add_scalar("val/loss", 9.0, i)
    result = scan.scan(tmp_path)
    assert (result.format, result.columns.loss, result.rows) == ("tensorboard", "train/loss", 400)
    assert [e.opened_step for e in result.episodes] == [300]


def test_follow_a_growing_file(tmp_path, capsys):
    path = tmp_path / "a.csv"
    losses = curve(spike=300)
    path.write_text("step,loss\n" + "".join(f"{i},{v}\n" for i, v in enumerate(losses[:300])) + "300,")

    def grow():
        time.sleep(0.5)
        with path.open("a") as file:
            file.write(f"{losses[300]}\n" + "".join(f"{300 + i},{v}\n" for i, v in enumerate(losses[301:], start=1)))

    thread = threading.Thread(target=grow)
    thread.start()
    assert cli(["scan", str(path), "--follow", "--idle", "1.5"]) == 1
    thread.join()
    text = capsys.readouterr().out
    assert text.startswith("  incident spike")
    assert "400 rows" in text


def test_a_picture(tmp_path):
    path = write_csv(tmp_path / "a.csv", curve(spike=300))
    assert cli(["scan", str(path), "--png", str(tmp_path / "a.png")]) == 1
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_thresholds_by_their_names_in_hydra(tmp_path, capsys):
    path = write_csv(tmp_path / "a.csv", curve(spike=300))
    quiet = ["--set", "callbacks.spike_detector.threshold=500", "--set", "spike_detector.gross=500"]
    assert cli(["scan", str(path), *quiet]) == 0
    capsys.readouterr()
    for setting, message in (
        ("spike_detector.treshold=9", "there is no argument of spike_detector 'treshold'; nearest: threshold."),
        ("spike_detecto.threshold=9", "there is no detector 'spike_detecto'; nearest: spike_detector."),
        ("threshold=9", "found 'threshold=9', expected DETECTOR.NAME=VALUE, e.g. spike_detector.threshold=10."),
        ("spike_detector.threshold=x", "spike_detector.threshold is 'x', expected a number."),
        ("spike_detector.window=2.5", "spike_detector.window is '2.5', expected a whole number."),
        ("spike_detector.threshold=-1", "Spike: threshold must be greater than 0, found -1.0."),
    ):
        assert cli(["scan", str(path), "--set", setting]) == 2
        assert message in capsys.readouterr().err


def test_watch_is_an_alarm_per_row():
    suite = scan.watch(400)
    alarms = [i for i, loss in enumerate(curve(spike=300)) if suite.update(i, loss, None)]
    assert alarms == [300]
    suite = scan.watch(400)
    assert [i for i, loss in enumerate([5.5, 5.4, float("nan")]) if suite.update(i, loss, 1.0)] == [2]


def test_a_gradient_outlier_that_does_nothing_to_the_loss_is_no_alarm():
    suite = scan.watch(400)
    norms = [1.0] * 400
    norms[250] = 1e4
    assert not any(suite.update(i, loss, g) for i, (loss, g) in enumerate(zip(curve(), norms, strict=True)))


def test_an_incident_that_recovers_is_one(tmp_path):
    losses = curve()
    losses[300:305] = [v + d for v, d in zip(losses[300:305], [0.8, 1.4, 1.2, 0.9, 0.8], strict=True)]
    [episode] = scan.scan(write_csv(tmp_path / "a.csv", losses)).episodes
    assert (episode.opened_step, str(episode.kind), str(episode.severity)) == (300, "spike", "incident")
