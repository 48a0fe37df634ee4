"""Forms: what a client sends is what is read, whatever bytes a file has."""

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fornax.diffusion.server.multipart import read_form
from fornax.llm.server.errors import ApiError


def sent(files=None, data=None):
    request = httpx.Request("POST", "http://test", files=files, data=data)
    return request.headers["content-type"], request.read()


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=300) | st.text("\r\n-", max_size=40).map(str.encode),
    st.text(max_size=40).filter(lambda text: "\x00" not in text),
)
def test_files_and_texts_come_as_they_were_sent(content, text):
    content_type, body = sent({"image": ("a.png", content)}, {"prompt": text})
    assert read_form(content_type, body) == {"image": content, "prompt": text}


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\nno name\r\n--x--\r\n", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n\xff\r\n--x--\r\n',
            400,
        ),
    ],
)
def test_what_is_no_form_is_refused(content_type, body, status):
    with pytest.raises(ApiError) as caught:
        read_form(content_type, body)
    assert caught.value.status_code == status


def test_a_field_given_twice_is_refused():
    files = [("image[]", ("a.png", b"1")), ("image[]", ("b.png", b"2"))]
    assert read_form(*sent(files), several=("image",)) == {"image": [b"1", b"2"]}
    with pytest.raises(ApiError, match="image is given twice"):
        read_form(*sent(files))
