"""smolagents: an agent that calls tools, and one that writes code, which its prompt asks for."""

from __future__ import annotations

import json

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool
from task import MODEL, SAID, V1, check, run, weather

model = OpenAIServerModel(MODEL, api_base=V1, api_key="any")
tools = [tool(weather)]


def tool_calls() -> None:
    end = f'<call name="final_answer">{{"answer": "{SAID}"}}</call>'
    agent = ToolCallingAgent(tools, model, max_steps=3, verbosity_level=0)
    check(agent.run(f'<call name="weather">{{"city": "Paris"}}</call>{end}'))


def code() -> None:
    written = f'print(weather("Paris"))\nfinal_answer("{SAID}")'
    as_text, as_json = f"<code>\n{written}\n</code>", json.dumps({"thought": "I look.", "code": written})
    for text, structured in ((as_text, False), (as_json, True)):
        agent = CodeAgent(tools, model, max_steps=2, verbosity_level=0, use_structured_outputs_internally=structured)
        check(agent.run(f"<say>{text}</say>"))


def streamed() -> None:
    end = f'<call name="final_answer">{{"answer": "{SAID}"}}</call>'
    agent = ToolCallingAgent(tools, model, max_steps=3, verbosity_level=0, stream_outputs=True)
    check(agent.run(f'<call name="weather">{{"city": "Paris"}}</call>{end}'))


run(tool_calls, streamed, code)
