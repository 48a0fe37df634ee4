"""The V2 protocol's messages, as tables: names, numbers and types of fields are the protocol's.

A message's fields are `number name type`, parted by commas. A type is a scalar of protobuf's or a
message of the same package; `*` before it repeats it, `{}` makes it a map from strings, and
`choice|` puts it in the message's one-of. A dotted name is a message inside another.
"""

__all__ = ["CONFIG_ENUMS", "CONFIG_MESSAGES", "METHODS", "SERVICE_MESSAGES"]

_NAMED = "1 name string, 2 version string"
_PARAMETERS = "{}InferParameter"
_PARAMETER_CHOICE = (
    "1 bool_param choice|bool, 2 int64_param choice|int64, 3 string_param choice|string"
)

SERVICE_MESSAGES: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 live bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 ready bool",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "1 ready bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "1 name string, 2 version string, 3 extensions *string",
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse": "1 name string, 2 versions *string, 3 platform string,"
    "4 inputs *ModelMetadataResponse.TensorMetadata,"
    "5 outputs *ModelMetadataResponse.TensorMetadata",
    "ModelMetadataResponse.TensorMetadata": "1 name string, 2 datatype string, 3 shape *int64",
    "InferParameter": f"{_PARAMETER_CHOICE}, 4 double_param choice|double,"
    "5 uint64_param choice|uint64",
    "InferTensorContents": "1 bool_contents *bool, 2 int_contents *int32, 3 int64_contents *int64,"
    "4 uint_contents *uint32, 5 uint64_contents *uint64, 6 fp32_contents *float,"
    "7 fp64_contents *double, 8 bytes_contents *bytes",
    "ModelInferRequest": "1 model_name string, 2 model_version string, 3 id string,"
    f"4 parameters {_PARAMETERS}, 5 inputs *ModelInferRequest.InferInputTensor,"
    "6 outputs *ModelInferRequest.InferRequestedOutputTensor, 7 raw_input_contents *bytes",
    "ModelInferRequest.InferInputTensor": "1 name string, 2 datatype string, 3 shape *int64,"
    f"4 parameters {_PARAMETERS}, 5 contents InferTensorContents",
    "ModelInferRequest.InferRequestedOutputTensor": f"1 name string, 2 parameters {_PARAMETERS}",
    "ModelInferResponse": "1 model_name string, 2 model_version string, 3 id string,"
    f"4 parameters {_PARAMETERS}, 5 outputs *ModelInferResponse.InferOutputTensor,"
    "6 raw_output_contents *bytes",
    "ModelInferResponse.InferOutputTensor": "1 name string, 2 datatype string, 3 shape *int64,"
    f"4 parameters {_PARAMETERS}, 5 contents InferTensorContents",
    "ModelStreamInferResponse": "1 error_message string, 2 infer_response ModelInferResponse",
    "ModelConfigRequest": _NAMED,
    "ModelConfigResponse": "1 config ModelConfig",
    "ModelStatisticsRequest": _NAMED,
    "StatisticDuration": "1 count uint64, 2 ns uint64",
    "InferStatistics": "1 success StatisticDuration, 2 fail StatisticDuration,"
    "3 queue StatisticDuration, 4 compute_input StatisticDuration,"
    "5 compute_infer StatisticDuration, 6 compute_output StatisticDuration,"
    "7 cache_hit StatisticDuration, 8 cache_miss StatisticDuration",
    "InferBatchStatistics": "1 batch_size uint64, 2 compute_input StatisticDuration,"
    "3 compute_infer StatisticDuration, 4 compute_output StatisticDuration",
    "MemoryUsage": "1 type string, 2 id int64, 3 byte_size uint64",
    "ModelStatistics": f"{_NAMED}, 3 last_inference uint64, 4 inference_count uint64,"
    "5 execution_count uint64, 6 inference_stats InferStatistics,"
    "7 batch_stats *InferBatchStatistics, 8 memory_usage *MemoryUsage",
    "ModelStatisticsResponse": "1 model_stats *ModelStatistics",
    "ModelRepositoryParameter": f"{_PARAMETER_CHOICE}, 4 bytes_param choice|bytes",
    "RepositoryIndexRequest": "1 repository_name string, 2 ready bool",
    "RepositoryIndexResponse": "1 models *RepositoryIndexResponse.ModelIndex",
    "RepositoryIndexResponse.ModelIndex": f"{_NAMED}, 3 state string, 4 reason string",
    "RepositoryModelLoadRequest": "1 repository_name string, 2 model_name string,"
    "3 parameters {}ModelRepositoryParameter",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "1 repository_name string, 2 model_name string,"
    "3 parameters {}ModelRepositoryParameter",
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "1 name string",
    "SystemSharedMemoryStatusResponse": "1 regions {}SystemSharedMemoryStatusResponse.RegionStatus",
    "SystemSharedMemoryStatusResponse.RegionStatus": "1 name string, 2 key string,"
    "3 offset uint64, 4 byte_size uint64",
    "SystemSharedMemoryRegisterRequest": "1 name string, 2 key string, 3 offset uint64,"
    "4 byte_size uint64",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "1 name string",
    "SystemSharedMemoryUnregisterResponse": "",
    "CudaSharedMemoryStatusRequest": "1 name string",
    "CudaSharedMemoryStatusResponse": "1 regions {}CudaSharedMemoryStatusResponse.RegionStatus",
    "CudaSharedMemoryStatusResponse.RegionStatus": "1 name string, 2 device_id uint64,"
    "3 byte_size uint64",
    "CudaSharedMemoryRegisterRequest": "1 name string, 2 raw_handle bytes, 3 device_id int64,"
    "4 byte_size uint64",
    "CudaSharedMemoryRegisterResponse": "",
    "CudaSharedMemoryUnregisterRequest": "1 name string",
    "CudaSharedMemoryUnregisterResponse": "",
    "TraceSettingRequest": "1 settings {}TraceSettingRequest.SettingValue, 2 model_name string",
    "TraceSettingRequest.SettingValue": "1 value *string",
    "TraceSettingResponse": "1 settings {}TraceSettingResponse.SettingValue",
    "TraceSettingResponse.SettingValue": "1 value *string",
    "LogSettingsRequest": "1 settings {}LogSettingsRequest.SettingValue",
    "LogSettingsRequest.SettingValue": "1 bool_param choice|bool, 2 uint32_param choice|uint32,"
    "3 string_param choice|string",
    "LogSettingsResponse": "1 settings {}LogSettingsResponse.SettingValue",
    "LogSettingsResponse.SettingValue": "1 bool_param choice|bool, 2 uint32_param choice|uint32,"
    "3 string_param choice|string",
}

