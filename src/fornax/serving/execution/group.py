"""Models that are laid over the devices of several processes.

Process 0 answers requests. Of a model on a mesh over all processes each has its part: the others
load it when process 0 does, run its programs on the same inputs and in the same order, and release
of it when process 0 does. A model that is on no such mesh is process 0's alone.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fornax.config import environment, from_mapping, to_mapping
from fornax.config.errors import BundleError, ClusterError
from fornax.config.frames import LinkError
from fornax.export.bundle import Bundle, open_bundle
from fornax.export.program import Program
from fornax.export.weights import Weights
from fornax.mesh import check_processes
from fornax.mesh.group import Leader, Member, Operation, join_group
from fornax.mesh.startup import initialize
from fornax.profile import CAPTURE, FollowedCaptures
from fornax.serving.backend import Backend
from fornax.serving.config import HostConfig
from fornax.serving.settings import OnMesh

__all__ = ["Lay", "OtherParts", "follow", "join_host", "refuse_backend"]

_log = logging.getLogger("fornax.serving")
_NUMBERS = itertools.count()
_AT_ONCE = 8
"""Models that another process loads at once."""

Lay = Callable[[Bundle, OnMesh, Mapping[str, Any]], tuple[Weights, list[Program]]]
"""(bundle, mesh, compiler options): its weights and its programs, in an order that the bundle
sets."""


def join_host(config: HostConfig) -> Leader | Member:
    """Connect the processes of a model server; all of them call this once, before jax begins.

    Raises:
      ClusterError: they do not all join, differ, or are asked for what several processes cannot do.
    """
    if config.cpu_threads is not None:
        environment.limit_cpu_threads(config.cpu_threads)
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # as `DevicePool` has it
    initialize()
    check_processes("serving bundles", jax.process_count())
    if config.devices:
        check_processes("serving bundles on chosen devices", jax.process_count())
    return join_group({"config": config})


def refuse_backend(name: str, folder: Path, settings: Mapping[str, object]) -> Backend:
    """The factory of models that are not bundles, where there are several processes.

    Raises:
      ClusterError: always, and what to do instead.
    """
    del folder, settings
    check_processes("serving a language model beside bundles", jax.process_count())
    raise ClusterError(
        f"{name} is not a bundle, and this server joined a group; serve it elsewhere"
    )


class OtherParts:
    """In process 0: the parts of one model that the other processes have."""

    def __init__(self, leader: Leader, mesh: OnMesh, bundle: Bundle, options: Mapping[str, Any]):
        """Have the others begin to load; LinkError when one has ended."""
        self._leader = leader
        self._model = next(_NUMBERS)
        leader.tell(
            "load",
            model=self._model,
            path=str(bundle.path.absolute()),
            digest=bundle.digest,
            mesh=to_mapping(mesh),
            options=dict(options),
        )

    def bind(self, programs: Sequence[Program]) -> None:
        """Wait until the others have loaded, then have them run each program with this process.

        Raises:
          LinkError: one of them ended.
          ClusterError: one of them cannot load it, and why.
        """
        self._leader.wait(_name(self._model))
        for number, program in enumerate(programs):
            program.together = functools.partial(self._run, number)

    def _run(
        self, number: int, arrays: Sequence[np.ndarray], call: Callable[[], list[jax.Array]]
    ) -> list[jax.Array]:
        self._leader.tell("run", *arrays, model=self._model, program=number)
        try:
            return call()
        except Exception as error:  # the others may be in the middle of it: nothing else can follow
            raise self._leader.lose(error) from error

    def delete(self) -> None:
        """Have the others release it."""
        try:
            self._leader.tell("unload", model=self._model)
        except LinkError as error:  # they end
            _log.debug("model %d needs no unloading: %s", self._model, error)


class Parts:
    """In another process: its parts of the models of process 0."""

    def __init__(self, member: Member, lay: Lay, captures: FollowedCaptures):
        """`lay` loads a model's part."""
        self._member = member
        self._captures = captures
        self._lay = lay
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="fornax-load")
        self._models: dict[int, Future[tuple[Weights, list[Program]]]] = {}

    def carry_out(self, operation: Operation) -> None:
        """Do what process 0 does.

        Raises:
          ClusterError: there is no such operation.
        """
        name, arrays, facts = operation
        if name == "run":
            _, programs = self._models[facts["model"]].result()
            program = programs[facts["program"]]
            program.run(program.put(dict(zip(program.inputs, arrays, strict=True))))
        elif name == CAPTURE:
            self._captures.carry_out(facts)
        elif name == "load":
            self._models[facts["model"]] = self._pool.submit(self._load, facts)
        elif name == "unload":
            self._models.pop(facts["model"]).add_done_callback(_delete)
        else:
            raise ClusterError(
                f"{name!r} is not an operation of a model server; run one version alike"
            )

    def close(self) -> None:
        """Wait for what loads, and end the capture that runs."""
        self._captures.close()
        self._pool.shutdown(cancel_futures=True)

    def _load(self, facts: Mapping[str, Any]) -> tuple[Weights, list[Program]]:
        what = _name(facts["model"])
        try:
            bundle = open_bundle(facts["path"], verify="as-read")
            if bundle.digest != facts["digest"]:
                raise BundleError(f"{bundle.path} is not the bundle that process 0 has")
            laid = self._lay(bundle, from_mapping(OnMesh, facts["mesh"]), facts["options"])
        except Exception as error:
            self._member.report(what, refused=f"{type(error).__name__}: {error}")
            raise
        self._member.report(what)
        return laid


def follow(member: Member, lay: Lay, profiles: Path | None) -> None:
    """Have parts of process 0's models until it ends the group.

    Args:
      lay: loads a model's part.
      profiles: where this process's part of profiles goes; None: it makes none.

    Raises:
      LinkError: process 0 is gone.
    """
    parts = Parts(member, lay, FollowedCaptures(profiles, member))
    try:
        for operation in member.operations():
            parts.carry_out(operation)
    finally:
        parts.close()


def _name(model: int) -> str:
    return f"load {model}"


def _delete(loaded: "Future[tuple[Weights, list[Program]]]") -> None:
    if loaded.cancelled() or loaded.exception() is not None:
        return
    for array in loaded.result()[0].params.values():
        array.delete()
