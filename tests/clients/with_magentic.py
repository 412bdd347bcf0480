"""magentic: typed answers and calls of functions. It reads annotations as they stand, so they are no texts here."""

from magentic import OpenaiChatModel, StreamedStr, prompt, prompt_chain
from pydantic import BaseModel
from task import ASKED, MODEL, V1, check, run, weather

model = OpenaiChatModel(MODEL, base_url=V1, api_key="any")


class Verdict(BaseModel):
    sunny: bool


def text() -> None:
    @prompt("{asked}", model=model)
    def say(asked: str) -> StreamedStr: ...

    assert "".join(say("<say>It is sunny.</say>")) == "It is sunny."


def typed_answers() -> None:
    @prompt("{asked}", model=model)
    def judge(asked: str) -> Verdict: ...

    assert judge('<call name="return_verdict">{"sunny": true}</call>') == Verdict(sunny=True)


def tools() -> None:
    @prompt_chain("{asked}", functions=[weather], model=model)
    def look(asked: str) -> str: ...

    check(look(ASKED))


run(text, typed_answers, tools)
