// The settings panel: system prompt and its presets, every sampling parameter of the server, output format, API key.
// Parameters, their ranges and explanations come from the server's own description, defaults from its model.

import { $, button, element, help, toast } from "./dom.js";
import { state } from "./state.js";

/**
 * Fields of a request by group that are no sampling parameter: name in the API and label. The parameters come from the
 * server's description, each with its group, and stand before these.
 */
const OTHERS = new Map([
  [
    "Sampling",
    [
      ["max_tokens", "Maximum tokens"],
      ["seed", "Seed"],
    ],
  ],
  ["Repetition", [["dry_sequence_breakers", "DRY breakers (JSON list)"]]],
  [
    "More samplers",
    [
      ["samplers", "Sampler order (JSON list)"],
      ["logit_bias", "Logit bias (JSON object)"],
    ],
  ],
  [
    "Stopping",
    [
      ["stop", "Stop strings (JSON list)"],
      ["stop_token_ids", "Stop token ids (JSON list)"],
      ["ignore_eos", "Ignore the end-of-text token"],
      ["include_stop_str_in_output", "Keep the stop string"],
      ["skip_special_tokens", "Omit special tokens"],
    ],
  ],
]);

/** Names of the fields on the panel. */
let names = [];

/** Fields by group, `[[title, [[name, label]]]]`, of the fields that the server describes. */
export function groupsOf(fields) {
  const groups = new Map([...OTHERS.keys()].map((title) => [title, []]));
  for (const [name, field] of Object.entries(fields)) {
    const group = field["x-group"];
    if (group === undefined) continue;
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push([name, field.title]);
  }
  for (const [title, others] of OTHERS) groups.get(title).push(...others.filter(([name]) => fields[name]));
  return [...groups];
}

/** Names of the fields of a request that this panel sets. */
export const knownFields = () => new Set([...names, "chat_template_kwargs", "response_format"]);

/** Puts the values of a request into the fields: those of an answer, to get it again. */
export function useFields(values) {
  const before = { ...state.store.settings };
  const { chat_template_kwargs: kwargs, response_format: format, ...rest } = values;
  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  const sampling = Object.fromEntries(Object.entries(rest).map(([name, value]) => [name, asText(value)]));
  const set = ({ sampling, thinking, schema }) => {
    Object.entries({ sampling, thinking, schema }).forEach(([name, value]) => state.store.saveSettings(name, value));
    showSettings();
  };
  const schema = format?.json_schema?.schema;
  set({
    sampling,
    thinking: kwargs?.enable_thinking === undefined ? "" : String(kwargs.enable_thinking),
    schema: schema ? JSON.stringify(schema) : "",
  });
  toast("The settings are those of this answer.", "Undo", () => set(before));
}

/** What the fields say, as a request has it; throws in words where a field cannot be sent. */
export function wanted() {
  const out = {};
  const { sampling, thinking, schema } = state.store.settings;
  for (const name of names) {
    const value = sampling[name];
    if (value === undefined || value === "") continue;
    const field = $(`set-${name}`);
    if (field && !field.checkValidity()) throw new Error(`Settings: ${field.dataset.label} ${problem(field)}.`);
    out[name] = parse(field, value);
  }
  if (thinking) out.chat_template_kwargs = { enable_thinking: thinking === "true" };
  if (schema.trim()) {
    const json = readJson(schema);
    if (json === undefined) throw new Error("Settings: the JSON schema is not valid JSON.");
    out.response_format = { type: "json_schema", json_schema: { name: "answer", schema: json } };
  }
  return out;
}

function readJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

function parse(field, value) {
  if (field?.dataset.type === "json") return readJson(value);
  if (field?.tagName === "SELECT" && (value === "true" || value === "false")) return value === "true";
  return Number(value);
}

function problem(field) {
  const { min, max } = field;
  if (field.validationMessage && field.dataset.type === "json") return "is not JSON of the right type";
  if (min !== "" && max !== "") return `must be between ${min} and ${max}`;
  return "must be a number";
}

