"""Chat templates make the text that transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.parity.chat_cases import CHATML, CHATS, TOOLS, TRIMMED
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from fornax.config.errors import EngineError
from fornax.llm.text import ChatTemplate

pytestmark = pytest.mark.parity


def _oracle(template: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template
    )


@pytest.fixture(params=["chatml", "trimmed", "named"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    template = {
        "chatml": CHATML,
        "trimmed": TRIMMED,
        "named": {"default": TRIMMED, "tool_use": CHATML},
    }[request.param]
    oracle = _oracle(template)
    oracle.save_pretrained(tmp_path)
    return oracle, tmp_path


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize(
    "options",
    [
        {"add_generation_prompt": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"add_generation_prompt": True, "tools": TOOLS},
        {"add_generation_prompt": True, "documents": [{"title": "a", "text": "b"}]},
        {"add_generation_prompt": True, "enable_thinking": False, "bos_token": "<x>"},
    ],
)
def test_the_text_is_transformers(
    saved: tuple[Any, Path], chat: str, options: dict[str, Any]
) -> None:
    oracle, directory = saved
    template = ChatTemplate.find(directory)
    assert template is not None
    known = ("add_generation_prompt", "continue_final_message", "tools", "documents")
    variables = {key: value for key, value in options.items() if key not in known}
    own = {key: value for key, value in options.items() if key in known}
    try:
        expected = oracle.apply_chat_template(CHATS[chat], tokenize=False, **options)
    except ValueError:
        with pytest.raises(EngineError):
            template.render(CHATS[chat], **own, variables=variables)
        return
    assert template.render(CHATS[chat], **own, variables=variables) == expected
    assert expected.strip()


def test_parts_reach_a_template_that_reads_them(tmp_path: Path) -> None:
    oracle = _oracle(TRIMMED)
    oracle.save_pretrained(tmp_path)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    chat = [{"role": "user", "content": parts}]
    template = ChatTemplate.find(tmp_path)
    assert template is not None
    assert template.render(chat) == oracle.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


def test_the_key_of_older_files_is_read(tmp_path: Path) -> None:
    for template in (CHATML, [{"name": "default", "template": CHATML}]):
        config = {"chat_template": template, "eos_token": {"content": "</s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        found = ChatTemplate.find(tmp_path)
        assert found is not None
        expected = _oracle(CHATML).apply_chat_template(
            CHATS["several"], tokenize=False, add_generation_prompt=True
        )
        assert found.render(CHATS["several"]) == expected
