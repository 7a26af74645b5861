// The panel of settings: system prompt and its presets, every sampler of the server, the form of answers, the key.
// Ranges and explanations come from the server's own description, defaults from its model.

import { $, button, element, toast } from "./dom.js";
import { state } from "./state.js";

/** Fields of a request by group: name in the API and label. */
const GROUPS = [
  [
    "Sampling",
    [
      ["temperature", "Temperature"],
      ["top_p", "Top p"],
      ["top_k", "Top k"],
      ["min_p", "Min p"],
      ["max_tokens", "Maximum tokens"],
      ["seed", "Seed"],
    ],
  ],
  [
    "Repetition",
    [
      ["repeat_penalty", "Repeat penalty"],
      ["repeat_last_n", "Repeat window"],
      ["presence_penalty", "Presence penalty"],
      ["frequency_penalty", "Frequency penalty"],
      ["dry_multiplier", "DRY multiplier"],
      ["dry_base", "DRY base"],
      ["dry_allowed_length", "DRY allowed length"],
      ["dry_penalty_last_n", "DRY window"],
      ["dry_sequence_breakers", "DRY breakers (JSON list)"],
    ],
  ],
  [
    "More samplers",
    [
      ["typical_p", "Typical p"],
      ["top_n_sigma", "Top n sigma"],
      ["xtc_probability", "XTC probability"],
      ["xtc_threshold", "XTC threshold"],
      ["dynatemp_range", "Dynamic temperature range"],
      ["dynatemp_exponent", "Dynamic temperature exponent"],
      ["min_keep", "Min keep"],
      ["mirostat", "Mirostat version"],
      ["mirostat_tau", "Mirostat tau"],
      ["mirostat_eta", "Mirostat eta"],
      ["samplers", "Order (JSON list)"],
      ["logit_bias", "Logit bias (JSON object)"],
    ],
  ],
  [
    "End of the answer",
    [
      ["stop", "Stop texts (JSON list)"],
      ["stop_token_ids", "Stop tokens (JSON list)"],
      ["ignore_eos", "Ignore the end token"],
      ["include_stop_str_in_output", "Keep the stop text"],
      ["skip_special_tokens", "Leave out special tokens"],
    ],
  ],
];
const NAMES = GROUPS.flatMap(([, fields]) => fields.map(([name]) => name));
const STEPS = {
  temperature: 0.05,
  top_p: 0.01,
  min_p: 0.01,
  repeat_penalty: 0.01,
  presence_penalty: 0.1,
  frequency_penalty: 0.1,
};

/** What the fields say, as a request has it; throws in words where a field cannot be sent. */
export function wanted() {
  const out = {};
  const { sampling, thinking, schema } = state.store.settings;
  for (const name of NAMES) {
    const value = sampling[name];
    if (value === undefined || value === "") continue;
    const field = $(`set-${name}`);
    if (field && !field.checkValidity()) throw new Error(`Settings: ${field.dataset.label} ${problem(field)}.`);
    out[name] = parse(field, value);
  }
  if (thinking) out.chat_template_kwargs = { enable_thinking: thinking === "true" };
  if (schema.trim()) {
    const json = readJson(schema);
    if (json === undefined) throw new Error("Settings: the JSON schema is not JSON.");
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
  if (field.validationMessage && field.dataset.type === "json") return "is not JSON of that kind";
  if (min !== "" && max !== "") return `must lie between ${min} and ${max}`;
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
  for (const name of NAMES) {
    const field = $(`set-${name}`);
    const known = fields[name];
    field.closest("label").hidden = !known;
    if (!known) continue;
    field.closest("label").title = known.description;
    if (field.type === "number") {
      if (Math.abs(known.minimum) < LARGE) field.min = known.minimum;
      if (Math.abs(known.maximum) < LARGE) field.max = known.maximum;
      field.step = known.type === "integer" ? 1 : "any";
      field.dataset.step = known.type === "integer" ? 1 : (STEPS[name] ?? 0.1);
    }
    const value = defaults?.[name];
    field.placeholder =
      value === undefined ? ({ max_tokens: "no limit", seed: "random" }[name] ?? "model’s own") : `${value}`;
    judge(field);
  }
}

function fieldOf(name) {
  let field;
  if (name === "mirostat")
    field = select([
      ["", "model’s own"],
      ["0", "off"],
      ["1", "1"],
      ["2", "2"],
    ]);
  else if (/^(ignore_eos|include_stop|skip_special)/.test(name))
    field = select([
      ["", "model’s own"],
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

function drawFields() {
  const groups = GROUPS.map(([title, fields], i) => {
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
      return element("label", "", label, field, why);
    });
    const group = element("details", "group", element("summary", "", title), element("div", "fields", ...labels));
    group.open = i === 0;
    return group;
  });
  const reset = button("Reset samplers", "Reset samplers: all of this is the model’s own again", () => {
    const before = state.store.settings.sampling;
    state.store.saveSettings("sampling", {});
    showSettings();
    toast(
      "All samplers are the model’s own again.",
      "Undo",
      () => (state.store.saveSettings("sampling", before), showSettings()),
    );
  });
  $("sampling").replaceChildren(...groups, reset);
}

/** Shows what the store holds: at the start, and when another tab changed it. */
export function showSettings() {
  const { settings, presets, current } = state.store;
  for (const name of NAMES) {
    const field = $(`set-${name}`);
    if (field !== document.activeElement) field.value = settings.sampling[name] ?? "";
    judge(field);
  }
  for (const name of ["thinking", "key", "schema"])
    if ($(name) !== document.activeElement) $(name).value = settings[name] ?? "";
  $("probabilities").checked = settings.probabilities;
  if ($("system") !== document.activeElement) $("system").value = current.system;
  const names = presets.map((p) => p.name).sort();
  $("preset").replaceChildren(
    ...["", ...names].map((name) => Object.assign(element("option", "", name || "Presets…"), { value: name })),
  );
  $("preset").disabled = !names.length;
  $("schema-on").hidden = !settings.schema?.trim();
  judgeSchema();
}

function judgeSchema() {
  const text = $("schema").value;
  $("schema-why").textContent = text.trim() && readJson(text) === undefined ? "is not JSON" : "";
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
    if (!text) return state.notice("Write a system prompt first: a preset keeps one under a name.");
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
  drawFields();
  for (const name of ["thinking", "key", "schema"]) {
    $(name).addEventListener("change", () => {
      state.store.saveSettings(name, $(name).value);
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
