"""Opening a bundle: checked files, weights on devices, compiled programs, golden runs.

Nothing here needs the code that made the bundle; nothing of a bundle runs as Python.
"""

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from jax import export

from fornax.config.errors import BundleError
from fornax.export import executables, files, golden, reading, weights
from fornax.export.compiling import compile_program, loaded_program, rebuild
from fornax.export.golden import GoldenArrays, Report
from fornax.export.manifest import Function, Manifest
from fornax.export.placement import OneDevice, Placement, platform_of
from fornax.export.program import Program
from fornax.export.spec import Signature
from fornax.export.weights import Weights

__all__ = ["Bundle", "Verify", "open_bundle"]

Verify = Literal["all", "as-read", "none"] | bool


def open_bundle(
    path: str | Path, *, verify: Verify = True, trust_executables: bool = False
) -> "Bundle":
    """Read and check a bundle's manifest and files.

    Args:
      path: the bundle's directory.
      verify: True or `"all"`: every file's hash now; `"as-read"`: the sizes now, and each hash
        when the file is read (weights: while they are loaded); False or `"none"`: no hashes.
      trust_executables: whether to run native code that the bundle brings, which can do anything,
        instead of compiling here.

    Raises:
      BundleError: naming the file and what is wrong with it.
    """
    mode = {True: "all", False: "none"}.get(verify, verify) if isinstance(verify, bool) else verify
    root = Path(path)
    if not root.is_dir():
        raise BundleError(
            f"{root} is not a directory, so it is not a bundle; name the folder of a version, "
            "such as models/ranker/1"
        )
    data = files.read_checked(root, files.MANIFEST, None, limit=256 << 20)
    found = reading.from_json(data, str(root / files.MANIFEST))
    files.check_listing(root, found.files)
    if mode == "all":
        files.verify(root, found.files, found.files)
    return Bundle(
        root,
        found,
        digest=hashlib.sha256(data).hexdigest(),
        hashes=mode != "none",
        weights_checked=mode != "as-read",
        trust_executables=trust_executables,
    )


