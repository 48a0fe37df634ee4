"""Examples that were encoded before training: latents and text states in safetensors files.

Shapes: N examples of a file, X the shape of an example's latents.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fornax.checkpoint.safetensors_file import DTYPES, FLOATS, open_file
from fornax.config.errors import DataError
from fornax.diffusion.data.config import EncodedConfig

__all__ = ["EncodedExamples"]


class EncodedExamples:
    """A split of a folder's examples; arrays are read from disk when they are asked for.

    Raises:
      DataError: no files, or arrays that are missing or of other shapes than the config says.
    """

    def __init__(self, config: EncodedConfig, split: str):
        self.config = config
        self._files = sorted(Path(config.path).expanduser().glob("*.safetensors"))
        if not config.path or not self._files:
            raise DataError(
                f"data.path={config.path!r} holds no .safetensors files; name a folder of files "
                "with `latents` and the text states"
            )
        counts = [self._looked_at(file) for file in self._files]
        places = [(f, i) for f, count in enumerate(counts) for i in range(count)]
        if split != "train" and not config.holdout:
            raise DataError(
                "data.holdout=0 leaves no example for evaluation; raise it, or leave eval.every out"
            )
        cut = len(places) - config.holdout
        if cut < 1:
            raise DataError(
                f"data.holdout={config.holdout} of {len(places)} examples leaves none to train on"
            )
        self._places = places[:cut] if split == "train" else places[cut:]
        *size, self.channels = config.shape
        self.sizes: Any = [tuple(size)]
        self.bucket = np.zeros(len(self._places), np.int64)
        names = " ".join(f"{f.name}:{n}" for f, n in zip(self._files, counts, strict=True))
        self.identity = f"encoded {config.shape} {split} {names}"
        for index in range(len(self._places)) if config.verify else ():
            self._finite(index, "latents")
            self.arrays(index)

    def _looked_at(self, file: Path) -> int:
        """How many examples a file has."""
        wanted = {"latents": self.config.shape}
        wanted |= {name: shape for name, (shape, _) in self.config.arrays.items()}
        wanted.pop("guidance", None)
        tensors = open_file(file, DTYPES)
        missing = [name for name in wanted if name not in tensors and name != "text_mask"]
        if missing:
            raise DataError(f"{file} has no {', '.join(missing)}; encode its examples again")
        count = tensors["latents"].shape[0]
        for name, shape in wanted.items():
            if name not in ("text_mask", "sizes") and name in tensors:
                _check_dtype(file, name, tensors[name].dtype)
            if name in tensors and tensors[name].shape != (count, *shape):
                raise DataError(
                    f"{file}: {name} has shape {tensors[name].shape}, and the config says {shape} "
                    f"for each of {count} examples; set data.shape and the text's sizes to what "
                    "was encoded"
                )
        return count

    def get(
        self, index: int, *, mirrored: bool = False, rng: np.random.Generator | None = None
    ) -> tuple[NDArray[np.float32], str]:
        """(*X) float32 latents, and no caption: `arrays` has the text's states.

        Raises:
          DataError: latents that are not finite.
        """
        del mirrored, rng  # latents are as they were encoded
        return self._finite(index, "latents"), ""

    def arrays(
        self, index: int, *, dropped: bool = False, mirrored: bool = False
    ) -> dict[str, NDArray[Any]]:
        """What the network is conditioned on, float32, the mask int32.

        Of a dropped caption the states are zeros, all of which are attended to.
        """
        del mirrored  # as of `get`
        found: dict[str, NDArray[Any]] = {}
        for name, (shape, _) in self.config.arrays.items():
            if name == "guidance":
                found[name] = np.asarray(self.config.guidance, np.float32)
            elif name == "text_mask":
                found[name] = np.ones(shape, np.int32)
                if not dropped and name in open_file(self._files[self._places[index][0]], DTYPES):
                    found[name] = self._read(index, name).astype(np.int32)
            elif dropped and name != "sizes":
                found[name] = np.zeros(shape, np.float32)
            else:
                found[name] = self._finite(index, name)
        return found

    def caption(self, index: int) -> str:
        """None: it is encoded."""
        del index
        return ""

    def weight(self, index: int) -> float:
        """All count the same."""
        del index
        return 1.0

    def content(self, index: int) -> str:
        """The file and the row."""
        file, row = self._places[index]
        return f"{self._files[file]}:{row}"

    def frame(self, index: int) -> tuple[int, ...]:
        """Nothing of what latents were encoded from; files have it as `sizes`."""
        del index
        return ()

    def texts(self) -> Iterable[str]:
        """No captions."""
        return ()

    def _finite(self, index: int, name: str) -> NDArray[np.float32]:
        found = self._read(index, name).astype(np.float32)
        if not np.isfinite(found).all():
            file, row = self._places[index]
            raise DataError(
                f"{self._files[file]}: {name} of example {row} has values that are not finite; "
                "encode it again, in float32 where the encoder overflows"
            )
        return found

    def _read(self, index: int, name: str) -> NDArray[Any]:
        file, row = self._places[index]
        return np.asarray(open_file(self._files[file], DTYPES)[name].view()[row])


def _check_dtype(file: Path, name: str, dtype: np.dtype) -> None:
    """Refuse integers, such as the pixels that latents are made of.

    Raises:
      DataError: no numbers with a fraction.
    """
    if dtype not in FLOATS.values():
        raise DataError(f"{file}: {name} are {dtype}; encode them as float32, float16 or bfloat16")
