"""The message classes of `inference.proto`, in a descriptor pool of their own.

Code that protoc generates registers in the pool of the process, where tritonclient's copy of the
same package would clash with it, and asks for the protobuf that it was generated for. So protoc
makes the descriptor (`inference.binpb`) and the types (`inference_pb2.pyi`), by `make proto`.
"""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_pool = descriptor_pool.DescriptorPool()
_set = descriptor_pb2.FileDescriptorSet.FromString(
    Path(__file__).with_name("inference.binpb").read_bytes()
)
_pool.AddSerializedFile(_set.file[0].SerializeToString())
DESCRIPTOR = _pool.FindFileByName("inference.proto")
for _name, _message in DESCRIPTOR.message_types_by_name.items():
    globals()[_name] = message_factory.GetMessageClass(_message)