CONFIG_ENUMS: dict[str, tuple[str, ...]] = {
    "DataType": tuple(
        f"TYPE_{name}"
        for name in (
            *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32"),
            *("INT64", "FP16", "FP32", "FP64", "STRING", "BF16"),
        )
    ),
    "ModelInstanceGroup.Kind": ("KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"),
    "ModelQueuePolicy.TimeoutAction": ("REJECT", "DELAY"),
}

# What a model of ours can say of itself; Triton's other fields have no meaning here.
CONFIG_MESSAGES: dict[str, str] = {
    "ModelInstanceGroup": "1 name string, 2 count int32, 3 gpus *int32,"
    "4 kind ModelInstanceGroup.Kind",
    "ModelInput": "1 name string, 2 data_type DataType, 4 dims *int64, 7 allow_ragged_batch bool,"
    "8 optional bool",
    "ModelOutput": "1 name string, 2 data_type DataType, 3 dims *int64",
    "ModelVersionPolicy": "1 latest choice|ModelVersionPolicy.Latest,"
    "2 all choice|ModelVersionPolicy.All, 3 specific choice|ModelVersionPolicy.Specific",
    "ModelVersionPolicy.Latest": "1 num_versions uint32",
    "ModelVersionPolicy.All": "",
    "ModelVersionPolicy.Specific": "1 versions *int64",
    "ModelQueuePolicy": "1 timeout_action ModelQueuePolicy.TimeoutAction,"
    "2 default_timeout_microseconds uint64, 3 allow_timeout_override bool, 4 max_queue_size uint32",
    "ModelDynamicBatching": "1 preferred_batch_size *int32, 2 max_queue_delay_microseconds uint64,"
    "3 preserve_ordering bool, 4 priority_levels uint64, 5 default_priority_level uint64,"
    "6 default_queue_policy ModelQueuePolicy",
    "ModelParameter": "1 string_value string",
    "ModelTransactionPolicy": "1 decoupled bool",
    "ModelConfig": "1 name string, 2 platform string, 17 backend string,"
    "3 version_policy ModelVersionPolicy, 4 max_batch_size int32, 5 input *ModelInput,"
    "6 output *ModelOutput, 11 dynamic_batching choice|ModelDynamicBatching,"
    "7 instance_group *ModelInstanceGroup, 8 default_model_filename string,"
    "14 parameters {}ModelParameter, 19 model_transaction_policy ModelTransactionPolicy",
}

METHODS: tuple[str, ...] = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelStreamInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
)
