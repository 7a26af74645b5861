// The page: draws what the store holds, sends what is written, shows what comes.

import * as api from "./api.js";
import { render } from "./markdown.js";
import { RoutingView } from "./routing.js";
import { Store, add, before, path, show, siblingsOf } from "./store.js";

const $ = (id) => document.getElementById(id);
const store = new Store();
const routing = new RoutingView($("grid"), $("layers").tBodies[0], $("routing-text"));

/** Sampling fields of the panel: name in the API, label, step. */
const SAMPLING = [
  ["temperature", "Temperature", "0.05"],
  ["top_p", "Top p", "0.01"],
  ["top_k", "Top k", "1"],
  ["min_p", "Min p", "0.01"],
  ["repeat_penalty", "Repeat penalty", "0.01"],
  ["presence_penalty", "Presence penalty", "0.1"],
  ["max_tokens", "Most tokens", "1"],
  ["seed", "Seed", "1"],
];

/** The answer that is being written: `{node, conversation, abort, drawn}`. */
let running = null;
let model = null;

// --- drawing ---

function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function button(label, title, act) {
  const node = element("button", "", label);
  node.type = "button";
  node.title = title;
  node.setAttribute("aria-label", title);
  node.addEventListener("click", act);
  return node;
}

function drawAll() {
  drawSide();
  drawMessages();
  drawStatus();
}

function drawSide() {
  const items = store.list.map((conversation) => {
    const name = conversation.name || "New conversation";
    const open = button(name, name, () => choose(conversation));
    open.className = "name";
    if (conversation === store.current) open.setAttribute("aria-current", "true");
    const remove = button("✕", `Delete “${name}”`, () => {
      if (running?.conversation === conversation) stop();
      store.remove(conversation);
      changed();
    });
    remove.classList.add("icon");
    return element("li", conversation === store.current ? "current" : "", open, remove);
  });
  $("conversations").replaceChildren(...items);
  $("title").textContent = store.current.name || "Moebius";
  $("system").value = store.current.system;
}

function drawMessages() {
  const list = $("messages");
  list.replaceChildren(...path(store.current).map(drawMessage));
  $("chat").scrollTop = $("chat").scrollHeight;
  const busy = running !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function drawMessage(node) {
  const item = element("li", `message ${node.role}`);
  item.dataset.id = node.id;
  item.append(element("div", "who", node.role === "user" ? "You" : (model?.id ?? "Model")));
  fillMessage(item, node);
  return item;
}

/** Draws the text and the tools of a message anew. */
function fillMessage(item, node) {
  const pending = running?.node === node;
  item.classList.toggle("pending", pending);
  const open = item.querySelector("details")?.open ?? false;
  item.querySelectorAll(".text, .tools, details, .failed").forEach((part) => part.remove());
  if (node.reasoning) {
    const thought = element("details", "thought", element("summary", "", pending && !node.content ? "Thinking…" : "Thought"), element("div", "", node.reasoning));
    thought.open = open;
    item.append(thought);
  }
  const text = element("div", "text");
  if (node.role === "user") text.textContent = node.content;
  else render(node.content, text);
  item.append(text);
  if (node.failed) item.append(element("p", "failed", node.failed));
  if (!pending) item.append(tools(item, node));
}

function tools(item, node) {
  const out = element("div", "tools");
  const siblings = siblingsOf(store.current, node);
  if (siblings.length > 1) {
    const at = siblings.indexOf(node.id);
    const go = (step) => () => {
      show(store.current, store.current.nodes[siblings[at + step]]);
      changed();
    };
    const back = button("‹", "Previous version", go(-1));
    const on = button("›", "Next version", go(1));
    back.disabled = at === 0;
    on.disabled = at === siblings.length - 1;
    out.append(back, `${at + 1} / ${siblings.length}`, on);
  }
  if (node.role === "user") {
    out.append(button("Edit", "Edit this message; the old way on is kept", () => edit(item, node)));
  } else {
    out.append(button("Again", "Answer again; this answer is kept", () => answer(store.current.nodes[node.parent])));
    out.append(button("Copy", "Copy this answer", () => navigator.clipboard.writeText(node.content)));
    if (node.summary) out.append(node.summary);
  }
  return out;
}

function edit(item, node) {
  const area = element("textarea");
  area.value = node.content;
  area.rows = Math.min(12, node.content.split("\n").length + 1);
  area.setAttribute("aria-label", "Edit message");
  const cancel = () => fillMessage(item, node);
  const send = () => {
    if (!area.value.trim() || running) return;
    const parent = node.parent === null ? null : store.current.nodes[node.parent];
    answer(add(store.current, parent, { role: "user", content: area.value }));
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.stopPropagation(), cancel();
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), send();
  });
  item.querySelector(".text").replaceWith(area);
  item.querySelector(".tools").replaceChildren(button("Send", "Send the edited message", send), button("Cancel", "Leave it as it was", cancel));
  area.focus();
}

