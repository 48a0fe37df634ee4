"""The page of all recipes, with what each is predicted to need and to reach on its chips."""

from collections.abc import Iterator, Mapping

from fornax.plan.denoiser import planned_facts
from fornax.plan.diffusion import plan_diffusion
from fornax.plan.format import format_bound, format_bytes, format_count, format_seconds
from fornax.plan.recipes import (
    Compiled,
    Recipe,
    compiled_recipes,
    find_denoiser_recipes,
    find_recipes,
    find_serve_recipes,
    find_tune_recipes,
)
from fornax.plan.topology import Topology, parse_topology
from fornax.plan.train import plan_train

__all__ = ["recipes_page"]

_HEAD = (
    *("recipe", "chips", "tokens per step", "remat", "memory of a chip", "step", "MFU"),
    *("tokens/s/chip", "tokens/day", "bound by", "compiled: memory", "compiled: step", "MFU"),
)


def recipes_page() -> str:
    """The table of all recipes with predicted figures, as Markdown."""
    lines = [
        "# Recipes",
        "",
        "Complete configurations to start from, in `recipes/`. Each fits the chips it names, by",
        "estimate; the figures are predicted from closed forms and the hardware table, and",
        "`fornax plan` with the compiler says more. The guide is",
        "[Size a run before you rent](../guides/plan.md). No recipe is for 405B on v5e: with 16 GB",
        "a chip its state alone would take more slices than make sense; none is for DeepSeek V3 on",
        "v5e and v6e, whose chips do not hold a layer's experts and their gradients.",
        "",
        "The last three columns are of training steps that the TPU's compiler made for these chips",
        "on a machine without one (`benchmarks/recipes_compiled.py`); their times are predicted",
        "from the program. None ran. Where they are empty, the step was not compiled.",
        "",
        f"| {' | '.join(_HEAD)} |",
        f"| {' | '.join(['---'] * len(_HEAD))} |",
    ]
    kept = compiled_recipes()
    for recipe in find_recipes():
        for name in recipe.topologies:
            cells = _cells(recipe, parse_topology(name), kept.get((recipe.name, name)))
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *_denoisers(kept), "", *_tuned(), "", *_served(), "", *_SMALL]
    return "\n".join([*lines, ""])


_SMALL = (
    "## To run on this machine",
    "",
    "Small ones, most on what `fornax quickstart` leaves; the head of each has its command.",
    "",
    "| recipe | what it does | guide |",
    "| --- | --- | --- |",
    "| `stdlib`, `stdlib-moe` | pretrain a decoder | [training](../guides/training.md) |",
    "| `letters` | train a DiT | [diffusion](../guides/diffusion-training.md) |",
    "| `sft` | tune all parameters | [SFT](../guides/sft.md) |",
    "| `lora` | tune adapters | [adapters](../guides/lora.md) |",
    "| `dpo` | preferences between answers | [preference](../guides/preference.md) |",
    "| `grpo` | rewards | [reinforcement](../guides/reinforcement.md) |",
    "| `distill` | match a teacher | [distillation](../guides/distillation.md) |",
    "| `serve` | OpenAI's API | [serving](../guides/serving.md) |",
    "| `host` | a bundle over HTTP and gRPC | [hosting](../guides/hosting.md) |",
)
_TUNED_HEAD = (
    *("recipe", "command", "chips", "rows of a step", "memory of a chip", "step", "MFU"),
    *("tokens/s/chip", "tokens/day", "bound by"),
)
_SERVED_HEAD = (
    *("recipe", "chips", "chips of an engine", "memory of a chip", "sequences of full length"),
    *("sequences at once", "a token each", "tokens/s/chip", "bound by"),
)


def _tuned() -> Iterator[str]:
    """Lines of the table of post-training."""
    yield "## Post-training"
    yield ""
    yield "Configurations of `fornax tune`; the figures are those of `fornax plan tune`, from the"
    yield "traced step ([plans](../guides/plan.md#plan-post-training)). Of `grpo`, memory is the"
    yield "most of all programs, and the speed that of whole rounds. Distillation is not planned."
    yield ""
    yield f"| {' | '.join(_TUNED_HEAD)} |"
    yield f"| {' | '.join(['---'] * len(_TUNED_HEAD))} |"
    for recipe in find_tune_recipes():
        for name in recipe.topologies:
            topology, config = parse_topology(name), recipe.config()
            plan = recipe.plan(topology)
            most, speed = max((p.memory for p in plan.programs), key=lambda m: m.total), plan.speed
            assert speed is not None
            assert plan.run is not None
            cells = (
                f"`{recipe.name}`",
                f"`tune {recipe.method}`",
                f"`{topology.name}`",
                f"{plan.run.batch_size} x {config.max_length}",
                f"{format_bytes(most.total)} of {format_bytes(most.usable)}",
                format_seconds(speed.step_seconds),
                f"{speed.mfu:.1%}",
                f"{speed.tokens_per_second_per_chip:,.0f}",
                format_count(speed.tokens_per_day),
                format_bound(speed.bound, topology.chip.platform),
            )
            yield f"| {' | '.join(cells)} |"


