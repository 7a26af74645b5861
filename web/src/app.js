// The page: puts its parts together, sends what is written, shows what comes.

import * as api from "./api.js";
import { $, count } from "./dom.js";
import { clearFiles, giveImages, hasFiles, imagesOf, startFiles, withFiles } from "./files.js";
import { fieldsOf, newSeed, recordOf } from "./made.js";
import { drawMessages, drawWelcome, fillMessage, whenAsked } from "./messages.js";
import { whenReady } from "./rich.js";
import { RoutingView } from "./routing.js";
import { fitFields, knownFields, showSettings, showTheme, startSettings, useFields, wanted } from "./settings.js";
import { drawSide, startSide } from "./side.js";
import { state } from "./state.js";
import { Store } from "./store.js";
import { collect } from "./tokens.js";
import { add, before, nameOf, path, takeBack } from "./tree.js";

const TOP_TOKENS = 5; // alternatives of each token
const SAVE_EVERY = 1000; // ms, while an answer is written
const MAX_TRACE_BYTES = 16 << 20; // of the experts of an answer, which the server holds until it ends
const DRAFT = "moebius.draft";
const NO_ROOM = "The browser’s storage is full: delete a conversation. New messages are lost on reload.";
const KEEPS_NOTHING =
  "This browser stores nothing for this page: conversations are lost on reload; Export saves them.";

// --- drawing ---

/** Id of the conversation that is on the page. */
let drawn = null;

function drawAll() {
  drawSide(choose);
  const { current } = state.store;
  if (drawn !== current.id) {
    drawn = current.id;
    showTrace();
  }
  $("title").textContent = current.name || "Moebius";
  showSettings();
  drawMessages();
  drawWelcome((text) => send(text));
  drawStatus();
  const isBusy = state.running !== null;
  $("send").hidden = isBusy;
  $("stop").hidden = !isBusy;
}

