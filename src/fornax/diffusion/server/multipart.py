"""Bodies of `multipart/form-data` (RFC 7578), read by the standard library's parser of MIME."""

from collections.abc import Collection
from email.message import Message
from email.parser import BytesParser

from fornax.llm.server.errors import ApiError

__all__ = ["read_form"]

_MOST_PARTS = 64


def read_form(
    content_type: str, body: bytes, *, several: Collection[str] = ()
) -> dict[str, str | bytes | list[str | bytes]]:
    """The form's fields: text, or bytes where a field is a file.

    Args:
      content_type: of the request.
      body: of the request.
      several: fields that may be given more than once; they are lists.

    Raises:
      ApiError: 415 for another type; 400 for a body that is no such form, a field given twice, or
        text that is not UTF-8.
    """
    if not content_type.lower().startswith("multipart/form-data"):
        raise ApiError(
            415,
            (f"the content-type {content_type!r}" if content_type else "a missing content-type")
            + " is not multipart/form-data, in which images are sent; send a form, with the fields "
            "as its parts and images as files (curl -F image=@FILE)",
        )
    # A head of a mail before the body: what follows is what mails and forms have in common.
    head = b"Content-Type: " + content_type.encode("latin-1") + b"\r\nMIME-Version: 1.0\r\n\r\n"
    message = BytesParser().parsebytes(head + body)
    parts = message.get_payload()
    if not message.is_multipart() or not isinstance(parts, list) or message.defects:
        raise ApiError(400, "the body is not a complete multipart/form-data; check its boundary")
    if len(parts) > _MOST_PARTS:
        raise ApiError(400, f"the form has {len(parts)} fields; send at most {_MOST_PARTS}")
    form: dict[str, str | bytes | list[str | bytes]] = {}
    for part in parts:
        assert isinstance(part, Message)
        name = part.get_param("name", header="content-disposition")
        content = part.get_payload(decode=True)
        if not isinstance(name, str) or not isinstance(content, bytes):
            raise ApiError(400, "a part of the form has no name, or parts of its own")
        name = name.removesuffix("[]")
        value = content if part.get_filename() is not None else _text(name, content)
        before = form.get(name)
        if name in several:
            form[name] = [*before, value] if isinstance(before, list) else [value]
            continue
        if before is not None:
            raise ApiError(400, f"{name} is given twice; give it once", param=name)
        form[name] = value
    return form


def _text(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ApiError(400, f"{name} is not UTF-8", param=name) from None
