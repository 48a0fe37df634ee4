"""The families Fornax knows, in the order in which saving tries them."""

from fornax.config.errors import ConfigError
from fornax.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from fornax.models.families.family import Family
from fornax.models.families.gemma import GEMMA2, GEMMA3
from fornax.models.families.gemma4 import GEMMA4
from fornax.models.families.glm import GLM4
from fornax.models.families.glm_moe import GLM4_MOE, GLM4_MOE_LITE
from fornax.models.families.gpt_oss import GPT_OSS
from fornax.models.families.granite import (
    GRANITE,
    GRANITE_HYBRID,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
)
from fornax.models.families.llama import LLAMA
from fornax.models.families.llama4 import LLAMA4
from fornax.models.families.mamba import MAMBA2
from fornax.models.families.mistral import MINISTRAL3, MISTRAL, MISTRAL4
from fornax.models.families.mixtures import MINIMAX_M2, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE
from fornax.models.families.olmo import OLMO2, OLMO3
from fornax.models.families.phi import PHI3
from fornax.models.families.qwen import QWEN2, QWEN3
from fornax.models.families.qwen_hybrid import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from fornax.models.families.smollm import SMOLLM3
from fornax.models.families.wrapper import WRAPPERS

__all__ = ["FAMILIES", "family_by_architecture", "family_by_name"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    QWEN2,
    QWEN3,
    OLMO2,
    OLMO3,
    PHI3,
    SMOLLM3,
    GLM4,
    GRANITE,
    GEMMA2,
    GEMMA3,
    GEMMA4,
    MINISTRAL3,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    MINIMAX_M2,
    GRANITE_MOE,
    GRANITE_MOE_SHARED,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    MISTRAL4,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    LLAMA4,
    QWEN3_NEXT,
    QWEN3_5,
    QWEN3_5_MOE,
    MAMBA2,
    GRANITE_HYBRID,
)


def family_by_architecture(architectures: object) -> Family:
    """The family that config.json's `architectures` names.

    Raises:
      ConfigError: listing the supported ones.
    """
    names = architectures if isinstance(architectures, list) else []
    for family in FAMILIES:
        if family.architecture in names:
            return family
    loaded = (*FAMILIES, *WRAPPERS)
    supported = ", ".join(each.architecture for each in loaded)
    raise ConfigError(f"architectures={architectures!r} is not supported; Fornax loads {supported}")


def family_by_name(name: str) -> Family:
    """The family called `name` (its `model_type`).

    Raises:
      ConfigError: listing the supported ones.
    """
    for family in FAMILIES:
        if family.name == name:
            return family
    known = ", ".join(family.name for family in FAMILIES)
    raise ConfigError(f"family={name!r} is not known; use one of {known}")