function drawStatus(live) {
  const last = live ?? path(state.store.current).findLast((node) => node.usage);
  const speed = last?.speed;
  $("speed").textContent = speed ? `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : "";
  const usage = last?.usage;
  $("hits").textContent = usage ? `${usage.cached} of ${usage.prompt} prompt tokens cached` : "";
  const context = state.model?.max_model_len;
  $("fill-label").hidden = !(usage && context);
  if (usage && context) {
    const used = usage.prompt + usage.generated;
    $("fill").value = used / context;
    $("fill-text").textContent = `${used} / ${context}`;
  }
}

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

/** Draws what the store holds now, and saves a conversation; null where all are saved already. */
async function changed(conversation = state.store.current) {
  if (conversation) conversation.updated = Math.max(conversation.updated ?? 0, Date.now());
  drawAll();
  showTrace();
  const isKept = conversation ? await state.store.save(conversation) : true;
  if (!isKept) notice(state.store.keeps ? NO_ROOM : KEEPS_NOTHING);
}

function choose(conversation) {
  state.store.choose(conversation);
  $("side").classList.remove("open");
  $("open-side").setAttribute("aria-expanded", "false");
  notice("");
  drawAll();
  $("input").focus();
}

/** Shows the experts of the last answer; where they are not at hand, a way to compute them. */
function showTrace() {
  if (state.running) return;
  const isTraced = (node) => state.tokens.get(node.id)?.some((token) => token.experts);
  const answers = path(state.store.current).filter((node) => node.role === "assistant");
  const last = answers.findLast(isTraced);
  state.routing.show(last ? state.tokens.get(last.id).filter((token) => token.experts) : []);
  const latest = answers.at(-1);
  state.routing.offer(!isTraced(latest ?? {}) && isRepeatable(latest) ? () => compute(latest) : null);
}

// --- asking ---

/** The end of an answer, for those who hear the page. */
function said({ summary, failed }) {
  if (failed) return "The answer broke off.";
  if (summary?.startsWith("stopped")) return "The answer was stopped.";
  return summary?.startsWith("cut off") ? "The answer was cut off at the token limit." : "The answer is complete.";
}

/** A part of a message in parts. */
const partOf = (part) => (typeof part === "string" ? { type: "text", text: part } : part);

/** The messages of a request for an answer to `question`; with `begun`, for the rest of that answer. */
function messagesOf(conversation, question, begun) {
  const said = [...before(conversation, question), question, ...(begun ? [begun] : [])];
  const messages = [];
  for (const { role, content, images = [] } of said.filter((node) => node.content || node.images)) {
    const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
    if (content) parts.push({ type: "text", text: content });
    const last = messages.at(-1);
    // A question that was never answered and the next one are one message: templates want turns.
    if (last?.role !== role) messages.push({ role, content: images.length ? parts : content });
    else if (typeof last.content === "string" && !images.length) last.content += `\n\n${content}`;
    else last.content = [last.content].flat().concat(parts).map(partOf);
  }
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  return messages;
}

/** The body of a request for an answer to `question`; with `begun`, for the rest of that answer. */
function body(conversation, question, begun) {
  const out = { messages: messagesOf(conversation, question, begun), seed: newSeed(), ...wanted() };
  if (state.model) out.model = state.model.id;
  if (begun) out.continue_final_message = true;
  const isOpen = !$("routing").hidden;
  const isFree = state.routing.isFree && traceBytes(out) <= MAX_TRACE_BYTES;
  const isTraced = state.routing.routers?.length > 0 && (isOpen || isFree);
  if (isTraced) out.routing = true;
  const top = isOpen || state.store.settings.probabilities ? TOP_TOKENS : 0;
  if (isTraced || top) Object.assign(out, { logprobs: true, top_logprobs: top });
  return out;
}

/** What the server holds at most for the experts of an answer and the probabilities of its tokens. */
function traceBytes({ max_tokens = -1 }) {
  const tokens = max_tokens < 0 ? Infinity : max_tokens;
  const each = (state.routing.routers ?? []).reduce((sum, router) => sum + 2 * router.n_used, 128);
  return each * Math.min(tokens, state.model?.max_model_len ?? 0);
}

/** Whether the same request gives the same answer again: one model wrote all of it, and is the one that is chosen. */
const isRepeatable = (node) =>
  node?.made?.length === 1 &&
  !!node.content &&
  node.summary !== "edited" &&
  node.made[0].model === state.model?.id &&
  node.made[0].seed !== undefined;

/** Computes an answer again, as it was made, for its experts: it is the same text where nothing else has changed. */
async function compute(node) {
  if (state.running || !isLoaded(state.model)) return;
  const conversation = state.store.current;
  const request = {
    ...fieldsOf(node.made[0], knownFields()),
    ...{ messages: messagesOf(conversation, conversation.nodes[node.parent], null), model: state.model.id },
    ...{ routing: true, logprobs: true, top_logprobs: TOP_TOKENS },
  };
  const abort = new AbortController();
  state.running = { node: null, conversation, abort };
  drawAll();
  const tokens = [];
  let [content, reasoning, failure] = ["", "", ""];
  const goesOn = () => node.content.startsWith(content) && (node.reasoning ?? "").startsWith(reasoning);
  try {
    for await (const { choices } of api.chat(request, state.store.settings.key, abort.signal)) {
      collect(tokens, choices[0]);
      content += choices[0]?.delta?.content ?? "";
      reasoning += choices[0]?.delta?.reasoning_content ?? "";
      // An answer that was stopped or ran into a limit ends earlier than this one.
      if (content.length >= node.content.length || !goesOn()) break;
      state.routing.tell(`Computing the experts of this answer: ${count(tokens.length)} tokens`);
    }
    if (!goesOn() && !content.startsWith(node.content))
      failure = "The same request gives another answer now, so the experts of this one cannot be computed.";
  } catch (error) {
    failure = error.name === "AbortError" ? "Stopped: the experts were not computed." : error.message;
  }
  abort.abort();
  state.running = null;
  const traced = tokens.filter((token) => token.experts);
  if (!failure) state.tokens.set(node.id, traced);
  drawAll();
  showTrace();
  notice(failure);
}

/** Lets the model answer a message, beside the answers it has. */
async function answer(question) {
  if (state.running) return;
  const conversation = state.store.current;
  const node = add(conversation, question, { role: "assistant", content: "", reasoning: "" });
  if (!conversation.name) conversation.name = nameOf(question.content) || (question.images ? "Image" : "");
  const error = await write(conversation, question, node, null);
  if (!node.content && !node.reasoning) await withdraw(conversation, question, node, error);
}

/** Lets the model write on where an answer ends. */
async function extend(node) {
  if (state.running) return;
  const conversation = state.store.current;
  const question = conversation.nodes[node.parent];
  const error = await write(conversation, question, node, { ...node });
  if (error && !node.failed) notice(error.message);
}

/** An answer of which nothing came leaves no trace: a new message goes back to where it was written. */
async function withdraw(conversation, question, node, error) {
  takeBack(conversation, node);
  if (!question.children.length && !hasFiles() && !$("input").value) {
    takeBack(conversation, question);
    $("input").value = question.content;
    giveImages(question.images ?? []);
    grow();
  }
  await state.store.drop(conversation, [node, question]);
  await changed(conversation);
  const wasStopped = node.summary?.startsWith("stopped");
  notice(error ? error.message : wasStopped ? "" : "The model returned an empty answer.");
  if (error?.status === 401) (toggle("settings", true), $("key").focus());
}

/** Sends the request and writes what comes into `node`; gives the error that ended it, if one did. */
async function write(conversation, question, node, begun) {
  let request;
  try {
    request = body(conversation, question, begun);
  } catch (error) {
    toggle("settings", true);
    return error;
  }
  const abort = new AbortController();
  state.running = { node, conversation, abort };
  $("routing-all").checked = false;
  state.routing.showAll(0, null);
  const tokens = begun ? [...(state.tokens.get(node.id) ?? [])] : [];
  state.routing.show(tokens.filter((token) => token.experts));
  state.tokens.set(node.id, tokens);
  state.routing.offer(null);
  const record = recordOf(request, state.model?.meta.sampling);
  node.made = [...(begun?.made ?? []), record];
  delete node.failed;
  node.summary = "";
  notice("");
  changed(conversation);
  const draw = painter(node);
  const start = performance.now();
  const had = tokens.length;
  let [first, pieces, saved, failure] = [0, 0, start, null];
  const seconds = () => (performance.now() - start) / 1000;
  try {
    for await (const event of api.chat(request, state.store.settings.key, abort.signal)) {
      const choice = event.choices[0];
      // The server says which model answers.
      record.model = event.model ?? record.model;
      collect(tokens, choice);
      for (let i = state.routing.trace.length; i < tokens.length && tokens[i].experts; i++)
        state.routing.push(tokens[i]);
      const { content = "", reasoning_content = "", tool_calls } = choice?.delta ?? {};
      node.content += content ?? "";
      node.reasoning = (node.reasoning ?? "") + (reasoning_content ?? "");
      for (const call of tool_calls ?? []) {
        node.content += call.function.name ? `\n\n\`${call.function.name}\` ` : call.function.arguments;
      }
      if (content || reasoning_content) {
        first ||= performance.now();
        const since = (performance.now() - first) / 1000;
        if (pieces++ && since > 0.2) node.speed = pieces / since;
        draw();
      }
      if (choice?.finish_reason === "length") node.summary = "cut off at the token limit";
      if (event.usage) tally(node, event, seconds());
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        node.at = Date.now();
        state.store.save(conversation);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") {
      node.summary = `stopped · ${figures(Math.max(pieces, tokens.length - had), node.speed, seconds())}`;
    } else if (node.content || node.reasoning) node.failed = error.message;
    if (error.name !== "AbortError") failure = error;
  }
  // A model that added nothing has not made the answer.
  if (begun && !pieces) node.made = begun.made ?? [];
  node.at = Date.now();
  state.running = null;
  await changed(conversation);
  // What it can show is known once it is loaded.
  if (!failure && !isLoaded(state.model)) connect();
  $("said").textContent = node.content ? said(node) : "";
  return failure;
}

