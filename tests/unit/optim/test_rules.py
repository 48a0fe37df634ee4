"""Rules that miss, overlap or contradict are errors that name the parameters near them."""

import jax
import numpy as np
import pytest

from fornax.config.errors import ConfigError
from fornax.optim import (
    EMA,
    SGD,
    SOAP,
    Adafactor,
    AdamW,
    AdaptiveClip,
    Constant,
    Group,
    Lion,
    Lookahead,
    Muon,
    NormClip,
    OptimConfig,
    RMSProp,
    ValueClip,
    build,
)

PARAMS = {
    "embed": np.zeros((8, 4), np.float32),
    "layers": {
        "attention": {"q": {"kernel": np.zeros((2, 4, 4), np.float32)}},
        "norm": {"scale": np.zeros((2, 4), np.float32)},
    },
}
AXES = {
    "embed": ("vocab", "embed"),
    "layers": {
        "attention": {"q": {"kernel": ("layers", "embed", "mlp")}},
        "norm": {"scale": ("layers", "norm")},
    },
}


def built(total_steps=10, axes=AXES, **fields):
    return build(OptimConfig(**fields), total_steps=total_steps, params=PARAMS, axes=axes)


def test_a_pattern_that_matches_nothing_names_near_paths():
    with pytest.raises(ConfigError) as caught:
        built(groups=(Group(pattern="^layers/atention/", freeze=True),))
    assert "groups[0].pattern '^layers/atention/' matches no parameter" in str(caught.value)
    assert "layers/attention/q/kernel" in str(caught.value)


def test_a_pattern_near_nothing_lists_the_parameters():
    with pytest.raises(ConfigError, match="the parameters are embed, layers/attention/q/kernel"):
        built(groups=(Group(pattern="zzz"),))


def test_a_group_behind_others_that_take_its_parameters_is_refused():
    groups = (Group(pattern="layers", freeze=True), Group(pattern="norm"))
    with pytest.raises(ConfigError, match="matches only parameters that earlier groups took"):
        built(groups=groups)


def test_the_first_matching_group_wins():
    groups = (Group(pattern="norm", learning_rate_factor=2.0), Group(pattern="layers"))
    assignments = built(groups=groups).assignments
    assert assignments["layers/norm/scale"].learning_rate_factor == 2.0
    assert assignments["layers/attention/q/kernel"].learning_rate_factor == 1.0


@pytest.mark.parametrize("optimizer", [Muon(), SOAP()])
def test_what_is_no_hidden_matrix_goes_to_the_fallback(optimizer):
    assignments = built(optimizer=optimizer).assignments
    assert {path: t.optimizer.type for path, t in assignments.items()} == {
        "embed": "adamw",
        "layers/attention/q/kernel": optimizer.type,
        "layers/norm/scale": "adamw",
    }


def test_the_fallback_has_its_own_rate():
    groups = (Group(pattern="embed", learning_rate_factor=3.0),)
    assignments = built(
        optimizer=Muon(fallback_learning_rate_factor=0.5), groups=groups
    ).assignments
    assert assignments["embed"].learning_rate_factor == 1.5
    assert assignments["layers/norm/scale"].learning_rate_factor == 0.5
    assert assignments["layers/attention/q/kernel"].learning_rate_factor == 1.0


def test_a_parameter_no_rule_covers_is_named():
    groups = (Group(pattern="layers", optimizer=SGD()),)
    with pytest.raises(ConfigError, match="no group covers parameter embed"):
        built(optimizer=None, groups=groups)


def test_a_group_without_any_optimizer_is_refused():
    with pytest.raises(ConfigError, match="names no optimizer"):
        built(optimizer=None, groups=(Group(pattern=".*"),))


def test_groups_may_name_all_optimizers():
    groups = (Group(pattern="embed", optimizer=SGD()), Group(pattern="", optimizer=AdamW()))
    assignments = built(optimizer=None, groups=groups).assignments
    assert {t.optimizer.type for t in assignments.values()} == {"sgd", "adamw"}


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="nothing is left to train"):
        built(groups=(Group(pattern="", freeze=True),))


@pytest.mark.parametrize("field", ["decay", "no_decay"])
def test_decay_patterns_must_match(field):
    with pytest.raises(ConfigError, match=f"{field} 'kernal' matches no parameter; near it are"):
        built(**{field: ("kernal",)})


def test_a_broken_pattern_is_refused():
    with pytest.raises(ConfigError, match="is not a regular expression"):
        built(groups=(Group(pattern="(", freeze=True),))


def test_accumulation_must_divide_the_run():
    with pytest.raises(
        ConfigError, match="total_steps=10 is not a multiple of accumulate=4 above 0"
    ):
        built(accumulate=4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lookahead": Lookahead(), "ema": EMA()}, "both claim the parameters to evaluate"),
        ({"optimizer": None}, "there are no groups"),
        ({"lookahead": Lookahead(reset_state=True)}, "schedule would start over every 5 updates"),
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be greater than 0"),
        ({"accumulate": 0}, "accumulate=0 must be greater than 0"),
    ],
)
def test_combinations_that_cannot_work_are_refused(fields, says):
    with pytest.raises(ConfigError, match=says):
        OptimConfig(**fields)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: AdamW(b1=1.0), "b1=1.0 is not a decay rate"),
        (lambda: AdamW(weight_decay=-0.1), "weight_decay=-0.1 is negative"),
        (lambda: Lion(b2=-0.1), "b2=-0.1"),
        (lambda: Adafactor(min_dim_size_to_factor=0), "min_dim_size_to_factor=0"),
        (lambda: Muon(ns_steps=0), "ns_steps=0"),
        (lambda: Muon(ns_coeffs="dion", ns_steps=6), "coefficients for five steps"),
        (lambda: SOAP(precondition_frequency=0), "precondition_frequency=0"),
        (lambda: SGD(momentum=None, nesterov=True), "nesterov=true needs a momentum"),
        (lambda: RMSProp(nesterov=True), "nesterov=true needs a momentum"),
        (lambda: NormClip(max_norm=0), "max_norm=0"),
        (lambda: ValueClip(max_value=-1), "max_value=-1"),
        (lambda: AdaptiveClip(clipping=0), "clipping=0"),
        (lambda: Group(pattern="a", learning_rate_factor=0), "learning_rate_factor=0"),
        (lambda: Group(pattern="a", freeze=True, optimizer=SGD()), "would never act"),
        (lambda: Lookahead(slow_step_size=0), "slow_step_size=0"),
        (lambda: EMA(decay=1.0), "decay=1.0"),
    ],
)
def test_wrong_values_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": Muon()},
        {"optimizer": SOAP()},
        {"optimizer": Adafactor()},
        {"clip": (AdaptiveClip(),)},
    ],
)
def test_what_works_by_matrix_refuses_stacked_arrays_without_axes(fields):
    with pytest.raises(ConfigError, match=r"matrices in parameter layers/attention/q/kernel"):
        build(OptimConfig(**fields), total_steps=1, params=PARAMS)


def test_elementwise_optimizers_need_no_axes():
    params, state, grads = PARAMS, None, jax.tree.map(np.ones_like, PARAMS)
    chain = build(
        OptimConfig(optimizer=AdamW(weight_decay=0.0), schedule=Constant(), learning_rate=0.5),
        total_steps=1,
        params=params,
    )
    state = chain.init(params)
    after, _ = chain.update(grads, state, params)
    np.testing.assert_allclose(after["embed"], -0.5, rtol=1e-5)
