"""Checks of model and loss: adapters, packing, gradients, accumulation, the reference.

Legend: B rows, T tokens of a row.
"""

import math

import numpy as np

from fornax.tune.configs.losses import DPO, IPO, RobustDPO
from fornax.tune.configs.preference import KTOConfig, PreferenceConfig
from fornax.tune.doctor.findings import Outcome, failed, passed, skipped
from fornax.tune.doctor.gradients import Gradients
from fornax.tune.doctor.patient import Patient, Rows, spans

__all__ = ["accumulation", "adapters_at_start", "every_gradient", "packing", "reference"]


def adapters_at_start(patient: Patient, rows: Rows) -> Outcome:
    """Fresh adapters change nothing."""
    if patient.config.lora is None:
        return skipped("all of the model is trained")
    rows = _flat(rows)
    with_them, without = (patient.logprobs(rows, base=base) for base in (False, True))
    apart = float(np.abs(with_them - without)[rows["segment_ids"] > 0].max())
    if apart <= patient.tolerance:
        return passed(f"log-probs with and without adapters differ by {apart:.1g}")
    return failed(
        f"the fresh adapters already change the model: log-probs of its data's tokens differ by up "
        f"to {apart:.3g} nats from those of the base. Training would start from a worse model than "
        "the one you chose, and a reference by adapter switching would not be where the policy "
        "starts. Their second factor must begin at zero (and a DoRA magnitude at the norm of its "
        "weights): if adapters were attached or loaded by code of yours, let `adapters.attach` do "
        "it; to go on from trained adapters, merge them first with `fornax convert --merge-lora`"
    )


def packing(patient: Patient, rows: Rows) -> Outcome:
    """A packed row's log-probs are those of its examples alone."""
    packed = _flat(rows)
    pieces = [
        (row, span)
        for row in range(len(packed["tokens"]))
        for span in spans(packed["segment_ids"][row], packed["positions"][row])
    ]
    crowded = [row for row, _ in pieces]
    pieces = [(row, span) for row, span in pieces if crowded.count(row) > 1]
    if not pieces:
        return skipped("every example has a row of its own")
    pieces = pieces[: len(packed["tokens"])]
    alone = {name: np.zeros_like(x) for name, x in packed.items()}
    for place, (row, span) in enumerate(pieces):
        size = span.stop - span.start
        for name in ("tokens", "targets"):
            alone[name][place, :size] = packed[name][row, span]
        alone["segment_ids"][place, :size] = 1
        alone["positions"][place, :size] = np.arange(size)
    together_BT, apart_BT = patient.logprobs(packed), patient.logprobs(alone)
    worst = max(
        float(np.abs(together_BT[row, span] - apart_BT[place, : span.stop - span.start]).max())
        for place, (row, span) in enumerate(pieces)
    )
    if worst <= 10 * patient.tolerance:
        return passed(f"log-probs of {len(pieces)} packed examples and alone differ by {worst:.1g}")
    return failed(
        f"an example's log-probs change by up to {worst:.3g} nats with its neighbours in the row: "
        "examples see each other, because attention does not keep to segments or positions do not "
        "start again with each. The model would learn from contexts that it never has. Give each "
        "example its own row (--packing none) until that is mended; with attention of your own, "
        "compare its output under `segment_ids_BT` with that of rows by themselves"
    )


def every_gradient(gradients: Gradients) -> Outcome:
    """Each trained parameter has a finite gradient that is not zero."""
    zero, wild = gradients.without()
    if wild:
        return failed(
            f"the gradient of {_some(wild)} is no finite number. Look for NaN or infinity in the "
            "weights of the model directory, or for a loss that divides by zero on this data; "
            "float16 weights are a common source: use --dtypes.params float32"
        )
    if zero:
        return failed(
            f"{_some(zero)} would be trained and gets no gradient: the loss does not depend on it, "
            "so it would never move while its weight decay and its memory are paid for. It is not "
            "read in the forward pass, or something stops its gradient. Take it out of lora.targets"
            " (or of what the task trains), or mend the module that should use it"
        )
    return passed("every trained parameter has one")