/** Tells at the field what is wrong with it. */
function judge(field) {
  if (field.dataset.type === "json") {
    const value = readJson(field.value);
    const fits =
      !field.value ||
      (field.dataset.shape === "array"
        ? Array.isArray(value)
        : value && typeof value === "object" && !Array.isArray(value));
    field.setCustomValidity(fits ? "" : "JSON");
  }
  const why = $(`${field.id}-why`);
  const isFine = field.checkValidity();
  field.setAttribute("aria-invalid", String(!isFine));
  why.textContent = isFine ? "" : problem(field);
  return isFine;
}

const LARGE = 1e9;

/** Fits the fields to the server: `fields` by name from its description, `defaults` by name from its model. */
export function fitFields(fields, defaults) {
  const groups = groupsOf(fields);
  drawFields(groups);
  for (const [name] of groups.flatMap(([, fields]) => fields)) {
    const field = $(`set-${name}`);
    const known = fields[name];
    const words = known.description;
    const sentence = `${words[0].toUpperCase()}${words.slice(1)}.`;
    field.closest(".field").querySelector("label").after(help(field.dataset.label, sentence));
    if (field.type === "number") {
      if (Math.abs(known.minimum) < LARGE) field.min = known.minimum;
      if (Math.abs(known.maximum) < LARGE) field.max = known.maximum;
      field.step = known.type === "integer" ? 1 : "any";
      field.dataset.step = known["x-step"] ?? 1;
    }
    const value = defaults?.[name];
    field.placeholder =
      value === undefined ? ({ max_tokens: "no limit", seed: "random" }[name] ?? "model’s default") : `${value}`;
    judge(field);
  }
}

function fieldOf(name) {
  let field;
  if (name === "mirostat")
    field = select([
      ["", "model’s default"],
      ["0", "off"],
      ["1", "1"],
      ["2", "2"],
    ]);
  else if (/^(ignore_eos|include_stop|skip_special)/.test(name))
    field = select([
      ["", "model’s default"],
      ["true", "yes"],
      ["false", "no"],
    ]);
  else if (/^(samplers|stop|stop_token_ids|logit_bias|dry_sequence_breakers)$/.test(name)) {
    field = element("input");
    field.type = "text";
    Object.assign(field.dataset, { type: "json", shape: name === "logit_bias" ? "object" : "array" });
  } else {
    field = element("input");
    Object.assign(field, { type: "number", step: "any", inputMode: "decimal" });
    // The arrows move in useful steps, any number is taken.
    field.addEventListener("keydown", (event) => {
      const way = { ArrowUp: 1, ArrowDown: -1 }[event.key];
      if (!way || field.readOnly) return;
      event.preventDefault();
      const step = Number(field.dataset.step ?? 1);
      const next = Number(field.value || field.placeholder || 0) + way * step;
      const [low, high] = [
        field.min === "" ? -Infinity : Number(field.min),
        field.max === "" ? Infinity : Number(field.max),
      ];
      field.value = Number(Math.max(low, Math.min(high, next || 0)).toFixed(4));
      field.dispatchEvent(new Event("change"));
    });
  }
  field.id = `set-${name}`;
  field.setAttribute("aria-describedby", `set-${name}-why`);
  return field;
}

function select(options) {
  const out = element("select");
  for (const [value, label] of options) out.append(Object.assign(element("option", "", label), { value }));
  return out;
}

function drawFields(described) {
  names = described.flatMap(([, fields]) => fields.map(([name]) => name));
  const open = new Set([...document.querySelectorAll("#sampling details[open] summary")].map((s) => s.textContent));
  const groups = described.map(([title, fields], i) => {
    const labels = fields.map(([name, label]) => {
      const field = fieldOf(name);
      field.dataset.label = label;
      field.value = state.store.settings.sampling[name] ?? "";
      field.addEventListener("change", () => {
        judge(field);
        state.store.saveSettings("sampling", { ...state.store.settings.sampling, [name]: field.value });
      });
      const why = element("span", "why");
      why.id = `${field.id}-why`;
      const words = element("label", "", label);
      words.htmlFor = field.id;
      return element("div", "field", words, field, why);
    });
    const group = element("details", "group", element("summary", "", title), element("div", "fields", ...labels));
    group.open = open.size ? open.has(title) : i === 0;
    return group;
  });
  const reset = button("Reset samplers", "Reset samplers to the model’s defaults", () => {
    const before = state.store.settings.sampling;
    state.store.saveSettings("sampling", {});
    showSettings();
    toast(
      "All sampling settings are back to the model’s defaults.",
      "Undo",
      () => (state.store.saveSettings("sampling", before), showSettings()),
    );
  });
  $("sampling").replaceChildren(...groups, reset);
}

