"""Opening a bundle: checked files, weights on devices, programs, and functions to call.

Nothing here needs the code that made the bundle; nothing of a bundle runs as Python.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jax import export

from fornax.config.errors import BundleError
from fornax.export import _exported, buckets, files, manifest, weights
from fornax.export.dtypes import numpy_dtype
from fornax.export.manifest import Function, Manifest
from fornax.export.placement import OneDevice, Placement, platform_of
from fornax.export.program import Memory, Program
from fornax.export.spec import Signature
from fornax.export.trace import abstract_argument, x64
from fornax.export.weights import Weights

__all__ = ["Bundle", "Callable", "Loaded", "Verify", "load", "open_bundle"]

Verify = Literal["all", "as-read", "none"] | bool


def open_bundle(path: str | Path, *, verify: Verify = True) -> "Bundle":
    """Read and check a bundle's manifest and files.

    Args:
      path: the bundle's directory.
      verify: True or `"all"`: every file's hash now; `"as-read"`: the sizes now, and each hash
        when the file is read (weights: while they are loaded); False or `"none"`: no hashes.

    Raises:
      BundleError: naming the file and what is wrong with it.
    """
    mode = {True: "all", False: "none"}.get(verify, verify) if isinstance(verify, bool) else verify
    root = Path(path)
    if not root.is_dir():
        raise BundleError(f"{root} is no directory, so it is no bundle")
    data = files.read_checked(root, files.MANIFEST, None, limit=256 << 20)
    found = manifest.from_json(data, str(root / files.MANIFEST))
    files.check_listing(root, found.files)
    if mode == "all":
        files.verify(root, found.files, found.files)
    return Bundle(root, found, hashes=mode != "none", weights_checked=mode != "as-read")


class Bundle:
    """An opened bundle; see `open_bundle`."""

    def __init__(self, path: Path, found: Manifest, *, hashes: bool, weights_checked: bool):
        self.path = path
        self.manifest = found
        self._hashes = hashes
        self._weights_checked = weights_checked

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

        Raises:
          BundleError: naming the file or weight that is damaged.
        """
        placement = placement or OneDevice()
        loaded = weights.read(self.path, self.manifest.weights, placement)
        if not self._weights_checked:
            below = f"{weights.DIRECTORY}/"
            names = [name for name in self.manifest.files if name.startswith(below)]
            files.verify(self.path, self.manifest.files, names)
            self._weights_checked = True
        return loaded

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
        program = f.programs[platform]
        module = self.read(program.file)
        try:
            _exported.stablehlo_version(module)
            return self._rebuild(f, platform, module)
        except BundleError as error:
            raise BundleError(f"{self.path / program.file}: {error}") from None

    def _rebuild(self, f: Function, platform: str, module: bytes) -> export.Exported:
        program = f.programs[platform]
        try:
            scope = export.SymbolicScope(f.constraints)
            with x64(f.x64):
                arguments = [abstract_argument(spec, scope) for spec in f.signature.arguments]
                outputs = [abstract_argument(spec, scope) for spec in f.signature.outputs.values()]
        except Exception as error:
            raise BundleError(f"its sizes cannot be read by jax: {error}") from None
        stored = [self.manifest.weights[name] for name in f.weights]
        return _exported.rebuild(
            name=f.signature.name,
            inputs=[
                *(_exported.abstract(w.shape, numpy_dtype(w.dtype)) for w in stored),
                *(_exported.abstract(a.shape, a.dtype) for a in arguments),
            ],
            outputs=[_exported.abstract(o.shape, o.dtype) for o in outputs],
            module=module,
            platform=platform,
            kept=program.kept,
            calling_convention=program.calling_convention,
            uses_global_constants=program.uses_global_constants,
        )

    def compile(
        self,
        function: str,
        dims: Mapping[str, int],
        weights: Weights,
        placement: Placement | None = None,
    ) -> Program:
        """The function compiled for one bucket, e.g. `{"b": 8, "t": 64}`.

        Raises:
          BundleError: when the dimensions are not the function's, or it cannot be compiled here.
        """
        placement = placement or OneDevice()
        f = self._function(function)
        signature = f.signature
        if set(dims) != set(signature.dims):
            raise BundleError(
                f"{function!r} has the dimensions {', '.join(signature.dims)}; {dict(dims)} "
                "names others"
            )
        exported = self.exported(function, platform_of(placement))
        held = [weights.params[name] for name in f.weights]
        shardings = [
            *(array.sharding for array in held),
            *(
                placement.spread(s.sizes(dims), s.axes, signature.rows_of(s))
                for s in signature.arguments
            ),
        ]
        arguments = [
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in held),
            *(
                jax.ShapeDtypeStruct(spec.sizes(dims), numpy_dtype(spec.dtype))
                for spec in signature.arguments
            ),
        ]
        with x64(f.x64):
            try:
                lowered = jax.jit(
                    _renamed(exported), in_shardings=tuple(shardings), keep_unused=True
                ).lower(*arguments)
                compiled = lowered.compile()
            except Exception as error:
                raise BundleError(
                    f"{function!r} of {self.path} cannot be compiled for {dict(dims)} on "
                    f"{platform_of(placement)} with jax {jax.__version__}: {error}"
                ) from error
        executable: Any = compiled.runtime_executable()
        one = len(placement.devices) == 1
        return Program(
            executable=executable,
            call=executable.execute if one else _call_compiled(compiled),
            signature=signature,
            dims=dims,
            weights=held,
            placement=placement,
            memory=_memory(compiled),
            x64=f.x64,
        )