function tally(node, { usage, timings }, seconds) {
  const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = usage;
  node.usage = { prompt, generated, cached: details.cached_tokens };
  node.speed = timings.predicted_per_second || node.speed;
  node.summary = `${node.summary ? `${node.summary} · ` : ""}${figures(generated, node.speed, seconds)}`;
}

/** `120 tokens · 12.3 tokens/s · 9.8 s`. */
function figures(tokens, speed, seconds) {
  const rate = speed ? ` · ${speed.toFixed(1)} tokens/s` : "";
  return `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}${rate} · ${seconds.toFixed(1)} s`;
}

/** Draws a message at most once a frame, and keeps the end in sight when it was. */
function painter(node) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      const item = document.querySelector(`[data-id="${node.id}"]`);
      if (!item || state.running?.node !== node) return;
      const chat = $("chat");
      const isAtEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80;
      fillMessage(item, node);
      if (isAtEnd) chat.scrollTop = chat.scrollHeight;
      drawStatus(node);
    });
  };
}

const stop = () => state.running?.abort.abort();

function send(text = withFiles($("input").value)) {
  const images = imagesOf();
  if ((!text.trim() && !images.length) || state.running) return;
  $("input").value = "";
  clearFiles();
  grow();
  const { current } = state.store;
  const last = path(current).at(-1) ?? null;
  answer(add(current, last, { role: "user", content: text, ...(images.length && { images }) }));
}