class Bundle:
    """An opened bundle; see `open_bundle`."""

    def __init__(
        self,
        path: Path,
        found: Manifest,
        *,
        digest: str = "",
        hashes: bool,
        weights_checked: bool,
        trust_executables: bool = False,
    ):
        self.path = path
        self.manifest = found
        self.digest = digest
        """SHA-256 of the manifest, which has those of all other files: it names the bundle."""
        self._hashes = hashes
        self._weights_checked = weights_checked
        self._hashing: Future[None] | None = None
        self._lock = threading.Lock()
        self._trusted = trust_executables
        self._exported: dict[tuple[str, str], export.Exported] = {}

    def __repr__(self) -> str:
        return f"Bundle({str(self.path)!r}, functions={list(self.manifest.functions)})"

    def signature(self, function: str) -> Signature:
        """A function's inputs, outputs and buckets.

        Raises:
          BundleError: for a function that the bundle does not have.
        """
        return self._function(function).signature

    def _function(self, name: str) -> Function:
        found = self.manifest.functions.get(name)
        if found is None:
            raise BundleError(
                f"{self.path} has no function {name!r}; it has {', '.join(self.manifest.functions)}"
            )
        return found

    def verify(self) -> None:
        """Hash every file again.

        Raises:
          BundleError: naming the first that is not as it was sealed.
        """
        files.check_listing(self.path, self.manifest.files)
        files.verify(self.path, self.manifest.files, self.manifest.files)

    def read(self, name: str) -> bytes:
        """A file of the bundle, checked against its hash unless hashes are off."""
        return files.read_checked(
            self.path, name, self.manifest.files[name] if self._hashes else None
        )

    def load_weights(self, placement: Placement | None = None) -> Weights:
        """All weights, on the placement's devices; hashed meanwhile if they were not yet.

        Several threads may load onto several placements: the hashing of one does for all.

        Raises:
          BundleError: naming the file or weight that is damaged.
        """
        placement = placement or OneDevice()
        still = files.watch(self.path, self._weight_files())
        if self._weights_checked:
            return weights.read(self.path, self.manifest.weights, placement, still)
        hashing = self._hash_weights()
        try:
            loaded = weights.read(self.path, self.manifest.weights, placement, still)
        finally:
            hashing.result()
        self._weights_checked = True
        return loaded

    def _weight_files(self) -> list[str]:
        below = f"{weights.DIRECTORY}/"
        return [name for name in self.manifest.files if name.startswith(below)]

    def _hash_weights(self) -> "Future[None]":
        """The hashing that is under way; a new one where there is none, or what is done failed."""
        with self._lock:
            found = self._hashing
            if found is None or (found.done() and found.exception() is not None):
                names = self._weight_files()
                pool = ThreadPoolExecutor(1, thread_name_prefix="fornax-hash")
                found = pool.submit(files.verify, self.path, self.manifest.files, names)
                pool.shutdown(wait=False)
                self._hashing = found
            return found

    def exported(self, function: str, platform: str) -> export.Exported:
        """The function as jax has it: positional arrays (weights, inputs, lengths) to a tuple.

        Raises:
          BundleError: when the bundle was not made for the platform, or this jax cannot read it.
        """
        f = self._function(function)
        if platform not in f.programs:
            raise BundleError(
                f"{self.path} was exported for {', '.join(self.manifest.platforms)} and not for "
                f"{platform}; export with platforms=(…, {platform!r})"
            )
        key = (function, platform)
        if key not in self._exported:
            file = f.programs[platform].file
            try:
                self._exported[key] = rebuild(f, platform, self.read(file), self.manifest.weights)
            except BundleError as error:
                raise BundleError(f"{self.path / file}: {error}") from None
        return self._exported[key]

    def compile(
        self,
        function: str,
        dims: Mapping[str, int],
        weights: Weights,
        placement: Placement | None = None,
        *,
        options: Mapping[str, object] | None = None,
    ) -> Program:
        """The function compiled for one bucket, e.g. `{"b": 8, "t": 64}`.

        Args:
          options: XLA's compiler options for this program.

        Raises:
          BundleError: when the dimensions are not the function's, or it cannot be compiled here.
        """
        placement = placement or OneDevice()
        f = self._function(function)
        if self._trusted and not options and len(placement.devices) == 1:
            ready = self._ahead(f, dims, weights, placement)
            if ready is not None:
                return ready
        exported = self.exported(function, platform_of(placement))
        try:
            return compile_program(f, exported, dims, weights, placement, options)
        except BundleError as error:
            raise BundleError(f"{self.path}: {error}") from error.__cause__

    def _ahead(
        self, f: Function, dims: Mapping[str, int], weights: Weights, placement: Placement
    ) -> Program | None:
        """The program that the bundle brings compiled for this machine, if it does."""
        device, name = placement.devices[0], f.signature.name
        found = executables.find(self.manifest.executables, name, dims, device)
        if found is None:
            return None
        executable = executables.deserialize(
            self.read(found.file), device, f"{name} {dict(dims)} of {self.path}"
        )
        if executable is None:
            return None
        return loaded_program(f, executable, dims, weights, placement)

    def golden(self, function: str) -> GoldenArrays | None:
        """A function's warm-up inputs and their outputs, of the golden bucket's sizes.

        None for a bundle that was saved unchecked.
        """
        record = self._function(function).golden
        if record is None:
            return None
        arrays = golden.unpack(self.read(record.file), self.path / record.file)
        return golden.arrays_of(self.signature(function), record, arrays, self.path / record.file)

    def check_golden(
        self,
        function: str,
        weights: Weights,
        placement: Placement | None = None,
        program: Program | None = None,
    ) -> Report | None:
        """Run the golden inputs and compare; None for a bundle that was saved unchecked.

        Args:
          program: the compiled golden bucket (`manifest.functions[…].golden.dims`), if there is
            one; else it is compiled.

        Raises:
          BundleError: naming the output, the element that is off most, and how far.
        """
        placement = placement or OneDevice()
        f = self._function(function)
        stored = self.golden(function)
        if stored is None or f.golden is None:
            return None
        if program is None:
            program = self.compile(function, f.golden.dims, weights, placement)
        found = {name: np.asarray(v) for name, v in program(stored.inputs).items()}
        platform = platform_of(placement)
        return golden.compare(
            f.signature,
            f.golden,
            f.tolerance if platform == f.golden.platform else f.elsewhere,
            found,
            stored.outputs,
            f"this device ({placement.devices[0].device_kind}, {platform}) in {self.path}",
        )