def _renamed(exported: export.Exported) -> Any:
    def call(*arrays: Any) -> Any:
        return exported.call(*arrays)

    call.__name__ = call.__qualname__ = exported.fun_name
    return call


def _call_compiled(compiled: Any) -> Any:
    return lambda arrays: list(compiled(*arrays))


def _memory(compiled: Any) -> Memory:
    found = compiled.memory_analysis()
    return Memory(
        arguments=found.argument_size_in_bytes,
        outputs=found.output_size_in_bytes,
        temporaries=found.temp_size_in_bytes,
        code=found.generated_code_size_in_bytes,
    )


class Callable:
    """A function of a loaded bundle: named arrays of any size in, numpy arrays out.

    Inputs are padded to a bucket and outputs unpadded; more rows than the largest bucket holds
    are run in parts. A bucket is compiled when it is first needed.
    """

    def __init__(self, bundle: Bundle, function: str, weights: Weights, placement: Placement):
        self.signature = bundle.signature(function)
        self._bundle = bundle
        self._weights = weights
        self._placement = placement
        self._programs: dict[tuple[tuple[str, int], ...], Program] = {}

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.dtype}{s.shape}" for s in self.signature.inputs.values())
        return f"<{self.signature.name}({inputs}) of {self._bundle.path}>"

    def __call__(self, **inputs: Any) -> dict[str, np.ndarray]:
        """The outputs by name.

        Raises:
          BundleError: naming an input that is missing, unknown, of a wrong dtype or shape, or
            larger than any bucket.
        """
        request = {name: self._array(name, value) for name, value in inputs.items()}
        buckets.measure(self.signature, request)
        parts = [self._run(part) for part in buckets.split(self.signature, request)]
        if len(parts) == 1:
            return parts[0]
        joined = {}
        for name, spec in self.signature.outputs.items():
            by_row = bool(spec.shape) and spec.shape[0] == self.signature.batch
            joined[name] = (
                np.concatenate([part[name] for part in parts]) if by_row else parts[0][name]
            )
        return joined

    def program(self, dims: Mapping[str, int]) -> Program:
        """The program of a bucket, compiled if it was not yet."""
        key = tuple(sorted(dims.items()))
        if key not in self._programs:
            self._programs[key] = self._bundle.compile(
                self.signature.name, dims, self._weights, self._placement
            )
        return self._programs[key]

    def _run(self, request: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        signature = self.signature
        own = buckets.measure(signature, request)
        rows = own.get(signature.batch) if signature.batch else None
        dims = buckets.choose(signature, rows, own)
        outputs = self.program(dims)(buckets.assemble(signature, dims, [request]))
        host = {name: np.asarray(value) for name, value in outputs.items()}
        return buckets.take(signature, dims, host, [request])[0]

    def _array(self, name: str, value: Any) -> np.ndarray:
        spec = self.signature.inputs.get(name)
        if spec is None:
            return np.asarray(value)
        if spec.dtype == "bytes":
            return np.asarray(value, object)
        if isinstance(value, np.ndarray | jax.Array):
            return np.asarray(value)
        return _from_python(value, spec.dtype)


def _from_python(value: Any, dtype: str) -> np.ndarray:
    """A list or number as the dtype asked for, if numpy counts that a safe change of kind."""
    array = np.asarray(value)
    wanted = numpy_dtype(dtype)
    same_kind = np.can_cast(array.dtype, wanted, "same_kind") or (
        array.dtype.kind in "iu"
        and wanted.kind in "iuV"
        or array.dtype.kind == "f"
        and wanted.kind in "fV"
    )
    return array.astype(wanted) if same_kind else array


class Loaded(Mapping[str, Callable]):
    """The functions of a bundle, ready to call, by name."""

    def __init__(self, bundle: Bundle, weights: Weights, placement: Placement):
        self.bundle = bundle
        self.weights = weights
        self.placement = placement
        self._functions = {
            name: Callable(bundle, name, weights, placement) for name in bundle.manifest.functions
        }

    def __getitem__(self, name: str) -> Callable:
        if name not in self._functions:
            self.bundle.signature(name)
        return self._functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __len__(self) -> int:
        return len(self._functions)


def load(
    path: str | Path,
    *,
    mesh: jax.sharding.Mesh | None = None,
    rules: Mapping[str, tuple[str, ...]] | None = None,
    device: Any = None,
    verify: bool = True,
) -> Loaded:
    """Load a bundle: verify, put the weights on a device, run the golden inputs and compare.

    Args:
      path: the bundle.
      mesh: several devices to lay it on, by the axes that it names.
      rules: logical axis to axes of the mesh, over `fornax.mesh.DEFAULT_RULES`.
      device: one device, without a mesh; None is jax's first.
      verify: whether hashes are compared.

    Raises:
      BundleError: when the bundle is damaged or does not compute here what it computed.
      ShardingError: an axis without a rule, or a weight that does not divide over the mesh.
    """
    placement: Placement = OneDevice(device)
    if mesh is not None:
        from fornax.export.layout import OnMesh

        placement = OnMesh(mesh, rules)
    elif rules is not None:
        raise BundleError("rules lay a bundle on a mesh, and load was given none; pass mesh=")
    bundle = open_bundle(path, verify="as-read" if verify else "none")
    return Loaded(bundle, bundle.load_weights(placement), placement)
