"""The model zoo: one decoder whose config says what it is, and Hugging Face weights in and out."""

from fornax.models.cache import Cache, DeltaState, init_cache
from fornax.models.capabilities import MODEL_USES, check_model, models_table, takes
from fornax.models.config import DecoderConfig, GlobalHeads, LayerInputConfig, QueryScaling
from fornax.models.cost import flops_per_token, num_parameters
from fornax.models.create import abstract_decoder, create_decoder
from fornax.models.decoder import Decoder
from fornax.models.delta_config import GatedDeltaConfig
from fornax.models.experts_config import TRAINING_ONLY, ExpertsConfig
from fornax.models.families import CodeFormat, Codes, config_from_hf, config_to_hf, formats_table
from fornax.models.generation import Sampling, generate, stream
from fornax.models.latent_config import LatentConfig
from fornax.models.layerwise import Activations, InputRounding, LayerByLayer, ProductInput
from fornax.models.load import (
    load_pretrained,
    open_pretrained,
    read_config,
    stored_code_formats,
    stored_dtypes,
    stored_modules,
)
from fornax.models.logprobs import TokenLogprobs, logits_logprobs, token_logprobs
from fornax.models.mamba_config import Mamba2Config
from fornax.models.paged_cache import (
    CacheHeads,
    PagedCache,
    PageTables,
    cache_layers,
    cache_windows,
    describe_pages,
    init_pages,
    page_bytes,
)
from fornax.models.pipeline_config import PipelineConfig, layers_outside
from fornax.models.remat import REMAT_NAMES, REMAT_POLICIES, Remat, RematPolicy, check_remat
from fornax.models.rope_config import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)
from fornax.models.routing import Routing, routed_experts_dtype, router_losses
from fornax.models.save import save_pretrained
from fornax.models.stack import stack_layers
from fornax.models.state_slots import (
    StateSlots,
    copy_states,
    describe_states,
    init_states,
    keeps_states,
    state_bytes,
)
from fornax.models.stored import StoredModel

__all__ = [
    "MODEL_USES",
    "REMAT_NAMES",
    "REMAT_POLICIES",
    "TRAINING_ONLY",
    "Activations",
    "Cache",
    "CacheHeads",
    "CodeFormat",
    "Codes",
    "Decoder",
    "DecoderConfig",
    "DeltaState",
    "DynamicNTKScaling",
    "ExpertsConfig",
    "GatedDeltaConfig",
    "GlobalHeads",
    "InputRounding",
    "LatentConfig",
    "LayerByLayer",
    "LayerInputConfig",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "Mamba2Config",
    "PageTables",
    "PagedCache",
    "PipelineConfig",
    "ProductInput",
    "QueryScaling",
    "Remat",
    "RematPolicy",
    "RopeConfig",
    "Routing",
    "Sampling",
    "StateSlots",
    "StoredModel",
    "TokenLogprobs",
    "YarnScaling",
    "abstract_decoder",
    "cache_layers",
    "cache_windows",
    "check_model",
    "check_remat",
    "config_from_hf",
    "config_to_hf",
    "copy_states",
    "create_decoder",
    "describe_pages",
    "describe_states",
    "flops_per_token",
    "formats_table",
    "generate",
    "init_cache",
    "init_pages",
    "init_states",
    "keeps_states",
    "layers_outside",
    "load_pretrained",
    "logits_logprobs",
    "models_table",
    "num_parameters",
    "open_pretrained",
    "page_bytes",
    "read_config",
    "routed_experts_dtype",
    "router_losses",
    "save_pretrained",
    "stack_layers",
    "state_bytes",
    "stored_code_formats",
    "stored_dtypes",
    "stored_modules",
    "stream",
    "takes",
    "token_logprobs",
]
