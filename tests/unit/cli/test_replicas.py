"""`fornax launch --replicas`: what it refuses before anything is started."""

import pytest

from fornax.cli.main import main

REFUSED = [
    (["--replicas", "2", "--", "train"], "train has no replicas; --replicas takes serve and host"),
    (["--replicas", "2"], "no command is named"),
    (["--replicas", "0", "--", "serve", "DIR"], "replicas=0 is below 1"),
    (["--replicas", "2", "--", "serve"], "no model is named"),
    (["--replicas", "2", "--", "serve", "DIR", "--prot", "1"], "did you mean"),
    (["--replicas", "2", "--hosts", "2..3", "--", "serve", "DIR"], "a replica has one size"),
    (["--replicas", "2", "--no-spares", "--", "serve", "DIR"], "are for training commands"),
    (["--replicas", "2", "--address", "auto", "--", "serve", "DIR"], "add --engine ray"),
    (["--run-dir", "r", "--", "train", "--run-dir", "r"], "are for --replicas"),
    (["--", "serve", "DIR"], "serve is launched with --replicas, --hosts or both"),
    (["--replicas", "2", "--routing", "round-robin", "--", "serve", "DIR"], "is not KEY=VALUE"),
    (["--replicas", "2", "--routing", "policy=best", "--", "serve", "DIR"], "least-requests"),
    (["--replicas", "2", "--routing", "polcy=x", "--", "serve", "DIR"], "policy"),
    (["--replicas", "2", "--stall-limit", "0", "--", "serve", "DIR"], "stall_limit=0"),
    (["--replicas", "2", "--", "host"], "no repository is named"),
    (["--replicas", "2", "--", "host", ".", "--http", "none"], "readiness and metrics"),
    (["--replicas", "2", "--", "host", "DIR", "--http", "none", "--grpc", "none"], "nothing to"),
    (["--replicas", "2", "--", "host", "DIR"], "DIR is not a folder"),
    (["rolling-restart"], "no run is named"),
    (["rolling-restart", "nothing"], "nothing is not a server's"),
]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=[" ".join(each) for each, _ in REFUSED])
def test_mistakes_are_refused_in_one_paragraph(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert said in err
    assert "Traceback" not in err
