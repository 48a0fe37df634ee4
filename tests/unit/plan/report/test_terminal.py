"""The table shows every part of a plan, within a hundred columns."""

import dataclasses

import pytest

from fornax.plan.report import render_table, too_large


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("width", [60, 100, 200])
def test_no_line_is_wider_than_a_hundred_columns(make_plan, fits, width):
    lines = render_table(make_plan(fits=fits, name="n" * 70), width).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert all(line == line.rstrip() for line in lines)


def test_every_part_is_there(make_plan):
    text = render_table(make_plan())
    for said in (
        "llama3-8b on v5p:4x4x4: 64 chips, 16 hosts",
        "Compiled by the TPU compiler",
        "8.03 G parameters in float32, computed in bfloat16; 512 rows of 8,192 tokens",
        "step 12.5 s, MFU 51.3%",
        "29.0 G tokens/day",
        "bound by arithmetic",
        "fits: 43.0 GiB of the 95.0 GiB usable (45%)",
        "in the host's memory",
        "for 1e9 tokens",
        "activations   30.0 GiB",
        "8.00 GiB   x2.00",
        "models/layers.py:210 (Attention.__call__)",
        "matmul",
        "all-to-all   fsdp x tensor   dcn",
        "add tensor to mesh.rules.vocab",
        "look at mesh.rules.activation_mlp",
        "eval_step",
        "compiled in 33.8 s (kept from an earlier plan)",
        "mesh: {fsdp: 32, tensor: 2}",
        "the trip count of while.7",
    ):
        assert " ".join(said.split()) in " ".join(text.split())


def test_collectives_of_one_kind_and_axis_are_one_row(make_plan):
    rows = [line for line in render_table(make_plan()).splitlines() if "all-gather" in line]
    assert len(rows) == 1
    assert " ".join(rows[0].split()) == "all-gather fsdp ici 96 27.0 GiB 4.00 s 500 ms"


def test_a_plan_that_fits_has_no_complaint(make_plan):
    assert too_large(make_plan()) is None


def test_a_plan_that_does_not_fit_says_by_how_much_and_what_would_help(make_plan):
    plan = make_plan(fits=False)
    assert "DOES NOT FIT" in render_table(plan)
    text = too_large(plan)
    assert text is not None
    assert text.startswith(
        "llama3-8b does not fit v5p:4x4x4: the train_step needs 43.0 GiB of each chip's 31.0 GiB "
        "usable memory, 12.0 GiB too much; "
    )
    assert "(1) recompute more (full), --remat full: 28.0 GiB, 13.4 s per step" in text
    assert "\n" not in text


def test_without_advice_it_says_so(make_plan):
    text = too_large(dataclasses.replace(make_plan(fits=False), advice=()))
    assert text is not None
    assert text.endswith("use a smaller batch_size or more chips")
