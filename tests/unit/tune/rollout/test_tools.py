"""Tools: schemas, results, faults, time limits, what is left running."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from fornax.config.errors import ConfigError
from fornax.tune.rollout import Tool, ToolEnvironment, ToolPool

HERE = Path(__file__).with_name("tool_functions.py")


def tool(function, **options):
    return Tool(function=f"{HERE}:{function}", **options)


@pytest.fixture(scope="module")
def pool():
    tools = [tool("add"), tool("lists"), tool("crash"), tool("leave"), tool("talk")]
    tools.append(tool("hang", timeout_seconds=0.5))
    tools.append(Tool(function="fornax.tune.rollout.toy_environments:calculate"))
    with ToolPool(tools, workers=2) as made:
        yield made


def test_schemas_say_what_the_signature_says():
    assert tool("add").schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                    "how": {"enum": ["plain", "twice"]},
                },
                "required": ["a"],
            },
        },
    }
    parameters = tool("lists").schema["function"]["parameters"]
    assert parameters["properties"] == {
        "values": {"type": "array", "items": {"type": "number"}},
        "scale": {"type": "number"},
    }


def test_what_cannot_be_a_tool_is_refused():
    with pytest.raises(ConfigError, match="needs a type for a"):
        tool("untyped")
    with pytest.raises(ConfigError, match="has no function nothing"):
        tool("nothing")
    with pytest.raises(ConfigError, match="no file"):
        Tool(function="/nowhere/tools.py:search")
    with pytest.raises(ConfigError, match="two tools"):
        ToolPool([tool("add"), tool("lists", name="add")])


def test_results_are_text_and_faults_are_told_to_the_model(pool):
    assert pool.call("add", '{"a": 2, "how": "twice"}') == "6"
    assert json.loads(pool.call("lists", '{"values": [1, 2.5]}')) == {"sum": 3.5}
    assert pool.call("calculate", '{"expression": "(2 + 3) * 4"}') == "20"
    assert pool.call("calculate", '{"expression": "open(1)"}').startswith("error: ValueError")
    assert pool.call("add", '{"c": 2}').startswith("error: TypeError")
    assert pool.call("add", "{a: 2").startswith("error: the arguments are not JSON")
    assert pool.call("add", "[2]") == "error: the arguments must be a JSON object"
    assert pool.call("search", "{}").startswith("error: there is no tool search; there are add,")
    assert pool.call("leave", "{}") == "error: SystemExit: no"
    assert pool.call("talk", "{}") == "x" * 2000 + "… (5000 characters)"
    for _ in range(3):
        assert "ended its process" in pool.call("crash", "{}")
    assert pool.call("add", '{"a": 2}') == "3"


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_until_dead(pids, seconds=120):
    until = time.monotonic() + seconds
    while any(alive(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    assert not [pid for pid in pids if alive(pid)]


def pids_in(path):
    return [int(line) for line in path.read_text().split()]


def test_a_tool_that_hangs_is_killed_with_what_it_began(pool, tmp_path):
    file = tmp_path / "pids"
    for _ in range(20):  # a busy machine may not begin it in its time
        began = time.monotonic()
        answer = pool.call("hang", json.dumps({"pid_file": str(file)}))
        assert answer == "error: took over 0.5 s"
        assert time.monotonic() - began < 120
        if file.exists() and len(pids_in(file)) >= 2:
            break
    wait_until_dead(pids_in(file))
    assert pool.call("add", '{"a": 1}') == "2"


def test_nothing_is_left_running_when_the_trainer_is_killed(tmp_path):
    file = tmp_path / "pids"
    program = f"""
        from fornax.tune.rollout import Tool, ToolPool
        pool = ToolPool([Tool(function={f"{HERE}:hang"!r}, timeout_seconds=600)], workers=1)
        pool.call("hang", '{{"pid_file": "{file}"}}')
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    try:
        until = time.monotonic() + 240
        while not (file.exists() and len(file.read_text().split()) == 2):
            assert time.monotonic() < until
            assert trainer.poll() is None
            time.sleep(0.02)
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.wait()
    wait_until_dead(pids_in(file))


def test_tools_are_called_until_the_model_answers_without_one(pool):
    environment = ToolEnvironment(pool, system="Use tools.", failure_reward=-0.1)
    begun = environment.reset({"prompt": "what is 2 + 3?"}, 0)
    assert [each["role"] for each in begun] == ["system", "user"]
    calls = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate([("add", '{"a": 2, "b": 3}'), ("add", "{}")])
    ]
    turn = environment.step({"role": "assistant", "content": "", "tool_calls": calls})
    assert [each["tool_call_id"] for each in turn.messages] == ["call0", "call1"]
    assert turn.messages[0]["content"] == "5"
    assert (turn.done, dict(turn.rewards)) == (False, {"failed_calls": -0.1})
    assert environment.step({"role": "assistant", "content": "It is 5."}).done
    with pytest.raises(ConfigError, match="neither messages nor prompt"):
        environment.reset({"question": "?"}, 0)
