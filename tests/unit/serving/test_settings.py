"""serving.yaml: strict, with each mistake named."""

import pytest

from fornax.config import ConfigError, from_yaml
from fornax.serving.settings import Latest, ModelSettings, Named


def read(text):
    return from_yaml(ModelSettings, text, source="serving.yaml")


def test_an_empty_file_means_the_newest_version_alone():
    settings = read("")
    assert settings.versions == Latest(count=1)
    assert settings.shadow is None


def test_a_function_may_have_batching_of_its_own():
    settings = read("batching: {max_delay_ms: 2}\nfunctions: {score: {queue_limit: 5}}")
    assert settings.batching_of("predict").max_delay_ms == 2
    assert settings.batching_of("score").queue_limit == 5
    assert settings.batching_of("score").max_delay_ms == 0


def test_versions_may_be_named():
    assert read("versions: {type: named, versions: [1, 3]}").versions == Named(versions=(1, 3))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bathcing: {}", "did you mean batching"),
        ("versions: {type: newest}", "latest, all, named"),
        ("versions: {type: latest, count: 0}", "at least 1"),
        ("versions: {type: named, versions: []}", "names no version"),
        ("versions: {type: named, versions: [2, 2]}", "twice"),
        ("labels: {'3': 4}", "not a label"),
        ("labels: {../x: 4}", "not a label"),
        ("labels: {a: 0}", "numbered from 1"),
        ("batching: {preferred_sizes: [8], max_rows: 4}", "more than max_rows"),
        ("batching: {default_priority: 4}", "choose 1 to 3"),
        ("batching: {max_delay_ms: .inf}", "finite"),
        ("shadow: {version: 2, share: 2}", "over 1"),
        ("shadow: {version: 2}\nlabels: {a: 2}", "under shadow"),
        ("shadow: {version: 2}\nversions: {type: named, versions: [2]}", "answers are not sent"),
        ("devices: {type: replicas, devices: [0, 0]}", "different"),
        ("devices: {type: mesh, mesh: {tensr: 2}}", "tensor"),
        ("timeouts: {drain_seconds: -1}", "at least 0"),
        ("weight: 0", "at least"),
        ("concurrency: 0", "at least 1"),
    ],
)
def test_a_mistake_is_refused_with_what_is_allowed(text, said):
    with pytest.raises(ConfigError, match=said):
        read(text)


@pytest.mark.parametrize(
    ("text", "reload"),
    [
        ("batching: {max_delay_ms: 1}", True),
        ("concurrency: 3", True),
        ("compiler_options: {xla_cpu_prefer_vector_width: 512}", True),
        ("labels: {a: 1}", False),
        ("versions: {type: all}", False),
        ("shadow: {version: 2}", False),
    ],
)
def test_only_what_a_loaded_version_depends_on_loads_it_anew(text, reload):
    assert read("").wants_reload(read(text)) is reload
