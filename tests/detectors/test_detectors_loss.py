"""Spike, Divergence, NonFinite and LossScale: tables of numbers and verdicts."""

import copy
import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sentinel.detectors import Divergence, ForecastBand, LossScale, NonFinite, RankOutlier, Spike
from lightning_sentinel.detectors.divergence import Baseline, noise_of
from lightning_sentinel.incidents import Finding, FindingKind, Severity
from lightning_sentinel.record import SIGNAL_INDEX, StepRecord

SIGMA = 0.05


def feed(detector, losses, start=0, **kwargs):
    """Findings of a detector on a list of losses, one record each."""
    found = []
    for i, loss in enumerate(losses):
        found += detector.observe(StepRecord.from_losses(start + i, [float(loss)], **kwargs))
    return found


def plateau(n, level=2.0, sigma=SIGMA, seed=0):
    return level + sigma * np.random.default_rng(seed).standard_normal(n)


def brief(findings):
    return [(f.step, str(f.kind), str(f.severity)) for f in findings]


# -- spike ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("jump", "verdict"),
    [
        (3 * SIGMA, []),
        (6 * SIGMA, []),
        (1.5, [(300, "spike", "incident")]),
        (3.0, [(300, "spike", "incident")]),
    ],
)
def test_a_single_jump(jump, verdict):
    losses = plateau(301, level=2.5)
    losses[300] = 2.5 + jump
    assert brief(feed(Spike(), losses)) == verdict


def test_a_jump_between_alarm_and_incident():
    losses = plateau(301)
    losses[300] = 2.55
    [finding] = feed(Spike(gross=15.0), losses)
    assert (finding.severity, finding.since_step, finding.unit) == (Severity.ALARM, 300, "robust sigma")
    assert finding.score >= finding.threshold >= 8.0
    assert "Loss 2.5500 at step 300 is" in finding.message
    jump = 2.55 - finding.evidence["level_before"]
    assert finding.score == pytest.approx(jump / finding.evidence["sigma"])


def test_life_of_a_spike_that_recovers():
    losses = plateau(330)
    losses[300:305] += [0.8, 1.2, 1.0, 0.9, 0.8]
    found = feed(Spike(), losses)
    assert [(f.step, str(f.severity)) for f in found] == [(300, "incident"), (307, "event")]
    assert found[1].evidence["life"] == "recovered"
    assert found[1].evidence["steps"] == 5
    assert found[1].evidence["peak_step"] == 301
    assert found[1].since_step == 300


def test_a_spike_that_stays_is_named_a_level_shift():
    losses = plateau(320)
    losses[300:] += 0.8
    found = feed(Spike(), losses)
    assert brief(found)[:2] == [(300, "spike", "incident"), (305, "level_shift", "incident")]
    assert found[1].evidence["life"] == "escalated"
    assert found[1].evidence["level_before"] == pytest.approx(2.0, abs=0.05)


def test_a_new_level_is_learned():
    losses = plateau(500)
    losses[300:] += 0.8
    detector = Spike()
    found = feed(detector, losses)
    assert [f.kind for f in found if f.step > 310] == []
    assert not detector.is_open
    assert detector.expected()[0] == pytest.approx(2.8, abs=0.1)


def test_a_second_jump_on_the_flank_is_stated():
    losses = plateau(330)
    losses[300:330] += np.linspace(2.0, 1.0, 30)
    losses[315:318] += 3.0
    found = [f for f in feed(Spike(), losses) if f.kind is FindingKind.SPIKE]
    assert [f.step for f in found][:2] == [300, 315]


def test_no_alarm_in_the_descent():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        t = np.arange(250)
        losses = 2.4 + 3.1 * np.exp(-t / 35) + 0.1 * rng.standard_normal(250)
        assert feed(Spike(), losses) + feed(Divergence(), losses) == []


def test_an_explosion_in_the_first_ten_steps():
    found = feed(Spike(), [5.5, 5.4, 5.3, 5.2, 5.1, 90.0, 4000.0, 1e9])
    assert brief(found)[0] == (5, "spike", "incident")
    assert found[0].threshold == Spike.explosion
    assert "90 at step 5 is 16.36 times the largest of the last 5 losses, 5.5" in found[0].message


