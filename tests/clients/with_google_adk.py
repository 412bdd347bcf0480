"""google-adk, which speaks to others through litellm: a tool, whole and streamed, over chats and Messages."""

from __future__ import annotations

from google.adk.agents import Agent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from task import ASKED, MODEL, URL, V1, check, run_async, weather


async def _asked(model: LiteLlm, mode: StreamingMode) -> None:
    runner = InMemoryRunner(Agent(name="ann", model=model, instruction="Be brief.", tools=[weather]), app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    said = ""
    message = types.Content(role="user", parts=[types.Part(text=ASKED)])
    config = RunConfig(streaming_mode=mode)
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message, run_config=config):
        if event.is_final_response() and event.content and not event.partial:
            said += "".join(part.text or "" for part in event.content.parts)
    check(said)


async def chats() -> None:
    for mode in (StreamingMode.NONE, StreamingMode.SSE):
        await _asked(LiteLlm(f"openai/{MODEL}", api_base=V1, api_key="any"), mode)


async def messages() -> None:
    for mode in (StreamingMode.NONE, StreamingMode.SSE):
        await _asked(LiteLlm(f"anthropic/{MODEL}", api_base=URL, api_key="any"), mode)


run_async(chats, messages)