def _served() -> Iterator[str]:
    """Lines of the table of serving."""
    yield "## Serving"
    yield ""
    yield "Configurations of `fornax serve`; the figures are those of `fornax plan serve"
    yield "--predicted` ([plans](../guides/plan-serving.md)), at the largest batch of sequences"
    yield "that are half as long as they may be."
    yield ""
    yield f"| {' | '.join(_SERVED_HEAD)} |"
    yield f"| {' | '.join(['---'] * len(_SERVED_HEAD))} |"
    for recipe in find_serve_recipes():
        for name in recipe.topologies:
            topology = parse_topology(name)
            plan = recipe.plan(topology)
            longest = plan.engine.max_model_len
            half = min(one.context for one in plan.decode if 2 * one.context >= longest)
            found = max((d for d in plan.decode if d.context == half), key=lambda d: d.batch)
            memory = plan.memory
            cells = (
                f"`{recipe.name}`",
                f"`{topology.name}`",
                f"{plan.engine.chips:g}",
                f"{format_bytes(memory.total)} of {format_bytes(memory.usable)}",
                f"{memory.sequences:.0f}",
                str(found.batch),
                format_seconds(found.seconds),
                f"{found.tokens_per_second_per_chip:,.0f}",
                found.bound,
            )
            yield f"| {' | '.join(cells)} |"


_DENOISER_HEAD = (
    *("recipe", "chips", "examples a step", "of latents", "remat", "memory of a chip", "step"),
    *("MFU", "bound by", "compiled: memory", "compiled: step", "MFU"),
)


def _denoisers(kept: Mapping[tuple[str, str], Compiled]) -> Iterator[str]:
    """Lines of the table of denoisers."""
    yield "## Denoisers"
    yield ""
    yield "Configurations of `fornax diffusion train`; the first figures are predicted from the"
    yield "traced step ([training](../guides/diffusion-training.md)). None ran on these chips."
    yield ""
    yield f"| {' | '.join(_DENOISER_HEAD)} |"
    yield f"| {' | '.join(['---'] * len(_DENOISER_HEAD))} |"
    for recipe in find_denoiser_recipes():
        for name in recipe.topologies:
            config, topology = recipe.config(), parse_topology(name)
            plan = plan_diffusion(config, topology)
            memory, speed = plan.main.memory, plan.speed
            assert speed is not None
            found = kept.get((recipe.name, name))
            facts = planned_facts(config)
            shape = (*facts.usual, facts.channels)
            cells = (
                f"`{recipe.name}`",
                f"`{name}`",
                str(config.batch_size),
                " x ".join(map(str, shape)),
                config.remat,
                f"{format_bytes(memory.total)} of {format_bytes(memory.usable)}",
                format_seconds(speed.step_seconds),
                f"{speed.mfu:.1%}",
                format_bound(speed.bound, topology.chip.platform),
                *(_compiled_cells(found) if found else ("", "", "")),
            )
            yield f"| {' | '.join(cells)} |"


def _cells(recipe: Recipe, topology: Topology, compiled: Compiled | None) -> tuple[str, ...]:
    config = recipe.config()
    plan = plan_train(config, topology, predicted=True)
    memory, speed = plan.main.memory, plan.speed
    assert speed is not None
    return (
        f"`{recipe.name}`",
        f"`{topology.name}`",
        format_count(config.batch_size * config.seq_len),
        config.remat,
        f"{format_bytes(memory.total)} of {format_bytes(memory.usable)}",
        format_seconds(speed.step_seconds),
        f"{speed.mfu:.1%}",
        f"{speed.tokens_per_second_per_chip:,.0f}",
        format_count(speed.tokens_per_day),
        format_bound(speed.bound, topology.chip.platform),
        *(_compiled_cells(compiled) if compiled else ("", "", "")),
    )


def _compiled_cells(compiled: Compiled) -> tuple[str, str, str]:
    memory = format_bytes(compiled.memory_bytes)
    if not compiled.fits:
        return f"{memory}: does not fit", "", ""
    return memory, format_seconds(compiled.step_seconds), f"{compiled.mfu:.1%}"
