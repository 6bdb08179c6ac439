"""The public surface. A change here is a change for users: it belongs into the changelog."""

from __future__ import annotations

import importlib
import inspect

import pytest

import lightning_sentinel

CALLBACKS = """
BatchValidator(vocabulary_size, ignore_index, sample_id_fn, targets_key, repeats, known_ids, neutralise, max_remembered)
DeepProbe(every_n_steps, incidents, horizon_steps, max_modules, max_incidents)
DivergenceDetector(threshold, shift, clip, margin, min_shift, min_relative, sigma_floor, window, warmup, short,
    lost_relative, lost_sigma, block, blocks, trend_z, hold)
FaultInjector(faults, journal, sample_id_fn)
ForensicCheckpoint(every_n_steps, keep, keep_every_tokens, probation_steps, resume, write_lightning_ckpt,
    save_on_exception, config, run_dir, compare_steps)
IncidentResponse(mode, ladders, budgets, budget_steps, probation_steps, recovered_z, lr_factor, lr_steps, lr_permanent,
    triage, max_forwards, max_seconds, capture_state, capture_batch, bundle_bytes, exit_on_stop, hardware_counters)
LossScaleMonitor(max_consecutive, max_without_step, floor)
NonFiniteTracer(boundaries, every_n, anomaly, max_traces, replay)
Preflight(strict, skip, vocabulary_size, checkpoints)
RankOutlierDetector(threshold, false_per_step, tail, cold_threshold, cold_relative, min_jump, min_relative, warmup,
    memory, max_named, straggler, straggler_steps)
RankTelemetry(update_norm_every_n_steps, vocabulary_size, token_count_fn, sample_id_fn, sources, sync, gather_within)
ReplicaConsistency(every_n_steps, buffers, optimizer)
Rollback(every_n_steps, keep, retry, cursor)
RunJournal(run_dir, step_interval, report, report_every_seconds, config, max_bytes, progress_bar, log_image, webhook,
    webhook_timeout_seconds, webhook_retries)
SpikeDetector(threshold, tail, gross, gross_tail, gross_relative, min_jump, min_relative, confirm, window, level_window,
    tail_window, warmup, explosion, scale_floor, recover_after, shift_after, patience, restart_window)
default_callbacks(run_dir, policy, vocabulary_size, sample_id_fn, checkpoint_every_n_steps)
infra_event(trainer, kind, text)
replay_incident(run_dir, incident, model, datamodule, dtype, device, module, ranks, rebuild_with, app_dirs, sample_id_fn,
    drill, update, progress)
run_canary(train, run_dir, drill, warm_steps, vocabulary_size, sample_id_fn, progress)
"""

# What else users import, by module.
OTHERS = {
    "config": ["build(node, where)", "build_callbacks(cfg, where)", "suggest_names(config_dir, config_name)"],
    "data": ["MixtureLoader", "QuarantineLedger", "sample_ids(batch, sample_id_fn)"],
    "data.mixture": ["MixtureLoader"],
    "data.quarantine": ["QuarantineLedger"],
    "journal": ["read_journal"],
    "probes": ["Probe", "probe_of(module)", "register_probe(kinds)"],
    "faults": [
        "BadRank",
        "CorruptBatch",
        "CursorRewind",
        "Fp16Collapse",
        "Fp16Overflow",
        "LearningRateSpike",
        "LevelShift",
        "NanBackward",
        "NanForward",
        "NoSupervisedTokens",
        "OptimizerCorruption",
        "OutOfRangeToken",
        "SchedulerReset",
        "TransientNan",
    ],
}


def described(name: str, value: object) -> str:
    assert callable(value)
    return f"{name}({', '.join(inspect.signature(value).parameters)})"


def test_names_and_signatures_of_the_package() -> None:
    expected = [" ".join(entry.split()) for entry in CALLBACKS.strip().replace("\n    ", " ").splitlines()]
    names = [name for name in lightning_sentinel.__all__ if name != "__version__"]
    assert [described(name, getattr(lightning_sentinel, name)) for name in names] == expected
    assert lightning_sentinel.__all__ == sorted([*names, "__version__"])
    assert dir(lightning_sentinel) == lightning_sentinel.__all__


def test_names_of_the_modules_that_users_import() -> None:
    for module, entries in OTHERS.items():
        for entry in entries:
            name = entry.partition("(")[0]
            value = getattr(importlib.import_module(f"lightning_sentinel.{module}"), name)
            assert entry in (name, described(name, value))
            assert inspect.getdoc(value), entry


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'lightning_sentinel' has no attribute 'SpikeDetecter'$"):
        _ = lightning_sentinel.SpikeDetecter
