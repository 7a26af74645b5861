"""The packages that Python programs use, against a running server: python clients.py http://127.0.0.1:8080

Each test is what a user of the package would write. The model is the embedded one, which tells stories: what is tested is
that the package understands the server, and that enforced forms hold whatever the model would rather say.
"""
import asyncio
import json
import sys
import time
import urllib.request

import anthropic
import ollama
import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

from report import run_all

ADDRESS = sys.argv[1].rstrip("/")
MODEL = json.load(urllib.request.urlopen(f"{ADDRESS}/v1/models"))["data"][0]["id"]
STORY = [{"role": "user", "content": "Tell me a story about a fox"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather of a city", "parameters": {
    "type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}}

oll = ollama.Client(host=ADDRESS)
oai = openai.OpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
ant = anthropic.Anthropic(base_url=ADDRESS, api_key="none", max_retries=0)


def raises(kind, act):
    try:
        act()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def openai_chat_and_stream_agree():
    ask = dict(model=MODEL, messages=STORY, max_tokens=32, seed=5, temperature=0.8)
    whole = oai.chat.completions.create(**ask)
    pieces, usage = [], None
    for chunk in oai.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        pieces += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(pieces) == whole.choices[0].message.content != ""
    assert usage.total_tokens == whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.choices[0].finish_reason in ("stop", "length")


def openai_logprobs_and_choices():
    answer = oai.chat.completions.create(model=MODEL, messages=STORY, max_tokens=4, n=2, logprobs=True, top_logprobs=3, extra_body={"ignore_eos": True})
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 4
        for token in choice.logprobs.content:
            assert token.logprob <= 0 and len(token.top_logprobs) == 3


def openai_completions():
    answer = oai.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=8, temperature=0, stop=["."])
    assert answer.choices[0].text and "." not in answer.choices[0].text


def openai_structured_output():
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    for seed in range(3):
        answer = oai.chat.completions.create(model=MODEL, messages=STORY, max_tokens=200, seed=seed, temperature=1.2, response_format=form)
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"} and 0 <= person["age"] <= 120 and len(person["name"]) <= 20, person
    impossible = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "object", "properties": {"a": False}, "required": ["a"]}}}
    raises(openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=STORY, response_format=impossible))


def openai_tools_round_trip():
    tools = [{"type": "function", "function": WEATHER}]
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    ask = dict(model=MODEL, messages=messages, tools=tools, max_tokens=200, seed=2)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = oai.chat.completions.create(**ask, tool_choice=choice)
        assert answer.choices[0].finish_reason == "tool_calls", answer
        call = answer.choices[0].message.tool_calls[0]
        assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome"), call
    # The first call, streamed; a model may make several.
    names, arguments = "", ""
    for chunk in oai.chat.completions.create(**ask, tool_choice="required", stream=True):
        pieces = (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []
        for piece in (piece for piece in pieces if piece.index == 0):
            names += piece.function.name or ""
            arguments += piece.function.arguments or ""
    assert names.startswith("get_weather") and json.loads(arguments)["city"] in ("Paris", "Rome"), (names, arguments)
    # The result goes back to the model.
    messages += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = oai.chat.completions.create(model=MODEL, messages=messages, tools=tools, tool_choice="none", max_tokens=12)
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].message.content


def openai_responses():
    answer = oai.responses.create(model=MODEL, input="Tell me a story", max_output_tokens=24, instructions="Be brief.")
    assert answer.status in ("completed", "incomplete") and answer.output_text
    kinds = [event.type for event in oai.responses.create(model=MODEL, input="Tell me a story", max_output_tokens=24, stream=True)]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    assert "response.output_text.delta" in kinds


def openai_embeddings_and_models():
    rows = oai.embeddings.create(model=MODEL, input=["a fox", "a fox", "the sea"]).data
    assert rows[0].embedding == rows[1].embedding != rows[2].embedding
    assert oai.models.list().data[0].id == MODEL and oai.models.retrieve(MODEL).id == MODEL
    raises(openai.NotFoundError, lambda: oai.models.retrieve("another"))


def openai_errors_are_the_packages_own():
    raises(openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=[]))
    error = raises(openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=STORY, temperature=-1))
    assert "temperature" in str(error)
    raises(openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 9000}]))
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}]}
    raises(openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=[image]))


def running():
    return json.load(urllib.request.urlopen(f"{ADDRESS}/ready"))["running"]


def openai_cancellation_frees_the_place():
    stream = oai.chat.completions.create(model=MODEL, messages=STORY, max_tokens=900, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.time() + 20
    while running():
        assert time.time() < deadline, "the request still runs"
        time.sleep(0.05)


def openai_many_at_once():
    async def many():
        client = openai.AsyncOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", max_retries=0)
        ask = [client.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16, seed=i, temperature=1) for i in range(8)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*ask)]

    together = asyncio.run(many())
    for i, text in enumerate(together):
        alone = oai.chat.completions.create(model=MODEL, messages=STORY, max_tokens=16, seed=i, temperature=1)
        assert alone.choices[0].message.content == text, i


def anthropic_messages_and_stream():
    ask = dict(model=MODEL, max_tokens=32, messages=STORY, system="You tell stories.", extra_body={"temperature": 0})
    whole = ant.messages.create(**ask)
    assert whole.content[0].type == "text" and whole.usage.output_tokens > 0
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with ant.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text == last.content[0].text
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert ant.messages.count_tokens(model=MODEL, messages=STORY).input_tokens > 0


