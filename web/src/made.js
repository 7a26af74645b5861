// What made an answer: model, seed and sampling settings, as they were when it was written. A message keeps a list of
// records, `[{model, seed, settings}]`, one for each time that a model wrote on it. Knows no elements and no server.

const MAX_RECORDS = 20; // of an imported answer
const MAX_SETTINGS_BYTES = 20_000; // of an imported record
/** Fields of a request that are no settings of the answer. */
const APART = new Set([
  ...["messages", "model", "seed", "stream", "stream_options", "n", "routing", "logprobs", "top_logprobs"],
  ...["continue_final_message", "tools", "tool_choice"],
]);

/** A random seed of few digits: the server does not tell the one it draws, so the page draws it. */
export const newSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] % 1_000_000;

/** The record of a request; `defaults` are the model's, which hold where the request names no value. */
export function recordOf(request, defaults) {
  const sent = Object.entries(request).filter(([name]) => !APART.has(name));
  return { model: request.model ?? "", seed: request.seed, settings: { ...defaults, ...Object.fromEntries(sent) } };
}

/** The request fields of a record, of those that `known` has. */
export function fieldsOf({ seed, settings }, known) {
  const own = Object.entries(settings).filter(([name]) => known.has(name) && !APART.has(name));
  return { ...Object.fromEntries(own), ...(seed !== undefined && { seed }) };
}

/** The models of an answer in words; `Model` where none was recorded. */
export function modelsOf(node) {
  const names = [...new Set((node.made ?? []).map(({ model }) => model || "Model"))];
  return names.join(" + ") || "Model";
}

/** `SmolLM2 · seed 1 · temperature 0.8`, a part for each record. */
export function lineOf(node) {
  const parts = (node.made ?? []).map(({ model, seed, settings }) => {
    const { temperature } = settings;
    return [
      model || "Model",
      ...(seed === undefined ? [] : [`seed ${seed}`]),
      ...(temperature === undefined ? [] : [`temperature ${temperature}`]),
    ].join(" · ");
  });
  return parts.join(", then ") || "Model";
}

/** A value of a setting in words. */
export const wordsOf = (value) => (typeof value === "string" ? value : JSON.stringify(value));

const isSeed = (value) => Number.isInteger(value) && Math.abs(value) < 2 ** 64;

/** The records of a message from a file: only what belongs to one. */
export function checkedMade(list) {
  if (!Array.isArray(list)) return [];
  return list
    .slice(0, MAX_RECORDS)
    .filter((value) => typeof value === "object" && value && typeof value.model === "string")
    .map(({ model, seed, settings }) => {
      const out = { model: model.slice(0, 200), settings: {} };
      if (isSeed(seed)) out.seed = seed;
      if (typeof settings !== "object" || !settings || JSON.stringify(settings).length > MAX_SETTINGS_BYTES) return out;
      for (const [name, value] of Object.entries(settings)) {
        if (/^[a-z][a-z_]{0,40}$/.test(name) && value !== null && !APART.has(name)) out.settings[name] = value;
      }
      return out;
    });
}