def test_an_explosion_after_a_short_warm_up_is_one_too():
    # From so short a history, a tail extrapolated to one step in ten million reaches further than the explosion.
    rng = np.random.default_rng(24)
    spike = Spike()
    losses = 2.7 + 2.5 * np.exp(-np.arange(60) / 8) + 0.2 * rng.standard_t(5, 60)
    feed(spike, losses)
    reach = spike.tail_bound(spike.gross_tail)
    (finding,) = feed(spike, [8.5], start=60)
    assert finding.severity is Severity.INCIDENT
    assert 2 * spike.threshold < finding.score < reach
    assert feed(spike, [2.7] * 4, start=61)[-1].evidence["life"] == "recovered"


def test_restart_aligned():
    losses = plateau(320)
    losses[310] += 2.0
    detector = Spike()
    feed(detector, losses[:300])
    [finding] = feed(detector, losses[300:311], start=300, restart_step=300)
    assert finding.restart_aligned
    detector = Spike()
    [finding] = feed(detector, losses[:311], restart_step=100)
    assert not finding.restart_aligned


def test_nonfinite_losses_never_enter_the_history():
    losses = plateau(200)
    with_nan = np.insert(losses, 100, [math.nan, math.inf, -math.inf])
    clean, dirty = Spike(), Spike()
    feed(clean, losses)
    feed(dirty, with_nan)
    assert clean.state_dict() == dirty.state_dict()


def test_a_run_with_heavy_tails_sets_its_own_measure():
    rng = np.random.default_rng(3)
    heavy = Spike()
    feed(heavy, 2.0 + 0.03 * rng.standard_t(3, 2000))
    normal = Spike()
    feed(normal, plateau(2000, sigma=0.03))
    assert normal.tail_bound(1e-7) < 20
    assert heavy.tail_bound(1e-7) > 30


# -- divergence -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phi", "sigma_error"), [(0.0, 0.1), (0.5, 0.1), (0.9, 0.25)])
def test_noise_of_ar1(phi, sigma_error):
    rng = np.random.default_rng(1)
    x = np.empty(2048)
    last = 0.0
    for i in range(2048):
        last = phi * last + math.sqrt(1 - phi * phi) * SIGMA * rng.standard_normal()
        x[i] = last + 2.0 + 3.0 * (1 + i) ** -0.3
    sigma, found = noise_of(x[300:])
    assert found == pytest.approx(phi, abs=0.07)
    assert sigma == pytest.approx(SIGMA, rel=sigma_error)


def test_baseline_of_a_plateau():
    base = Baseline.fit(plateau(1000), margin=2.0, floor=0.002)
    assert base.median == pytest.approx(2.0, abs=0.03)
    assert base.median < base.level < base.median + 0.03


def test_a_small_level_shift_is_seen_and_dated():
    losses = plateau(1200)
    losses[1000:] += 2 * SIGMA
    [finding] = feed(Divergence(), losses)
    assert finding.kind is FindingKind.LEVEL_SHIFT
    assert 1005 <= finding.step <= 1040
    assert abs(finding.since_step - 1000) <= 6
    assert finding.evidence["level_before"] == pytest.approx(2.0, abs=0.03)
    assert finding.evidence["level_now"] == pytest.approx(2.1, abs=0.04)
    assert finding.score >= finding.threshold == Divergence.threshold


def test_a_slow_rise_is_a_divergence_with_its_slope():
    losses = plateau(192, sigma=0.002) + 0.0005 * np.arange(192)
    detector = Divergence(threshold=1e9, lost_relative=10.0)
    found = feed(detector, losses)
    assert [f.kind for f in found] == [FindingKind.DIVERGENCE]
    assert found[0].evidence["slope_per_1000_steps"] == pytest.approx(0.5, rel=0.05)
    assert found[0].evidence["best"] == pytest.approx(2.0, abs=0.01)


def test_lost_ground_before_there_is_a_baseline():
    losses = [8.9, 7.2, 6.8, 6.5, 6.0, 5.9, 6.0, 5.9, 6.0, 5.9, 6.0, 5.9, 7.0, 8.0, 8.2, 8.2, 8.1, 8.2, 8.3, 8.2, 8.2]
    [finding] = feed(Divergence(), losses)
    assert finding.kind is FindingKind.LEVEL_SHIFT
    assert finding.evidence["level_before"] == pytest.approx(5.95, abs=0.1)


def test_a_recovering_spike_is_no_level_shift():
    losses = plateau(400)
    losses[300:320] += 3.0 * 0.75 ** np.arange(20)
    assert feed(Divergence(), losses) == []


# -- shared properties ------------------------------------------------------------------------------------------


