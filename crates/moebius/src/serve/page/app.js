// The page: puts its parts together, sends what is written, shows what comes.

import * as api from "./api.js";
import { $, count } from "./dom.js";
import { clearFiles, hasFiles, startFiles, withFiles } from "./files.js";
import { drawMessages, drawWelcome, fillMessage, whenAsked } from "./messages.js";
import { whenReady } from "./rich.js";
import { RoutingView } from "./routing.js";
import { fitFields, showSettings, startSettings, wanted } from "./settings.js";
import { drawSide, startSide } from "./side.js";
import { state } from "./state.js";
import { Store } from "./store.js";
import { collect } from "./tokens.js";
import { add, before, nameOf, path, takeBack } from "./tree.js";

const TOP_TOKENS = 5; // alternatives of each token
const SAVE_EVERY = 1000; // ms, while an answer is written
const DRAFT = "moebius.draft";
const NO_ROOM = "The browser has no room left: delete a conversation. What is said now is lost with a reload.";
const KEEPS_NOTHING =
  "This browser keeps nothing for this page: conversations are lost with a reload; Export keeps them.";

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

/** Shows the experts of the last answer whose tokens are at hand. */
function showTrace() {
  if (state.running) return;
  const last = path(state.store.current).findLast((node) => state.tokens.get(node.id)?.some((t) => t.experts));
  state.routing.show(last ? state.tokens.get(last.id).filter((t) => t.experts) : []);
}

// --- asking ---

/** The body of a request for an answer to `question`; with `begun`, for the rest of that answer. */
function body(conversation, question, begun) {
  const said = [...before(conversation, question), question, ...(begun ? [begun] : [])];
  const messages = [];
  for (const { role, content } of said.filter((node) => node.content)) {
    // A question that was never answered and the next one are one message: templates want turns.
    if (messages.at(-1)?.role === role) messages.at(-1).content += `\n\n${content}`;
    else messages.push({ role, content });
  }
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const out = { messages, ...wanted() };
  if (begun) out.continue_final_message = true;
  const isOpen = !$("routing").hidden;
  if (isOpen && state.routing.routers?.length) out.routing = true;
  if (isOpen || state.store.settings.probabilities) Object.assign(out, { logprobs: true, top_logprobs: TOP_TOKENS });
  return out;
}

/** Lets the model answer a message, beside the answers it has. */
async function answer(question) {
  if (state.running) return;
  const conversation = state.store.current;
  const node = add(conversation, question, { role: "assistant", content: "", reasoning: "" });
  if (!conversation.name) conversation.name = nameOf(question.content);
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
    grow();
  }
  await state.store.drop(conversation, [node, question]);
  await changed(conversation);
  notice(error ? error.message : "The model said nothing.");
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
  delete node.failed;
  node.summary = "";
  notice("");
  changed(conversation);
  const draw = painter(node);
  let [first, pieces, saved, failure] = [0, 0, performance.now(), null];
  try {
    if (state.model) request.model = state.model.id;
    for await (const event of api.chat(request, state.store.settings.key, abort.signal)) {
      const choice = event.choices[0];
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
        const seconds = (performance.now() - first) / 1000;
        if (pieces++ && seconds > 0.2) node.speed = pieces / seconds;
        draw();
      }
      if (choice?.finish_reason === "length") node.summary = "cut off at the limit";
      if (event.usage) tally(node, event);
      if (performance.now() - saved > SAVE_EVERY) {
        saved = performance.now();
        node.at = Date.now();
        state.store.save(conversation);
      }
    }
  } catch (error) {
    if (error.name === "AbortError") node.summary = "stopped";
    else if (node.content || node.reasoning) node.failed = error.message;
    if (error.name !== "AbortError") failure = error;
  }
  node.at = Date.now();
  state.running = null;
  await changed(conversation);
  // What it can show is known once it is loaded.
  if (!failure && !isLoaded(state.model)) connect();
  $("said").textContent = node.content ? "The answer is complete." : "";
  return failure;
}

function tally(node, { usage, timings }) {
  const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = usage;
  node.usage = { prompt, generated, cached: details.cached_tokens };
  node.speed = timings.predicted_per_second || node.speed;
  const rate = node.speed ? ` · ${node.speed.toFixed(1)} tokens/s` : "";
  node.summary = `${node.summary ? `${node.summary} · ` : ""}${count(generated)} tokens${rate}`;
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
  if (!text.trim() || state.running) return;
  $("input").value = "";
  clearFiles();
  grow();
  const { current } = state.store;
  const last = path(current).at(-1) ?? null;
  answer(add(current, last, { role: "user", content: text }));
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
    const option = new Option(status.failed ? `${id} (cannot be loaded)` : id, id, false, id === state.model.id);
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
    const [{ routers }, fields] = await Promise.all([routing, api.fields(key)]);
    $("toggle-routing").hidden = !routers.length;
    state.routing.start(routers);
    fitFields(fields, meta.sampling);
    $("server").textContent = `${state.model.id} · ${meta.embedded ? "comes with the program" : meta.description}`;
    notice(state.store.keeps ? "" : KEEPS_NOTHING);
  } catch (error) {
    notice(error.message);
    if (error.status === 401) (toggle("settings", true), $("key").focus());
  }
  drawAll();
}

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
whenAsked({ answer, extend });
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
await connect();
$("input").focus();