// --- panels and keys ---

function grow() {
  const input = $("input");
  // What is not sent yet outlives a reload of this tab.
  sessionStorage.setItem(DRAFT, input.value);
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function toggle(name, open = $(name).hidden) {
  if (name === "routing" && $("toggle-routing").hidden) return;
  // There is room for one.
  if (open) for (const other of ["settings", "routing"]) if (other !== name) hide(other, true);
  hide(name, !open);
  if (name === "routing" && open) state.routing.draw();
}

function hide(name, hidden) {
  $(name).hidden = hidden;
  $(`toggle-${name}`).setAttribute("aria-pressed", String(!hidden));
}

async function showAllRouting() {
  if (!$("routing-all").checked) return state.routing.showAll(0, null);
  const { tokens, routers, complete } = await api.routing(state.store.settings.key, state.model.id);
  $("routing-all").dataset.complete = complete ? "yes" : "";
  state.routing.showAll(
    tokens,
    routers.map((router) => router.counts),
  );
}

function startKeys() {
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  $("input").addEventListener("input", grow);
  if (matchMedia("(pointer: coarse)").matches) $("input").placeholder = "Message";
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
    if (event.key === "ArrowUp" && !$("input").value) {
      const edits = document.querySelectorAll(".message.user .tools button[title^=Edit]");
      if (edits.length) (event.preventDefault(), edits[edits.length - 1].click());
    }
  });
  $("stop").addEventListener("click", stop);
  const fresh = () => choose(state.store.create());
  $("new").addEventListener("click", fresh);
  for (const name of ["settings", "routing"]) {
    $(`toggle-${name}`).addEventListener("click", () => toggle(name));
    $(`close-${name}`).addEventListener("click", () => (toggle(name, false), $(`toggle-${name}`).focus()));
  }
  $("models").addEventListener("change", () => {
    state.store.saveSettings("model", $("models").value);
    connect();
  });
  $("routing-all").addEventListener("change", () => showAllRouting().catch((error) => notice(error.message)));
  const side = (open) => () => {
    $("side").classList.toggle("open", open);
    $("open-side").setAttribute("aria-expanded", String(open));
    $(open ? "new" : "open-side").focus();
  };
  $("open-side").addEventListener("click", side(true));
  $("close-side").addEventListener("click", side(false));
  document.addEventListener("keydown", (event) => {
    const acts = { n: fresh, s: () => toggle("settings"), r: () => toggle("routing") };
    if (event.altKey && !event.ctrlKey && acts[event.key]) (event.preventDefault(), acts[event.key]());
    if (event.key === "Escape") $("side").classList.contains("open") ? side(false)() : stop();
    if (event.key === "/" && !/^(input|textarea|select)$/i.test(event.target.tagName))
      (event.preventDefault(), $("input").focus());
  });
}