function drawStatus(live) {
  const last = live ?? path(store.current).findLast((node) => node.usage);
  const speed = last?.speed;
  $("speed").textContent = speed ? `${speed.toFixed(speed < 10 ? 1 : 0)} tokens/s` : "";
  const usage = last?.usage;
  $("hits").textContent = usage ? `${usage.cached} of ${usage.prompt} prompt tokens from the cache` : "";
  const context = model?.max_model_len;
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

/** Saves and draws what the store holds now. */
function changed() {
  notice(store.save() ? "" : "The browser has no room left: delete a conversation, or this one will not be kept.");
  drawAll();
}

function choose(conversation) {
  store.current = conversation;
  $("side").classList.remove("open");
  $("open-side").setAttribute("aria-expanded", "false");
  changed();
  $("input").focus();
}

// --- asking ---

/** The body of a request for an answer to `question`. */
function body(conversation, question) {
  const messages = [...before(conversation, question), question].map(({ role, content }) => ({ role, content }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const out = { messages };
  for (const [name] of SAMPLING) {
    const value = store.settings.sampling[name];
    if (value !== undefined && value !== "") out[name] = Number(value);
  }
  if (store.settings.thinking) out.chat_template_kwargs = { enable_thinking: store.settings.thinking === "true" };
  if (!$("routing").hidden) out.routing = true;
  return out;
}

/** Lets the model answer a message, beside the answers it has. */
async function answer(question) {
  if (running) return;
  const conversation = store.current;
  const node = add(conversation, question, { role: "assistant", content: "", reasoning: "" });
  const abort = new AbortController();
  running = { node, conversation, abort };
  if (!conversation.name) conversation.name = question.content.trim().split("\n")[0].slice(0, 60);
  $("routing-all").checked = false;
  routing.clear();
  changed();
  const draw = painter(node);
  let first = 0;
  let pieces = 0;
  let saved = performance.now();
  try {
    for await (const event of api.chat(body(conversation, question), store.settings.key, abort.signal)) {
      const choice = event.choices[0];
      choice?.routing?.forEach((ids) => routing.push(ids));
      const { content = "", reasoning_content = "", tool_calls } = choice?.delta ?? {};
      node.content += content ?? "";
      node.reasoning += reasoning_content ?? "";
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
      if (event.usage) {
        const { prompt_tokens: prompt, completion_tokens: generated, prompt_tokens_details: details } = event.usage;
        node.usage = { prompt, generated, cached: details.cached_tokens };
        node.speed = event.timings.predicted_per_second || node.speed;
        const rate = node.speed ? ` · ${node.speed.toFixed(1)} tokens/s` : "";
        node.summary = `${node.summary ? `${node.summary} · ` : ""}${generated} tokens${rate}`;
      }
      if (performance.now() - saved > 1000) saved = performance.now(), store.save();
    }
  } catch (error) {
    if (error.name === "AbortError") node.summary = "stopped";
    else node.failed = error.message;
    if (error.status === 401) {
      toggle("settings", true);
      $("key").focus();
    }
  }
  running = null;
  changed();
}

/** Draws a message at most once a picture, and keeps the end in sight when it was. */
function painter(node) {
  let due = false;
  return () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      const item = document.querySelector(`[data-id="${node.id}"]`);
      if (!item || running?.node !== node) return;
      const chat = $("chat");
      const atEnd = chat.scrollHeight - chat.scrollTop - chat.clientHeight < 80;
      fillMessage(item, node);
      if (atEnd) chat.scrollTop = chat.scrollHeight;
      drawStatus(node);
    });
  };
}

