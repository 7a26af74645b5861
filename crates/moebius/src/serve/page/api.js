// The server's API as the page needs it. Knows no elements.

/** What the server said when it said no. */
export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function ask(path, key, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(key) });
  if (response.ok) return response;
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // A proxy's page is no answer of ours; the status says enough.
  }
  throw new Refusal(response.status, message);
}

/** `{id, max_model_len, meta}` of the model. */
export async function model(key) {
  return (await (await ask("v1/models", key)).json()).data[0];
}

/** `{tokens, routers: [{layer, n_expert, n_used, counts}]}` since the server started. */
export async function routing(key) {
  return (await ask("v1/routing", key)).json();
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
    const { value, done } = await reader.read();
    if (done) throw new Error("the answer broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
