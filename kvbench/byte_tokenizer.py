"""A tokenizer without files: one token per byte of UTF-8."""

from collections.abc import Iterable


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends a text. The subset of a Hugging Face tokenizer that kvbench calls."""

    eos_token_id = 256
    pad_token_id = 256
    chat_template = "User: {content}\nAssistant: "

    def __len__(self) -> int:
        return 257

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        data = bytes(token for token in token_ids if token < 256)
        return data.decode("utf-8", errors="replace")

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        return "".join(self.chat_template.format(content=message["content"]) for message in messages)
