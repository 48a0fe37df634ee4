"""Tiny random networks of diffusers, saved, beside the same folder read by Fornax."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from safetensors.numpy import load_file

from fornax.diffusion.models import Condition, load_component, save_component


def randomized(network: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """The network with random weights everywhere: fresh ones have zeros that hide what they do."""
    torch.manual_seed(seed)
    for name, parameter in network.named_parameters():
        noise = torch.randn_like(parameter)
        if parameter.ndim > 1:
            noise *= parameter[0].numel() ** -0.5
        else:
            noise = 0.1 * noise + ("norm" in name and name.endswith("weight"))
        parameter.data.copy_(noise)
    return network.eval()


def folder_of(network: torch.nn.Module, path: Path) -> Path:
    """The network saved as diffusers saves it."""
    network.save_pretrained(path)  # pyrefly: ignore
    return path


def check_output(found: jax.Array, want: torch.Tensor) -> None:
    """Compare to one part in ten thousand of the output's scale."""
    expected = want.detach().numpy()
    scale = np.abs(expected).max()
    assert scale > 1e-3
    error = np.abs(np.asarray(found) - expected).max() / scale
    assert error < 1e-4, f"differs by {error:.1e} of the output's scale"


def check_round_trip(module: nnx.Module, folder: Path, tmp_path: Path) -> None:
    """A folder written again has the same tensors, byte for byte, and the same config."""
    again = tmp_path / "again"
    save_component(module, again)
    first, second = ({}, {})
    for place, found in ((folder, first), (again, second)):
        for file in place.glob("*.safetensors"):
            found |= load_file(file)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.tobytes() == second[name].tobytes()
        assert tensor.shape == second[name].shape
    before, after = (json.loads((place / "config.json").read_text()) for place in (folder, again))
    for values in (before, after):
        values.pop("_diffusers_version"), values.pop("_name_or_path", None)
    assert after == before


def run(module: nnx.Module, x: np.ndarray, time: np.ndarray, condition: Condition) -> jax.Array:
    """The denoiser's output, compiled."""
    graphdef, state = nnx.split(module)
    call = jax.jit(lambda state, *given: nnx.merge(graphdef, state)(*given))
    return call(state, jnp.asarray(x), jnp.asarray(time, jnp.float32), condition)


def loaded(network: torch.nn.Module, tmp_path: Path) -> nnx.Module:
    """The network as Fornax reads it, after the round trip was checked."""
    folder = folder_of(network, tmp_path / "theirs")
    module = load_component(folder)
    check_round_trip(module, folder, tmp_path)
    return module


def channels_first(x: np.ndarray) -> torch.Tensor:
    """[B, ..., C] -> [B, C, ...]."""
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))
