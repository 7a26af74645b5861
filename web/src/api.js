// The server's API as the page needs it, and its refusals in words. Knows no elements.

/** Why there is no answer: `status` is the server's, 0 where it did not answer at all. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const GONE = "The server does not answer. Is it still running, and can this device reach it?";

/** What a status means to the reader; the server's own words where they say it best. */
function inWords(status, message) {
  if (status === 401) return "This server requires an API key: enter it under Settings.";
  if (status === 403) return `The server refused this page: ${message}.`;
  if (status === 413) return "This is too long for the server.";
  if (status === 429) return "The server is busy with other answers. Try again in a moment.";
  if (status === 503) return "The server is shutting down and accepts no more messages.";
  if (status === 404) return "This server lacks a route that the page uses. Is it Moebius, in the page’s version?";
  if (status >= 500) return `The server failed: ${message}`;
  if (/no chat template/.test(message))
    return "This model can only continue text. Choose an “instruct” model to chat.";
  if (/prompt is too long/.test(message)) {
    const advice = "Start a new one, or edit an earlier message.";
    return `The conversation no longer fits the model’s context. ${advice} (${message})`;
  }
  return message;
}

async function ask(path, key, options = {}) {
  const headers = { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, GONE);
  }
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's page is no answer of ours; the status says enough.
  }
  throw new Refusal(response.status, inWords(response.status, message));
}

/** `{id, max_model_len, status, meta}` of each model. */
export async function models(key) {
  const { data } = await (await ask("v1/models", key)).json();
  return data.filter((model) => !model.alias_of);
}

/** `{tokens, complete, routers: [{layer, n_expert, n_used, counts}]}` of a model since it was loaded; loads it. */
export async function routing(key, model) {
  return (await ask(`v1/routing?model=${encodeURIComponent(model)}`, key)).json();
}

/** The fields of a chat request: `{name: {type, minimum, maximum, description}}`. */
export async function fields(key) {
  const document = await (await ask("openapi.json", key)).json();
  return document.paths["/v1/chat/completions"].post.requestBody.content["application/json"].schema.properties;
}

/** Yields the events of a chat completion as they come. */
export async function* chat(body, key, signal) {
  const response = await ask("v1/chat/completions", key, {
    method: "POST",
    signal,
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refusal(0, "The connection broke off in the middle of the answer.");
    }
    if (part.done) throw new Refusal(0, "The answer broke off: the server ended the connection.");
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Refusal(500, `The server failed: ${event.error.message}`);
      yield event;
    }
  }
}
