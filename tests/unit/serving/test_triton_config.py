"""A `config.pbtxt` read as protobuf reads it, and what becomes of each of Triton's fields."""

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from fornax.cli.main import main
from fornax.config import ConfigError, load
from fornax.serving import triton_config
from fornax.serving.settings import Latest, ModelSettings, Named, Replicas
from fornax.serving.triton_config import convert_config

WHOLE = """
# A ranker.
name: "ranker"  platform: 'onnxruntime_onnx'
max_batch_size: 64
input [
  { name: "ids" data_type: TYPE_INT32 dims: [ -1 ] },
  { name: "weight", data_type: TYPE_FP32; dims: [ 1 ] reshape: { shape: [ ] } }
]
output { name: "score" data_type: TYPE_FP32 dims: [ 1 ] }
dynamic_batching {
  preferred_batch_size: [ 16, 0x40 ]
  max_queue_delay_microseconds: 500
  preserve_ordering: true
  priority_levels: 5
  default_priority_level: 3
  default_queue_policy <
    timeout_action: DELAY default_timeout_microseconds: 2000000 max_queue_size: 100
  >
}
version_policy: { specific { versions: 1 versions: 3 } }
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 0, 1 ] } ]
parameters { key: "threads" value: { string_value: "4" " of them" } }
model_warmup [ { name: "w" batch_size: 1 } ]
"""


def _plain(message, descriptor):
    """What the reader made of a text, as protobuf's JSON has it: by the schema it does not know."""
    found = {}
    for name, values in message.items():
        field = descriptor.fields_by_name[name]
        inner = field.message_type
        if inner is not None:
            values = [_plain(value, inner) for value in values]
        if inner is not None and inner.GetOptions().map_entry:
            found[name] = {each["key"]: each["value"] for each in values}
        else:
            found[name] = values if field.is_repeated else values[-1]
    return found


def test_it_reads_what_protobuf_reads():
    wanted = json_format.MessageToDict(
        text_format.Parse(WHOLE, ModelConfig()), preserving_proto_field_name=True
    )
    found = _plain(triton_config._Reader(WHOLE, "x").message(), ModelConfig.DESCRIPTOR)

    def texts(value):  # JSON writes 64-bit numbers as text
        if isinstance(value, dict):
            return {name: texts(each) for name, each in value.items() if each != []}
        return [texts(each) for each in value] if isinstance(value, list) else str(value)

    assert texts(found) == texts(wanted)


def test_every_field_of_triton_is_converted_or_named():
    known = {*triton_config._FIELDS, *triton_config._NONE}
    assert {field.name for field in ModelConfig.DESCRIPTOR.fields} <= known


def test_the_settings_load(tmp_path, capsys):
    (tmp_path / "config.pbtxt").write_text(WHOLE)
    out = tmp_path / "serving.yaml"
    words = ["host", "convert-config", str(tmp_path / "config.pbtxt"), "--out", str(out)]
    assert main(words) == 0
    notes = capsys.readouterr().err
    for name in ("platform", "preserve_ordering", "kind", "DELAY", "parameters", "model_warmup"):
        assert name in notes
    settings = load(ModelSettings, file=out)
    assert settings.versions == Named(versions=(1, 3))
    assert settings.devices == Replicas(devices=(0, 1))
    assert settings.concurrency == 2
    assert settings.timeouts.request_seconds == 2.0
    batching = settings.batching
    assert (batching.max_rows, batching.preferred_sizes) == (64, (16, 64))
    assert (batching.max_delay_ms, batching.queue_limit) == (0.5, 100)
    assert (batching.priority_levels, batching.default_priority) == (5, 3)
    assert main(words) == 2
    assert "exists" in capsys.readouterr().err


def test_defaults_and_other_policies():
    assert convert_config("version_policy { latest { } }").mapping["versions"] == {
        "type": "latest",
        "count": Latest().count,
    }
    assert convert_config("version_policy { all { } }").mapping == {"versions": {"type": "all"}}
    done = convert_config("max_batch_size: 0 model_transaction_policy { decoupled: true }")
    assert done.mapping == {}
    assert "not a batch" in done.notes[0]
    assert "decoupled" in done.notes[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: -", "line 1: '-'"),
        ("name: 'x\n", "line 1"),
        ("\ndynamic_batching {", "line 2: '}' is missing"),
        ("name 3", "line 1: name is followed by neither"),
        ("name: [1,", "ends where a value belongs"),
        ("version_policy { newest { } }", "version_policy does not hold"),
        ("dynamic_batching: 3", "dynamic_batching does not hold"),
        ("max_batch_size: 8 dynamic_batching { preferred_batch_size: 9 }", "preferred_sizes has 9"),
    ],
)
def test_what_cannot_be_read_is_named(text, said):
    with pytest.raises(ConfigError, match=r"f\.pbtxt") as caught:
        convert_config(text, "f.pbtxt")
    assert said in str(caught.value)