def messy(seed):
    rng = np.random.default_rng(seed)
    losses = 2.0 + 3.0 * (1 + np.arange(400)) ** -0.4 + SIGMA * rng.standard_normal(400)
    losses[150] += 3.0
    losses[200:206] += 0.7
    losses[300:] += 0.4
    losses[250] = math.nan
    return losses


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 399), st.sampled_from([Spike, Divergence]))
def test_state_round_trip_in_mid_stream(seed, cut, kind):
    losses = messy(seed)
    whole = kind()
    first = feed(whole, losses[:cut])
    state = copy.deepcopy(whole.state_dict())
    text = json.loads(json.dumps(state))
    rest = feed(whole, losses[cut:], start=cut)
    for saved in (state, text):
        other = kind()
        other.load_state_dict(saved)
        assert feed(other, losses[cut:], start=cut) == rest
        assert repr(other.state_dict()) == repr(whole.state_dict())
    # A detector that is put back forgets what came after.
    whole.load_state_dict(state)
    assert feed(whole, losses[cut:], start=cut) == rest
    assert all(isinstance(f, Finding) for f in first)


@pytest.mark.parametrize("kind", [Spike, Divergence])
def test_a_state_is_a_copy(kind):
    detector = kind()
    losses = messy(1)
    feed(detector, losses[:151])
    state = detector.state_dict()
    before = copy.deepcopy(state)
    feed(detector, losses[151:], start=151)
    assert repr(state) == repr(before)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.125, 0.5, 2.0, 16.0]))
