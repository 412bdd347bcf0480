"""dspy: typed fields by its own form and by a schema, an agent of its own kind, and one over Responses."""

from __future__ import annotations

import dspy
from task import MODEL, SAID, V1, check, run, weather

MARK = "[[ ## {} ## ]]\n{}\n"


class Ask(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    answer: str = dspy.OutputField()


def _told(**fields: str) -> str:
    return "<say>" + "".join(MARK.format(*each) for each in fields.items()) + "[[ ## completed ## ]]</say>"


def _model(kind: str) -> dspy.LM:
    return dspy.LM(f"openai/{MODEL}", api_base=V1, api_key="any", model_type=kind, cache=False)


def chats() -> None:
    with dspy.context(lm=_model("chat")):
        assert dspy.Predict(Ask)(question=_told(answer=SAID)).answer == SAID


def responses() -> None:
    with dspy.context(lm=_model("responses")):
        assert dspy.Predict(Ask)(question=_told(answer=SAID)).answer == SAID


def schemas() -> None:
    with dspy.context(lm=_model("chat"), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Ask)(question=f'<say>{{"answer": "{SAID}"}}</say>').answer == SAID


def react() -> None:
    # A step and the end are asked for in prompts of their own: one text has the fields of both.
    step = {"next_thought": "I look.", "next_tool_name": "weather", "next_tool_args": '{"city": "Paris"}'}
    with dspy.context(lm=_model("chat")):
        check(
            dspy.ReAct(Ask, tools=[weather], max_iters=1)(question=_told(**step, reasoning="Seen.", answer=SAID)).answer
        )


run(chats, responses, schemas, react)
