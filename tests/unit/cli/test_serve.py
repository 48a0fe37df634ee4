"""`fornax serve`: its help, its flags, and how it parts them into the engine's and the server's."""

import dataclasses

import pytest

from fornax.cli.main import main
from fornax.cli.registry import ROOT
from fornax.config import load
from fornax.llm.config import EngineConfig
from fornax.llm.server import ServeConfig, ServerConfig


@pytest.fixture
def launched(monkeypatch):
    """What would be launched."""
    calls = []
    target = "fornax.llm.server.launch.serve_model"
    monkeypatch.setattr(target, lambda *given: calls.append(given) or 0)
    return calls


def test_the_help_fits_a_screen(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) <= 40
    assert max(map(len, shown)) <= 100


def test_flags_of_vllm_reach_the_engine_and_the_server(launched):
    words = (
        "serve runs/m --port 9000 --max-model-len 2048 --max-num-seqs 16 "
        "--max-num-batched-tokens 256 --served-model-name one two --api-key k1 k2 "
        "--tensor-parallel-size 2 --enable-lora --lora-modules a=/a b=/b --dtype bfloat16 "
        "--no-enable-prefix-caching --enable-auto-tool-choice --tool-call-parser hermes"
    )
    assert main(words.split()) == 0
    [(model, config, _)] = launched
    assert model == "runs/m"
    engine, server = config.engine(), config.server()
    assert (engine.max_model_len, engine.max_num_seqs, engine.tensor_parallel_size) == (2048, 16, 2)
    assert engine.enable_lora
    assert not engine.enable_prefix_caching
    assert server.port == 9000
    assert server.served_model_name == ("one", "two")
    assert server.api_key == ("k1", "k2")
    assert server.lora_modules == ("a=/a", "b=/b")
    assert type(engine) is EngineConfig
    assert type(server) is ServerConfig


@pytest.mark.parametrize(
    ("words", "needle"),
    [
        ("", "fornax serve MODEL"),
        ("m --lora-modules a=/a", "enable_lora"),
        ("m --enable-lora --lora-modules a", "NAME=PATH"),
        ("m --enable-auto-tool-choice", "tool_call_parser"),
        ("m --ssl-keyfile k", "ssl_certfile"),
        ("m --port -1", "port=-1"),
        ("m --port 99999", "port=99999 is not a port"),
        ("m --body-timeout 0", "body_timeout"),
        ("m --max-model-len 0", "max_model_len"),
        ("m --max-modl-len 8", "did you mean max_model_len"),
    ],
)
def test_mistakes_are_told_before_anything_starts(launched, capsys, words, needle):
    assert main(["serve", *words.split()]) == 2
    assert needle in capsys.readouterr().err
    assert launched == []


def test_no_key_means_two_things():
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    server = {field.name for field in dataclasses.fields(ServerConfig)}
    assert not engine & server
    assert load(ServeConfig) == ServeConfig()
    assert ROOT.commands["serve"].config() is ServeConfig
