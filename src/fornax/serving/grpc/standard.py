"""The messages of gRPC's standard services, health and reflection, from tables."""

from typing import Any

from google.protobuf import descriptor_pool, message_factory

from fornax.serving.grpc.descriptors import add_method, file

__all__ = ["FILES", "HEALTH", "REFLECTIONS", "health_message", "reflection_message"]

_HEALTH_PACKAGE = "grpc.health.v1"
HEALTH = f"{_HEALTH_PACKAGE}.Health"
_HEALTH_MESSAGES = {
    "HealthCheckRequest": "1 service string",
    "HealthCheckResponse": "1 status HealthCheckResponse.ServingStatus",
    "HealthListRequest": "",
    "HealthListResponse": "1 statuses {}HealthCheckResponse",
}
_HEALTH_ENUMS = {
    "HealthCheckResponse.ServingStatus": ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
}
_HEALTH_METHODS = (("Check", "HealthCheck"), ("Watch", "HealthCheck"), ("List", "HealthList"))

_REFLECTION_PACKAGES = ("grpc.reflection.v1alpha", "grpc.reflection.v1")
REFLECTIONS = tuple(f"{package}.ServerReflection" for package in _REFLECTION_PACKAGES)
_REFLECTION_MESSAGES = {
    "ServerReflectionRequest": "1 host string, 3 file_by_filename choice|string,"
    "4 file_containing_symbol choice|string, 5 file_containing_extension choice|ExtensionRequest,"
    "6 all_extension_numbers_of_type choice|string, 7 list_services choice|string",
    "ExtensionRequest": "1 containing_type string, 2 extension_number int32",
    "ServerReflectionResponse": "1 valid_host string, 2 original_request ServerReflectionRequest,"
    "4 file_descriptor_response choice|FileDescriptorResponse,"
    "5 all_extension_numbers_response choice|ExtensionNumberResponse,"
    "6 list_services_response choice|ListServiceResponse, 7 error_response choice|ErrorResponse",
    "FileDescriptorResponse": "1 file_descriptor_proto *bytes",
    "ExtensionNumberResponse": "1 base_type_name string, 2 extension_number *int32",
    "ListServiceResponse": "1 service *ServiceResponse",
    "ServiceResponse": "1 name string",
    "ErrorResponse": "1 error_code int32, 2 error_message string",
}
_REFLECTION_ONEOFS = {
    "ServerReflectionRequest": "message_request",
    "ServerReflectionResponse": "message_response",
}


def _health() -> Any:
    made = file("grpc/health/v1/health.proto", _HEALTH_PACKAGE, _HEALTH_MESSAGES, _HEALTH_ENUMS)
    service = made.service.add(name="Health")
    for name, kind in _HEALTH_METHODS:
        types = (f"{kind}Request", f"{kind}Response")
        add_method(service, _HEALTH_PACKAGE, name, types, (False, name == "Watch"))
    return made


def _reflection(package: str) -> Any:
    path = f"{package.replace('.', '/')}/reflection.proto"
    made = file(path, package, _REFLECTION_MESSAGES, oneofs=_REFLECTION_ONEOFS)
    types = ("ServerReflectionRequest", "ServerReflectionResponse")
    service = made.service.add(name="ServerReflection")
    add_method(service, package, "ServerReflectionInfo", types, (True, True))
    return made


FILES: tuple[Any, ...] = (_health(), *(_reflection(package) for package in _REFLECTION_PACKAGES))
"""Descriptors of the files of all of them."""

_POOL = descriptor_pool.DescriptorPool()
for _each in FILES:
    _POOL.AddSerializedFile(_each.SerializeToString())


def health_message(name: str) -> Any:
    """The class of a message of the health service."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_HEALTH_PACKAGE}.{name}"))


def reflection_message(name: str) -> Any:
    """The class of a message of reflection; its versions differ in the package's name alone."""
    path = f"{_REFLECTION_PACKAGES[0]}.{name}"
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(path))
