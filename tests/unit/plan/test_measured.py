"""A plan beside a capture: the join by class, and shares fitted so that a plan meets its run."""

import dataclasses
import json
import math

import numpy as np
import pytest
from tests.unit.profile.captured import Timed, captured, operation

from fornax.config import ConfigError
from fornax.hlo import calibration_of
from fornax.models import DecoderConfig
from fornax.plan.measured import beside, calibrated, fit, write_calibration
from fornax.plan.report import read_json, render_table, write_json
from fornax.plan.topology import parse_topology
from fornax.plan.train import plan_train
from fornax.train import TrainConfig

STEPS = 12
SOURCES = {
    "mlp": ("fornax/models/mlp.py:52 (MLP.__call__)", "matmul"),
    "attention_projections": ("fornax/models/attention.py:78 (Attention.__call__)", "matmul"),
    "attention": ("fornax/models/attend.py:77 (attend_uncached)", "attention"),
    "logits_loss": ("fornax/train/tasks/pretrain.py:218 (next_token_loss)", "matmul"),
    "optimizer": ("fornax/optim/build.py:69 (Built.update)", "elementwise"),
    "norms_elementwise": ("fornax/models/norm.py:50 (RMSNorm.__call__)", "elementwise"),
}


@pytest.fixture(scope="module")
def config():
    model = DecoderConfig(hidden_size=2048, intermediate_size=8192, num_layers=4, num_heads=16)
    return TrainConfig(model=model, batch_size=8, seq_len=2048)


@pytest.fixture(scope="module")
def topology():
    return parse_topology("h100:1")


@pytest.fixture(scope="module")
def plan(config, topology):
    return plan_train(config, topology, name="run")


def ran(plan, factors, platform="gpu"):
    """A capture whose classes took the plan's seconds times a factor, each in two operations."""
    parts = []
    for row in plan.main.work:
        if row.name not in SOURCES:
            continue
        source, category = SOURCES[row.name]
        took = 1e9 * row.seconds * factors.get(row.name, 1.0) / 2
        for half in range(2):
            one = operation(
                f"{row.name}.{half}",
                source,
                category=category,
                dtype="bfloat16",
                flops=row.flops / 2,
                bytes=int(row.bytes / 2),
            )
            parts.append(Timed(operation=one, times=np.full((STEPS, 1), took)))
    found = captured(parts)
    return dataclasses.replace(found, info=dataclasses.replace(found.info, platform=platform))


def test_every_class_has_its_own_measured_time(plan, topology):
    factors = {"mlp": 1.5, "attention": 3.0, "optimizer": 0.5}
    found = beside(plan, ran(plan, factors), topology.chip)
    rows = {row.name: row for row in found.classes}
    assert set(rows) == {row.name for row in plan.main.work}
    for name in SOURCES:
        assert rows[name].ratio == pytest.approx(factors.get(name, 1.0), rel=1e-3), name
    assert rows["embedding"].measured_seconds is None
    assert found.busy_seconds == pytest.approx(
        math.fsum(row.measured_seconds for row in found.operations)
    )


def test_a_plan_with_fitted_shares_takes_what_was_measured(config, plan, topology, tmp_path):
    profile = ran(plan, dict.fromkeys(SOURCES, 1.7))
    shares = fit(plan, profile, topology.chip)
    assert calibration_of(topology.chip).matmul_estimated != shares.matmul_estimated
    path = write_calibration(shares, topology.chip, tmp_path / "new" / "shares.json")
    chip = calibrated(topology.chip, path)
    assert calibration_of(chip) == dataclasses.replace(shares, source=f"{shares.source} ({path})")
    again = plan_train(config, dataclasses.replace(topology, chip=chip), name="run")
    joined = beside(again, profile, chip)
    assert joined.planned_seconds == pytest.approx(joined.busy_seconds, rel=0.1)
    assert calibration_of(topology.chip).source != shares.source  # the table is as it was


def test_another_config_than_the_captured_one_is_told(config, plan, topology):
    other = plan_train(dataclasses.replace(config, batch_size=16), topology)
    assert "is the plan of the config" in beside(other, ran(plan, {}), topology.chip).notes[0]
    assert not beside(plan, ran(plan, {}), topology.chip).notes


def test_the_report_shows_and_keeps_both(plan, topology, tmp_path):
    found = beside(plan, ran(plan, {"mlp": 2.0}), topology.chip)
    text = render_table(plan, measured=found)
    assert "Planned and measured" in text
    assert max(map(len, text.splitlines())) <= 100
    path = write_json(plan, tmp_path / "plan.json", found)
    kept = json.loads(path.read_text())["measured"]
    assert kept["busy_seconds"] == found.busy_seconds
    assert read_json(path) == plan


def test_a_capture_of_another_platform_is_refused(plan, topology):
    with pytest.raises(ConfigError, match="is of a CPU and the plan is for h100:1"):
        beside(plan, ran(plan, {}, platform="cpu"), topology.chip)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "is not a calibration of format 1"),
        ('{"format": 2}', "format 2"),
        ('{"format": 1, "chip": "v5p", "source": "", "shares": {}}', "was fitted on v5p"),
        ('{"format": 1, "chip": "h100", "source": "", "shares": {"matmul": -1}}', "is -1; use"),
        ('{"format": 1, "chip": "h100", "source": "", "shares": {"speed": 1}}', "shares.speed"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(topology, tmp_path, text, message):
    path = tmp_path / "shares.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        calibrated(topology.chip, path)
    with pytest.raises(ConfigError, match="cannot read the calibration"):
        calibrated(topology.chip, tmp_path / "missing.json")