function stop() {
  running?.abort.abort();
}

function send() {
  const text = $("input").value;
  if (!text.trim() || running) return;
  $("input").value = "";
  grow();
  const last = path(store.current).at(-1) ?? null;
  answer(add(store.current, last, { role: "user", content: text }));
}

// --- panels and keys ---

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight + 2}px`;
}

function toggle(name, open = $(name).hidden) {
  // On a narrow screen there is room for one.
  if (open) for (const other of ["settings", "routing"]) if (other !== name) hide(other, true);
  hide(name, !open);
  if (name === "routing" && open) routing.draw();
}

function hide(name, hidden) {
  $(name).hidden = hidden;
  $(`toggle-${name}`).setAttribute("aria-pressed", String(!hidden));
}

async function showAllRouting() {
  if (!$("routing-all").checked) return routing.clear();
  const { tokens, routers } = await api.routing(store.settings.key);
  routing.set(tokens, routers.map((router) => router.counts));
}

function startSettings() {
  const fields = SAMPLING.map(([name, label, step]) => {
    const input = element("input");
    Object.assign(input, { type: "number", step, id: `set-${name}`, value: store.settings.sampling[name] ?? "", placeholder: "model’s own" });
    input.addEventListener("change", () => {
      store.settings.sampling[name] = input.value;
      store.saveSettings();
    });
    return element("label", "", label, input);
  });
  $("sampling").append(...fields);
  for (const name of ["thinking", "key"]) {
    $(name).value = store.settings[name];
    $(name).addEventListener("change", () => {
      store.settings[name] = $(name).value;
      store.saveSettings();
      if (name === "key") connect();
    });
  }
  $("system").addEventListener("change", () => {
    store.current.system = $("system").value;
    store.save();
  });
  $("forget").addEventListener("click", () => {
    if (!confirm("Delete all conversations from this browser?")) return;
    stop();
    store.clear();
    changed();
  });
}

function startKeys() {
  $("composer").addEventListener("submit", (event) => (event.preventDefault(), send()));
  $("input").addEventListener("input", grow);
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), send();
    if (event.key === "ArrowUp" && !$("input").value) {
      const edits = document.querySelectorAll(".message.user .tools button[title^=Edit]");
      if (edits.length) event.preventDefault(), edits[edits.length - 1].click();
    }
  });
  $("stop").addEventListener("click", stop);
  $("new").addEventListener("click", () => choose(store.create()));
  $("toggle-settings").addEventListener("click", () => toggle("settings"));
  $("toggle-routing").addEventListener("click", () => toggle("routing"));
  $("routing-all").addEventListener("change", () => showAllRouting().catch((error) => notice(error.message)));
  const side = (open) => () => {
    $("side").classList.toggle("open", open);
    $("open-side").setAttribute("aria-expanded", String(open));
    $(open ? "new" : "open-side").focus();
  };
  $("open-side").addEventListener("click", side(true));
  $("close-side").addEventListener("click", side(false));
  document.addEventListener("keydown", (event) => {
    const acts = { n: () => choose(store.create()), s: () => toggle("settings"), r: () => toggle("routing") };
    if (event.altKey && !event.ctrlKey && acts[event.key]) event.preventDefault(), acts[event.key]();
    if (event.key === "Escape") $("side").classList.contains("open") ? side(false)() : stop();
    if (event.key === "/" && !/^(input|textarea|select)$/i.test(event.target.tagName)) event.preventDefault(), $("input").focus();
  });
}

async function connect() {
  try {
    model = await api.model(store.settings.key);
    $("server").textContent = `${model.id} · ${model.meta.description}`;
    document.title = `${model.id} · Moebius`;
    routing.start((await api.routing(store.settings.key)).routers);
    notice("");
  } catch (error) {
    notice(error.status === 401 ? "This server wants an API key: enter it under Settings." : `The server does not answer: ${error.message}`);
    if (error.status === 401) toggle("settings", true);
  }
  drawAll();
}

startSettings();
startKeys();
drawAll();
connect();
$("input").focus();