const isLoaded = (model) => model?.status?.value === "loaded";

/** Lets the reader choose where there are several models. A choice is loaded by the first message. */
function showModels(models) {
  $("models-label").hidden = models.length < 2;
  const options = models.map(({ id, status }) => {
    const option = new Option(status.failed ? `${id} (failed to load)` : id, id, false, id === state.model.id);
    option.title = status.why ?? status.value;
    return option;
  });
  $("models").replaceChildren(...options);
}

async function connect() {
  const { key, model: wanted } = state.store.settings;
  try {
    const models = await api.models(key);
    state.model = models.find(({ id }) => id === wanted) ?? models.find(isLoaded) ?? models[0];
    showModels(models);
    const { meta } = state.model;
    document.title = `${state.model.id} · Moebius`;
    const routing = isLoaded(state.model) ? api.routing(key, state.model.id) : { routers: [] };
    const [{ routers, complete }, fields] = await Promise.all([routing, api.fields(key)]);
    $("toggle-routing").hidden = !routers.length;
    $("attach-image").hidden = !meta.sees_images;
    state.routing.start(routers, complete);
    fitFields(fields, meta.sampling);
    $("server").textContent = `${state.model.id} · ${meta.embedded ? "built into the program" : meta.description}`;
    notice(state.store.keeps ? "" : KEEPS_NOTHING);
  } catch (error) {
    notice(error.message);
    if (error.status === 401) (toggle("settings", true), $("key").focus());
  }
  drawAll();
  showTrace();
}

// Before anything is drawn.
showTheme(Store.storedSettings().theme ?? "");
state.store = await Store.open();
state.routing = new RoutingView();
Object.assign(state, {
  changed,
  notice,
  openExperts: (tokens, i) => {
    const traced = tokens.filter((token) => token.experts);
    $("routing-all").checked = false;
    state.routing.showAll(0, null);
    toggle("routing", true);
    state.routing.show(traced);
    state.routing.select(traced.indexOf(tokens[i]));
  },
});
state.store.isBusy = (id) => state.running?.conversation.id === id;
state.store.onChange = (id) => {
  const { current } = state.store;
  // What is being written here is drawn as it comes; an open editor keeps its words.
  const isIdle = !state.running && !document.querySelector(".editor");
  if (current.id !== drawn || (id === current.id && isIdle)) return drawAll();
  drawSide(choose);
  showSettings();
};
whenAsked({
  answer,
  extend,
  use: (record) => {
    const defaults = state.model?.meta.sampling ?? {};
    const fields = Object.entries(fieldsOf(record, knownFields()));
    useFields(Object.fromEntries(fields.filter(([name, value]) => defaults[name] !== value)));
    toggle("settings", true);
  },
});
whenReady(() => {
  for (const item of document.querySelectorAll(".message.assistant")) {
    const node = state.store.current.nodes[item.dataset.id];
    // An editor keeps its words, and tokens their place.
    if (node && !item.querySelector(".editor, .tokens")) fillMessage(item, node);
  }
});
startSettings(connect);
startSide(choose);
startFiles();
startKeys();
$("input").value = sessionStorage.getItem(DRAFT) ?? "";
grow();
drawAll();
// It stays where anything above failed.
$("not-loaded").remove();
await connect();
$("input").focus();
