"""`fornax profile compare` and `export` on real captures: verdicts, files, exit codes, mistakes."""

import json

import jax
import jax.numpy as jnp
import pytest
from tests.unit.profile.perfetto_trace import read_trace

from fornax import profile
from fornax.cli.main import main

STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Captures `before` and `after`: the second does several times the work of the first."""
    root = tmp_path_factory.mktemp("captures")
    x = jnp.linspace(-1, 1, 96 * 96).reshape(96, 96)
    for name, times in (("before", 1), ("after", 30)):

        def step(x, times=times):
            for _ in range(times):
                x = jnp.tanh(x @ x)
            return x

        compiled = jax.jit(step).lower(x).compile()
        compiled(x).block_until_ready()
        with profile.capture(root / name):
            for number in range(STEPS):
                with jax.profiler.StepTraceAnnotation("train", step_num=number):
                    compiled(x).block_until_ready()
    return root


def test_more_work_is_named_and_fails(folder, tmp_path, capsys):
    out = tmp_path / "found.json"
    words = [str(folder / "before"), str(folder / "after"), "--json", str(out)]
    page = tmp_path / "page.html"
    assert main(["profile", "compare", *words, "--html", str(page)]) == 1
    shown = capsys.readouterr().out
    assert "Slower by more than the 5 % allowed" in shown
    assert "test_commands.py" in shown
    lines = [line for line in shown.splitlines() if not line.startswith(str(tmp_path))]
    assert max(map(len, lines)) <= 100
    found = json.loads(out.read_text())
    assert found["failed"]
    assert found["after"]["flops"] == pytest.approx(30 * found["before"]["flops"], rel=0.05)
    assert found["verdict"][:40] in page.read_text()


def test_a_capture_beside_itself_passes(folder, capsys):
    words = [str(folder / "before")] * 2
    for by in ("op", "class", "module", "source"):
        assert main(["profile", "compare", *words, "--by", by, "--fail-over", "0"]) == 0
    assert "FLOPs of a step unchanged" in capsys.readouterr().out


def test_exports_lie_where_asked(folder, tmp_path, capsys):
    trace = tmp_path / "new" / "trace.pftrace.gz"
    assert main(["profile", "export", str(folder / "before"), "--perfetto", str(trace)]) == 0
    slices = read_trace(trace).slices
    assert sum(each.category == "step" for each in slices) == STEPS
    assert main(["profile", "export", str(folder / "before"), "--xprof"]) == 0
    (written,) = (folder / "before" / "xprof").glob("plugins/profile/*/*.xplane.pb")
    assert "xprof --logdir" in capsys.readouterr().out
    assert list(written.parent.glob("jit_step*.hlo_proto.pb"))
    # An export is a capture too: its device is read as one.
    again = profile.read(written.parent)
    ours = profile.read(folder / "before")
    device = [row for row in again.rows if row.device.startswith("gpu:")]
    assert sum(row.events.duration.sum() for row in device) == sum(
        row.events.duration.sum() for row in ours.rows if row.device
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("compare", "before", "nowhere"), "holds no capture"),
        (("compare", "before", "after", "--fail-over", "much"), "use a share such as 5%"),
        (("compare", "before", "after", "--fail-over", "500%"), "use 0% to 100%"),
        (("compare", "before", "after", "--rows", "0"), "use at least 1"),
        (("compare", "before"), "needs AFTER"),
        (("export", "before"), "no format is given"),
        (("export", "before", "--xprof", "--perfetto"), "both --xprof and --perfetto"),
        (("export", "before", "trace.pb", "--perfetto"), "end it in .pftrace.gz"),
        (("export", "before", "before", "--xprof"), "give another directory"),
    ],
)
def test_mistakes_are_said_in_one_paragraph(folder, monkeypatch, capsys, words, message):
    monkeypatch.chdir(folder)
    assert main(["profile", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