def test_the_unit_of_the_loss_does_not_matter(seed, factor):
    losses = messy(seed)
    for kind, field in ((Spike, "min_jump"), (Divergence, "min_shift")):
        plain = brief(feed(kind(**{field: 0.0}), losses))
        assert brief(feed(kind(**{field: 0.0}), losses * factor)) == plain


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Spike(threshold=-1.0), "Spike: threshold must be greater than 0, found -1.0."),
        (lambda: Spike(gross=0.0), "Spike: gross must be greater than 0, found 0.0."),
        (lambda: Spike(window=3), "Spike: window must be at least 16, found 3."),
        (lambda: Spike(tail=2.0), "Spike: tail must be greater than 0 and at most 1, found 2.0."),
        (lambda: Divergence(threshold=0.0), "Divergence: threshold must be greater than 0, found 0.0."),
        (lambda: Divergence(blocks=2), "Divergence: blocks must be at least 8, found 2."),
        (lambda: RankOutlier(straggler=1.0), "RankOutlier: straggler must be greater than 1, found 1.0."),
        (lambda: RankOutlier(warmup=1.5), "RankOutlier: warmup must be a whole number, found 1.5."),
        (lambda: LossScale(max_consecutive=1), "LossScale: max_consecutive must be at least 2, found 1."),
        (lambda: LossScale(floor=0.0), "LossScale: floor must be greater than 0, found 0.0."),
    ],
)
def test_a_value_out_of_bounds_names_field_found_and_bound(make, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        make()


# -- non-finite -------------------------------------------------------------------------------------------------


def record(step=0, ranks=1, **columns):
    made = StepRecord.from_losses(step, [2.0] * ranks)
    for name, values in columns.items():
        made.values[:, SIGNAL_INDEX[name]] = values
    return made


def test_nonfinite_loss_names_its_ranks():
    [finding] = NonFinite().observe(record(7, 4, nonfinite_loss=[0, 2, 0, 0]))
    assert finding.kind is FindingKind.NONFINITE_LOSS
    assert (finding.ranks, finding.culprits, finding.score, finding.severity) == ((1,), ("rank:1",), 2.0, "incident")
    assert finding.message == "The loss is NaN or infinite at step 7 on rank 1 of 4 (2 micro-batches; expected 0)."


@pytest.mark.parametrize(
    ("columns", "kinds"),
    [
        ({}, []),
        ({"nonfinite_grads": 1}, ["nonfinite_grads"]),
        ({"nonfinite_grads": 1, "loss_scale": 65536}, []),
        ({"nonfinite_grads": 1, "nonfinite_loss": 1, "loss_scale": 65536}, ["nonfinite_loss", "nonfinite_grads"]),
        ({"missing_grads": 1}, ["no_gradient"]),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_nonfinite(columns, kinds, ranks):
    assert [str(f.kind) for f in NonFinite().observe(record(0, ranks, **columns))] == kinds


# -- loss scale -------------------------------------------------------------------------------------------------


def scale_findings(steps, **arguments):
    """Findings on a list of (loss scale, overflow)."""
    detector = LossScale(**arguments)
    return [
        (i, str(f.kind), f.evidence.get("reason"))
        for i, (scale, overflow) in enumerate(steps)
        for f in detector.observe(record(i, loss_scale=scale, nonfinite_grads=float(overflow)))
    ]


def test_one_overflow_is_an_event_that_explains_itself():
    detector = LossScale()
    assert detector.observe(record(0, loss_scale=65536)) == []
    [finding] = detector.observe(record(1, loss_scale=65536, nonfinite_grads=1))
    assert (str(finding.kind), str(finding.severity)) == ("scaler_overflow", "event")
    assert "65,504" in finding.message
    assert "65,536" in finding.message


@pytest.mark.parametrize(
    ("steps", "collapse"),
    [
        ([(65536, False)] + [(65536 / 2**i, True) for i in range(5)], []),
        ([(65536, False)] + [(65536 / 2**i, True) for i in range(6)], [(6, "consecutive")]),
        # looking for the first scale is no collapse until no step has been applied for long
        ([(2.0 ** (40 - i), True) for i in range(12)], []),
        ([(2.0 ** (40 - i), True) for i in range(20)], [(19, "without_step")]),
        ([(4, False), (4, True), (2, True), (1, True)], [(3, "floor")]),
        ([(2.0**15, i % 2 == 0) for i in range(60)], []),
        ([(1.0, False)] * 30, []),
    ],
)
def test_collapses(steps, collapse):
    found = scale_findings(steps)
    assert [(i, reason) for i, kind, reason in found if kind == "scale_collapse"] == collapse


def test_loss_scale_state_round_trip():
    detector = LossScale()
    for i in range(4):
        detector.observe(record(i, loss_scale=1024, nonfinite_grads=float(i > 0)))
    other = LossScale()
    other.load_state_dict(json.loads(json.dumps(detector.state_dict())))
    for i in range(4, 9):
        made = record(i, loss_scale=1024, nonfinite_grads=1.0)
        assert other.observe(made) == detector.observe(made)
    assert other.state_dict() == detector.state_dict()


# -- forecast ---------------------------------------------------------------------------------------------------


def test_forecast_allows_for_the_descent():
    steps = np.arange(100, 200)
    losses = 5.0 - 0.5 * np.log(steps + 1) + 0.02 * np.random.default_rng(0).standard_normal(100)
    band = ForecastBand.fit(zip(steps.tolist(), losses.tolist(), strict=True))
    later = 5.0 - 0.5 * math.log(300)
    assert band.slope == pytest.approx(-0.5, abs=0.08)
    assert band.z(299, band.level) == 0.0
    assert abs(band.z(299, later)) < 3
    assert band.z(299, band.level + 0.5) > 15
    assert band.z(299, later - 1.0) < -15
    assert band.z(299, math.nan) == math.inf
    assert ForecastBand.from_state_dict(band.state_dict()) == band


def test_forecast_needs_history():
    with pytest.raises(ValueError, match=r"needs at least 5 finite losses, found 1\."):
        ForecastBand.fit([(0, 2.0), (1, math.nan)])


@pytest.mark.parametrize(("samples", "most"), [(4, 5), (16, 0)])
def test_small_batches_with_heavy_tails_seldom_look_like_an_explosion_while_warming_up(samples, most):
    # Mean squared errors of a batch: chi-square over its degrees of freedom, around a falling level.
    alarmed = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        losses = (4 * np.exp(-np.arange(40) / 60) + 0.01) * rng.chisquare(samples, 40) / samples
        detector = Spike()
        findings = [f for t, x in enumerate(losses) for f in detector.observe(StepRecord.from_losses(t, [float(x)]))]
        alarmed += any(f.severity == Severity.INCIDENT for f in findings)
    assert alarmed <= most


def test_an_explosion_while_warming_up_is_stated_once_and_at_once():
    detector = Spike()
    findings = []
    for step, loss in enumerate([5.5, 5.3, 5.2, 5.0, 4.9, 4.7, 4.6, 30.0, 31.0, 60.0, 29.0, 4.5, 4.4, 4.4, 4.3]):
        findings += detector.observe(StepRecord.from_losses(step, [loss]))
    assert [(f.step, f.severity) for f in findings] == [(7, Severity.INCIDENT), (13, Severity.EVENT)]
    assert "5.45 times the largest of the last 7 losses, 5.5 (limit 2.5 during warm-up)" in findings[0].message


def test_a_loss_that_passes_through_zero_has_no_explosion_by_ratio():
    detector = Spike()
    losses = [0.4, -0.9, 0.1, -0.3, 0.2, -0.6, 1.1, -0.2, 0.3]
    assert [f for t, x in enumerate(losses) for f in detector.observe(StepRecord.from_losses(t, [x]))] == []