def anthropic_tools_round_trip():
    tool = {"name": "get_weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    answer = ant.messages.create(model=MODEL, max_tokens=600, messages=messages, tools=[tool], tool_choice={"type": "any"})
    assert answer.stop_reason == "tool_use", answer
    use = next(block for block in answer.content if block.type == "tool_use")
    assert use.name == "get_weather" and use.input["city"] in ("Paris", "Rome")
    with ant.messages.stream(model=MODEL, max_tokens=200, messages=messages, tools=[tool], tool_choice={"type": "tool", "name": "get_weather"}) as stream:
        streamed = next(block for block in stream.get_final_message().content if block.type == "tool_use")
    assert streamed.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
    messages += [{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}, {"role": "user", "content": [result]}]
    assert ant.messages.create(model=MODEL, max_tokens=12, messages=messages, tools=[tool], tool_choice={"type": "none"}).content


def anthropic_errors_are_the_packages_own():
    raises(anthropic.BadRequestError, lambda: ant.messages.create(model=MODEL, max_tokens=8, messages=[]))
    error = raises(anthropic.BadRequestError, lambda: ant.messages.create(model=MODEL, max_tokens=8, messages=STORY, extra_body={"temperature": -1}))
    assert "temperature" in str(error)


def ollama_chat_and_stream_agree():
    ask = dict(model=MODEL, messages=STORY, options={"num_predict": 32, "seed": 5, "temperature": 0.8})
    whole = oll.chat(**ask)
    pieces = list(oll.chat(**ask, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content != ""
    assert whole.done and whole.eval_count and pieces[-1].done and not pieces[0].done
    assert oll.generate(model=MODEL, prompt=STORY[0]["content"], options=ask["options"]).response == whole.message.content


def ollama_forms_tools_and_lists():
    told = oll.chat(model=MODEL, messages=STORY, format=SCHEMA, options={"num_predict": 300, "seed": 1})
    assert set(json.loads(told.message.content)) == {"name", "age"}, told
    tools = [{"type": "function", "function": WEATHER}]
    history = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}]}, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}]
    assert oll.chat(model=MODEL, messages=history, tools=tools, options={"num_predict": 8}).done
    assert oll.list().models[0].model == MODEL and oll.ps().models and oll.show(MODEL).details.family
    assert len(oll.embed(model=MODEL, input=["a fox", "a bear"]).embeddings) == 2
    error = raises(ollama.ResponseError, lambda: oll.chat(model=MODEL, messages=[{"role": "king", "content": "x"}]))
    assert error.status_code == 400 and "role" in error.error


def constraints_of_other_servers_hold():
    for more in ({"guided_choice": ["yes", "no"]}, {"guided_regex": "yes|no"}, {"structured_outputs": {"choice": ["yes", "no"]}}, {"grammar": 'root ::= "yes" | "no"'}):
        answer = oai.chat.completions.create(model=MODEL, messages=STORY, max_tokens=8, temperature=1.5, extra_body=more)
        assert answer.choices[0].message.content in ("yes", "no"), (more, answer)


def prompts_have_log_probabilities():
    """What lm-eval's local-completions sends and reads."""
    ids = json.load(urllib.request.urlopen(urllib.request.Request(f"{ADDRESS}/tokenize", json.dumps({"content": "Once upon a time there was a fox"}).encode(), {"Content-Type": "application/json"})))["tokens"]
    answer = oai.completions.create(model=MODEL, prompt=[ids, ids], max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1234)
    for choice in answer.choices:
        values, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert len(values) == len(tops) == len(ids) + 1 and values[0] is None
        assert all(value <= max(top.values()) for value, top in zip(values[1:], tops[1:]))


def langchain_chat_tools_and_structure():
    chat = ChatOpenAI(base_url=f"{ADDRESS}/v1", api_key="none", model=MODEL, max_tokens=200, seed=3, max_retries=0)
    assert chat.invoke("Tell me a story").content
    assert "".join(chunk.content for chunk in chat.stream("Tell me a story"))
    tool = {"type": "function", "function": WEATHER}
    call = chat.bind_tools([tool], tool_choice="get_weather").invoke("What is the weather in Rome?")
    assert call.tool_calls[0]["args"]["city"] in ("Paris", "Rome"), call
    history = [HumanMessage("What is the weather in Rome?"), AIMessage("", tool_calls=call.tool_calls), ToolMessage("sunny", tool_call_id=call.tool_calls[0]["id"])]
    assert chat.bind_tools([tool], tool_choice="none").invoke(history).content
    person = chat.with_structured_output({"title": "person", **SCHEMA}, method="json_schema").invoke("Tell me about a fox")
    assert set(person) == {"name", "age"}, person


TESTS = [
    openai_chat_and_stream_agree, openai_logprobs_and_choices, openai_completions, openai_structured_output, openai_tools_round_trip,
    openai_responses, openai_embeddings_and_models, openai_errors_are_the_packages_own, openai_cancellation_frees_the_place, openai_many_at_once,
    anthropic_messages_and_stream, anthropic_tools_round_trip, anthropic_errors_are_the_packages_own, langchain_chat_tools_and_structure,
    ollama_chat_and_stream_agree, ollama_forms_tools_and_lists, constraints_of_other_servers_hold, prompts_have_log_probabilities,
]

run_all(TESTS)
