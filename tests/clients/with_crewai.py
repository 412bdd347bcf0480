"""crewai: a crew of one with a tool; a typed answer."""

from __future__ import annotations

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool
from pydantic import BaseModel
from task import ASKED, MODEL, V1, check, run, weather


class Verdict(BaseModel):
    sunny: bool


def _crew(asked: str, llm: LLM, **given) -> Crew:
    agent = Agent(role="Guide", goal="Help.", backstory="Old.", llm=llm, tools=[tool("weather")(weather)])
    return Crew(agents=[agent], tasks=[Task(description=asked, expected_output="Words.", agent=agent, **given)])


def _model(**given) -> LLM:
    return LLM(model=f"openai/{MODEL}", base_url=V1, api_key="any", **given)


def chats() -> None:
    for stream in (False, True):
        check(_crew(ASKED, _model(stream=stream)).kickoff().raw)


def responses() -> None:
    check(_crew(ASKED, _model(api="responses")).kickoff().raw)


def typed_answers() -> None:
    made = _crew('<say>{"sunny": true}</say>', _model(), output_pydantic=Verdict).kickoff()
    assert made.pydantic == Verdict(sunny=True)


run(chats, responses, typed_answers)
