"""What the hosting stages compare with, and what they say where they cannot run."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fornax.export.modules import take_apart
from fornax.models import DecoderConfig, abstract_decoder
from fornax.quickstart import SIZES, QuickstartConfig, hosting, pipeline
from fornax.quickstart.job import Job


@pytest.fixture
def job(tmp_path) -> Job:
    return Job(QuickstartConfig(run_dir=tmp_path), SIZES["tiny"], Console(quiet=True))


def test_the_score_compared_with_is_the_sum_of_log_softmax():
    config = DecoderConfig(
        vocab_size=8, hidden_size=8, num_layers=1, num_heads=2, intermediate_size=8
    )
    parts = take_apart(abstract_decoder(config), abstract=True)
    rng = np.random.default_rng(0)
    decoder = parts.rebuild(
        {n: jnp.asarray(rng.normal(size=s.shape), s.dtype) for n, s in parts.params.items()}
    )
    row = np.array([3, 1, 4, 1, 5], np.int32)
    logits = np.asarray(jax.jit(lambda model, x: model(x))(decoder, row[None])[0], np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = logprobs[np.arange(4), row[1:]].sum()
    np.testing.assert_allclose(hosting.direct_scores(decoder, [row]), [expected], rtol=1e-5)


def test_the_texts_are_functions_with_their_bodies(tmp_path):
    pairs = [{"prompt": f"def f{i}():\n", "completion": "    pass\n"} for i in range(6)]
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    assert hosting.texts_of(path)[1] == "def f1():\n    pass\n"
    assert len(hosting.texts_of(path)) == 4


def test_without_the_packages_the_stage_is_left_out_and_says_so(job, monkeypatch):
    monkeypatch.setattr(pipeline, "not_installed", lambda names: ["grpc"])
    result = pipeline._host(job)
    assert result == {"missing": ["grpc"]}
    assert "left out: grpc not installed" in pipeline._host_line(result)


def test_the_stage_serves_the_repository_of_the_run(job, monkeypatch):
    called = SimpleNamespace()
    monkeypatch.setattr(pipeline, "not_installed", lambda names: [])
    monkeypatch.setattr(
        pipeline, "serve_and_score", lambda *a, **k: called.__dict__.update(a=a, k=k) or {}
    )
    pipeline._host(job)
    assert called.a[0] == job.run_dir / "models"
    assert called.a[2:] == (job.tuned, job.pairs / "eval.jsonl")
    assert called.k == {"length": job.size.seq_len}
