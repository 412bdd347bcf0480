"""instructor: a typed answer by a tool, and by a schema."""

from __future__ import annotations

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

URL, MODEL = sys.argv[1:]


class Verdict(BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool


def typed_answers() -> None:
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="any"), mode=mode)
        made = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Is it sunny in Paris?"}],
            response_model=Verdict,
            max_tokens=100,
            temperature=0,
            max_retries=0,
        )
        assert isinstance(made, Verdict)


typed_answers()
print("typed_answers")