def accumulation(gradients: Gradients) -> Outcome:
    """1, 2 and 4 micro-batches give one update."""
    limit = 1e-4 if gradients.patient.tolerance < 0.01 else 0.05
    losses = {count: gradients.of(count)[0] for count in (1, 2, 4)}
    worst = max(gradients.distance(count) for count in (2, 4))
    spread = max(abs(x - losses[1]) for x in losses.values())
    if worst <= limit and spread <= limit * max(1.0, abs(losses[1])):
        return passed(f"gradients of 1, 2 and 4 micro-batches differ by {worst:.1g} of their norm")
    shown = ", ".join(f"{x:.5g}" for x in losses.values())
    return failed(
        f"1, 2 and 4 micro-batches give other gradients (apart by {worst:.2g} of their norm) and "
        f"losses ({shown}): the loss takes a mean inside each micro-batch, so that a token counts "
        "for more where its micro-batch has fewer. The result would depend on --accumulate. Return "
        "sums in `Loss.total` and `Loss.weight` and let the trainer divide once; what needs a mean "
        "over the whole batch goes into `Task.measure`"
    )


def reference(patient: Patient, rows: Rows, observed: dict[str, float]) -> Outcome:
    """The policy is its own reference before the first step.

    Args:
      patient: whose.
      rows: a first batch.
      observed: of reinforcement, what the round said of itself.
    """
    config = patient.config
    other = getattr(config, "reference_model", None)
    if other is not None:
        return skipped(f"the reference is another model, {other}")
    if isinstance(config, PreferenceConfig):
        if not isinstance(config.loss, DPO | RobustDPO | IPO):
            return skipped(f"{config.loss.type} has no reference")
        found = patient.evaluate(rows)
        apart = max(abs(found[f"reward_{n}"]) / config.loss.beta for n in ("chosen", "rejected"))
        if not isinstance(config.loss, IPO):  # whose rewards are averages over tokens already
            apart /= max(found["length_chosen"], found["length_rejected"], 1)
        expected = _start_of(config.loss, found)
        off = abs(found["loss"] - expected) > 1e-3 * max(1.0, expected) + patient.tolerance
        told = f"the loss starts at {found['loss']:.4f} (expected {expected:.4f})"
    elif isinstance(config, KTOConfig):
        found = patient.evaluate(rows)
        sizes = rows["loss_weights"][:, 0].sum(-1)
        rewards = max(abs(found[f"reward_{n}"]) for n in ("desirable", "undesirable"))
        apart = max(rewards / config.beta, abs(found["kl"])) / max(float(sizes.max()), 1)
        off, told = False, f"rewards start at {rewards:.2g}, the baseline at {found['kl']:.2g}"
    else:
        found = observed | (patient.evaluate(rows) if "ref_logps" in rows else {})
        kl = found.get("kl", found.get("kl_reference"))
        if kl is None:
            return skipped("nothing is compared with a reference")
        apart, off, told = abs(kl), False, f"the divergence starts at {kl:.2g} nats a token"
    if apart <= patient.tolerance and not off:
        return passed(told)
    return failed(
        f"the reference is not the policy before the first step: they lie {apart:.3g} nats a token "
        f"apart, and {told}. Rewards and divergences would count from a model that you do not train"
        ". Either the log-probs of the reference are of other weights, another tokenizer or "
        "template (delete the run's reference/ folder and start it again), or the adapters are not "
        "neutral at the start (see the check of adapters), or the model draws dropout"
    )


def _start_of(loss: DPO | RobustDPO | IPO, found: dict[str, float]) -> float:
    """The loss of a policy that is its own reference."""
    if isinstance(loss, IPO):
        return 1 / (4 * loss.beta**2)
    return math.log(2) + getattr(loss, "nll_weight", 0.0) * found["nll_chosen"]


def _flat(rows: Rows) -> Rows:
    """tokens, targets, segment_ids, positions as [B, T]."""
    names = ("tokens", "targets", "segment_ids", "positions")
    return {name: rows[name].reshape(-1, rows[name].shape[-1]) for name in names}


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