/** Shows what the store holds: at the start, and when another tab changed it. */
export function showSettings() {
  const { settings, presets, current } = state.store;
  for (const name of names) {
    const field = $(`set-${name}`);
    if (field !== document.activeElement) field.value = settings.sampling[name] ?? "";
    judge(field);
  }
  for (const name of ["thinking", "key", "schema", "theme"])
    if ($(name) !== document.activeElement) $(name).value = settings[name] ?? "";
  showTheme();
  $("probabilities").checked = settings.probabilities;
  if ($("system") !== document.activeElement) $("system").value = current.system;
  const known = presets.map((p) => p.name).sort();
  $("preset").replaceChildren(
    ...["", ...known].map((name) => Object.assign(element("option", "", name || "Presets…"), { value: name })),
  );
  $("preset").disabled = !known.length;
  $("schema-on").hidden = !settings.schema?.trim();
  judgeSchema();
}

/** Light and dark are the system's unless the reader has chosen. */
export function showTheme(theme = state.store.settings.theme) {
  const root = document.documentElement;
  if ((root.dataset.theme ?? "") === (theme ?? "")) return;
  if (["light", "dark"].includes(theme)) root.dataset.theme = theme;
  else delete root.dataset.theme;
  state.routing?.draw();
}

function judgeSchema() {
  const text = $("schema").value;
  $("schema-why").textContent = text.trim() && readJson(text) === undefined ? "is not valid JSON" : "";
}

function setSystem(text) {
  const { current } = state.store;
  current.system = text;
  current.edited.system = Date.now();
  state.store.save(current);
}

function startPresets() {
  $("preset").addEventListener("change", () => {
    const preset = state.store.presets.find((p) => p.name === $("preset").value);
    $("remove-preset").hidden = !preset;
    if (!preset) return;
    $("system").value = preset.text;
    setSystem(preset.text);
  });
  $("save-preset").addEventListener("click", () => {
    const text = $("system").value.trim();
    if (!text) return state.notice("Write a system prompt first; a preset saves it under a name.");
    $("preset-name").value = $("preset").value || text.split(/\s+/).slice(0, 4).join(" ");
    $("name-preset").hidden = false;
    $("preset-name").select();
  });
  const keep = async () => {
    const name = $("preset-name").value.trim().slice(0, 60);
    if (!name) return;
    await state.store.savePreset(name, $("system").value);
    $("name-preset").hidden = true;
    showSettings();
    $("preset").value = name;
    $("remove-preset").hidden = false;
  };
  $("keep-preset").addEventListener("click", keep);
  $("preset-name").addEventListener("keydown", (event) => {
    if (event.key === "Enter") (event.preventDefault(), keep());
    if (event.key === "Escape") (event.stopPropagation(), ($("name-preset").hidden = true));
  });
  $("remove-preset").addEventListener("click", async () => {
    const preset = state.store.presets.find((p) => p.name === $("preset").value);
    if (!preset) return;
    await state.store.removePreset(preset.name);
    $("remove-preset").hidden = true;
    showSettings();
    toast(
      `Deleted the preset “${preset.name}”.`,
      "Undo",
      async () => (await state.store.savePreset(preset.name, preset.text), showSettings()),
    );
  });
}

/** Fills the panel; `onKey` is called when the key is another. */
export function startSettings(onKey) {
  for (const name of ["thinking", "key", "schema", "theme"]) {
    $(name).addEventListener("change", () => {
      state.store.saveSettings(name, $(name).value);
      if (name === "theme") showTheme();
      $("schema-on").hidden = !$("schema").value.trim();
      if (name === "key") onKey();
    });
  }
  $("schema").addEventListener("input", judgeSchema);
  $("probabilities").addEventListener("change", () =>
    state.store.saveSettings("probabilities", $("probabilities").checked),
  );
  $("system").addEventListener("change", () => setSystem($("system").value));
  startPresets();
  showSettings();
}
