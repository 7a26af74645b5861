// The packages that JavaScript programs use, against a running server: node clients.mjs http://127.0.0.1:8080

import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";
import { z } from "zod";

const address = process.argv[2];
const baseURL = `${address}/v1`;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const sdk = createOpenAICompatible({ name: "moebius", baseURL, supportsStructuredOutputs: true });
const messages = [{ role: "user", content: "Tell me a story about a fox" }];
const weather = {
  name: "get_weather",
  parameters: { type: "object", properties: { city: { enum: ["Paris", "Rome"] } }, required: ["city"], additionalProperties: false },
};

const TESTS = {
  async "openai: chat and stream agree"() {
    const ask = { model, messages, max_tokens: 32, seed: 5, temperature: 0.8 };
    const whole = await client.chat.completions.create(ask);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) text += chunk.choices[0]?.delta.content ?? "";
    assert.equal(text, whole.choices[0].message.content);
    assert.ok(text);
  },
  async "openai: the stream helper gathers a tool call"() {
    const runner = client.chat.completions.stream({ model, messages, max_tokens: 600, tools: [{ type: "function", function: weather }], tool_choice: "required" });
    const { choices } = await runner.finalChatCompletion();
    assert.equal(choices[0].finish_reason, "tool_calls");
    assert.match(JSON.parse(choices[0].message.tool_calls[0].function.arguments).city, /Paris|Rome/);
  },
  async "openai: aborting ends the request"() {
    const stream = await client.chat.completions.create({ model, messages, max_tokens: 900, stream: true, ignore_eos: true });
    for await (const _ of stream) break;
    for (let i = 0; (await (await fetch(`${address}/ready`)).json()).running; i++) {
      assert.ok(i < 400, "the request still runs");
      await new Promise((wake) => setTimeout(wake, 50));
    }
  },
  async "openai: errors are the package's own"() {
    await assert.rejects(client.chat.completions.create({ model, messages: [] }), OpenAI.BadRequestError);
  },
  async "ollama: chat, stream, list, errors"() {
    const ollama = new Ollama({ host: address });
    const ask = { model, messages, options: { num_predict: 32, seed: 5, temperature: 0.8 } };
    const whole = await ollama.chat(ask);
    let text = "";
    for await (const piece of await ollama.chat({ ...ask, stream: true })) text += piece.message.content;
    assert.equal(text, whole.message.content);
    assert.ok(text && whole.done);
    assert.equal((await ollama.list()).models[0].name, model);
    await assert.rejects(ollama.chat({ ...ask, format: "yaml" }), /format/);
  },
  async "ai: text, stream, object"() {
    const ask = { model: sdk(model), prompt: "Tell me a story", maxOutputTokens: 200, seed: 4, maxRetries: 0 };
    const { text, usage } = await generateText(ask);
    assert.ok(text && usage.outputTokens > 0);
    let streamed = "";
    for await (const piece of streamText(ask).textStream) streamed += piece;
    assert.equal(streamed, text);
    const schema = z.object({ name: z.string().max(20), age: z.number().int().min(0).max(120) });
    const { output } = await generateText({ ...ask, output: Output.object({ schema }) });
    schema.parse(output);
  },
  async "ai: a tool is called and its result goes back"() {
    const asked = [];
    const get_weather = tool({
      description: "The weather of a city",
      inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
      execute: async ({ city }) => (asked.push(city), "sunny"),
    });
    const { steps } = await generateText({ model: sdk(model), prompt: "What is the weather in Rome?", tools: { get_weather }, toolChoice: "required", maxOutputTokens: 600, maxRetries: 0 });
    assert.match(asked[0], /Paris|Rome/);
    assert.equal(steps[0].toolResults[0].output, "sunny");
  },
};

let failed = 0;
for (const [name, test] of Object.entries(TESTS)) {
  try {
    await test();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed++;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
process.exit(failed ? 1 : 0);
