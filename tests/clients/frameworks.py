"""Frameworks that build on the clients, against a running server: python frameworks.py http://127.0.0.1:8080

Each test is what a user of the package would write; a package that is not installed is named and left out. The model
is the embedded one, which tells stories: what is tested is that the package understands the server, and that enforced
forms hold whatever the model would rather say.
"""
import asyncio
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import urllib.request
from typing import Literal

# No package is to report what the tests do.
os.environ |= {"LITELLM_TELEMETRY": "False", "OPENAI_AGENTS_DISABLE_TRACING": "1", "OPENAI_API_KEY": "none",
               "LITELLM_LOCAL_MODEL_COST_MAP": "True"}

import openai
from pydantic import BaseModel, Field

from report import run_all

ADDRESS = sys.argv[1].rstrip("/")
BASE = f"{ADDRESS}/v1"
MODEL = json.load(urllib.request.urlopen(f"{BASE}/models"))["data"][0]["id"]
STORY = [{"role": "user", "content": "Tell me a story about a fox"}]


class Person(BaseModel):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def client(kind=openai.OpenAI):
    return kind(base_url=BASE, api_key="none", max_retries=0)


def instructor_reads_forms():
    import instructor

    for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
        ask = instructor.from_openai(client(), mode=mode).chat.completions
        person = ask.create(model=MODEL, messages=STORY, response_model=Person, max_tokens=300, seed=1, max_retries=1)
        assert isinstance(person, Person), (mode, person)


def pydantic_ai_answers_in_types_and_calls_tools():
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
    settings = {"max_tokens": 300, "seed": 1}
    for output in (Person, NativeOutput(Person)):
        told = Agent(model, output_type=output, model_settings=settings).run_sync("Tell me about a fox")
        assert isinstance(told.output, Person), told
    assert Agent(model, model_settings={"max_tokens": 16}).run_sync("Tell me a story").output

    async def streamed():
        async with Agent(model, model_settings={"max_tokens": 16}).run_stream("Tell me a story") as run:
            return [piece async for piece in run.stream_text(delta=True)]

    assert "".join(asyncio.run(streamed()))


def agents_call_tools():
    import agents

    asked = []

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city"""
        asked.append(city)
        return "sunny"

    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client(openai.AsyncOpenAI))
        settings = agents.ModelSettings(tool_choice="required", max_tokens=600)
        agent = agents.Agent(name="a", model=model, tools=[get_weather], model_settings=settings,
                             tool_use_behavior="stop_on_first_tool")
        asked.clear()
        told = agents.Runner.run_sync(agent, "What is the weather in Rome?", max_turns=3)
        assert told.final_output == "sunny" and asked and set(asked) <= {"Paris", "Rome"}, (told, asked)


def litellm_speaks_both_ways():
    import litellm

    litellm.telemetry = False
    for model, base in ((f"openai/{MODEL}", BASE), (f"ollama_chat/{MODEL}", ADDRESS)):
        ask = dict(model=model, api_base=base, api_key="none", messages=STORY, max_tokens=16, temperature=0,
                   num_retries=0)
        whole = litellm.completion(**ask).choices[0].message.content
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**ask, stream=True)]
        assert whole and "".join(pieces) == whole, (model, whole, pieces)


def outlines_constrains_by_vllms_names():
    import outlines

    model = outlines.from_vllm(client(), MODEL)
    assert model("Is a fox a bird?", Literal["yes", "no"], max_tokens=8) in ("yes", "no")
    assert model("A number", outlines.types.Regex("[0-9]{3}"), max_tokens=8).isdigit()
    told = outlines.from_openai(client(), MODEL)("Tell me about a fox", Person, max_tokens=300)
    assert Person.model_validate_json(told)


def llama_index_completes_and_streams():
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(model=MODEL, api_base=BASE, api_key="none", is_chat_model=True, is_function_calling_model=True,
                       max_tokens=16, temperature=0, max_retries=0)
    messages = [ChatMessage(role="user", content=STORY[0]["content"])]
    whole = model.chat(messages).message.content
    assert whole and [piece.message.content for piece in model.stream_chat(messages)][-1] == whole
    assert model.complete("Tell me a story").text


def guidance_constrains():
    import guidance

    model = guidance.models.experimental.VLLMModel(MODEL, base_url=BASE, api_key="none")
    with guidance.user():
        model += "Tell me a number"
    with guidance.assistant():
        model += guidance.regex("[0-9]{3}", name="a")
    assert len(model["a"]) == 3 and model["a"].isdigit(), model["a"]


def llm_chats_streams_and_keeps_to_schemas():
    """The command, as its users have it: a model of another address stands in a file of its folder."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "extra-openai-models.yaml").write_text(json.dumps([
            {"model_id": "here", "model_name": MODEL, "api_base": BASE, "supports_schema": True}]))

        def llm(*flags):
            asked = [sys.executable, "-m", "llm", "-m", "here", "--key", "none", *flags]
            env = os.environ | {"LLM_USER_PATH": folder}
            return subprocess.run(asked, env=env, check=True, capture_output=True, text=True, timeout=120).stdout

        ask = (STORY[0]["content"], "-o", "max_tokens", "16", "-o", "temperature", "0")
        whole = llm(*ask, "--no-stream")
        assert whole.strip() and llm(*ask) == whole, whole
        # The conversation so far goes with the next question.
        assert llm("-c", "And then?", "-o", "max_tokens", "16").strip()
        told = llm("Tell me about a fox", "--schema", json.dumps(Person.model_json_schema()), "-o", "max_tokens", "300")
        Person.model_validate_json(told)


TESTS = {
    "instructor": instructor_reads_forms,
    "pydantic_ai": pydantic_ai_answers_in_types_and_calls_tools,
    "agents": agents_call_tools,
    "litellm": litellm_speaks_both_ways,
    "outlines": outlines_constrains_by_vllms_names,
    "llama_index": llama_index_completes_and_streams,
    "guidance": guidance_constrains,
    "llm": llm_chats_streams_and_keeps_to_schemas,
}

absent = [package for package in TESTS if importlib.util.find_spec(package) is None]
for package in absent:
    print(f"absent  {package}", flush=True)
run_all(test for package, test in TESTS.items() if package not in absent)
