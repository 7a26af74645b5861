// Messages and what can be done with them: versions, edit, again, continue, copy, tokens.

import { $, button, copyButton, count, element, image } from "./dom.js";
import { lineOf, modelsOf, wordsOf } from "./made.js";
import { render } from "./markdown.js";
import { RICH } from "./rich.js";
import { state } from "./state.js";
import { tokenView } from "./tokens.js";
import { add, path, show, siblingsOf } from "./tree.js";

/** Messages whose tokens are shown instead of their text. */
const asTokens = new Set();

/** `{answer(question), extend(node), use(record)}`: actions of `app.js`. */
let acts = {};
export const whenAsked = (given) => (acts = given);

export function drawMessages() {
  const { current } = state.store;
  $("messages").replaceChildren(...path(current).map(drawMessage));
  $("chat").scrollTop = $("chat").scrollHeight;
}

function drawMessage(node) {
  const item = element("li", `message ${node.role}`);
  item.dataset.id = node.id;
  fillMessage(item, node);
  return item;
}

/** Who wrote a message; of an answer, what made it, with all settings to unfold. */
function who(node, isOpen) {
  if (node.role === "user") return element("div", "who", "You");
  if (!node.made?.length) return element("div", "who", modelsOf(node));
  const parts = node.made.flatMap((record) => {
    const values = { model: record.model, ...(record.seed !== undefined && { seed: record.seed }), ...record.settings };
    const rows = Object.entries(values).flatMap(([name, value]) => [
      element("dt", "", name),
      element("dd", "", wordsOf(value)),
    ]);
    const use = button("Use these settings", "Use the seed and the settings of this answer for the next ones", () =>
      acts.use(record),
    );
    return [element("dl", "", ...rows), use];
  });
  const out = element("details", "who", element("summary", "", lineOf(node)), ...parts);
  out.open = isOpen;
  return out;
}

const PARTS = ".who, .images, .text, .tokens, .tools, details.thought, .failed, .editor";

/** Draws a message anew: who wrote it, its text and its tools. */
export function fillMessage(item, node) {
  const isPending = state.running?.node === node;
  item.classList.toggle("pending", isPending);
  item.setAttribute("aria-busy", String(isPending));
  const open = item.querySelector("details.thought")?.open ?? false;
  const made = who(node, item.querySelector("details.who")?.open ?? false);
  item.querySelectorAll(PARTS).forEach((part) => part.remove());
  item.append(made);
  if (node.reasoning) {
    const summary = element("summary", "", isPending && !node.content ? "Thinking…" : "Thought");
    const thought = element("details", "thought", summary, element("div", "", node.reasoning));
    thought.open = open;
    item.append(thought);
  }
  if (node.images) {
    item.append(element("div", "images", ...node.images.map((uri, i) => image(uri, `Image ${i + 1}`))));
  }
  if (asTokens.has(node.id) && state.tokens.get(node.id)?.length && !isPending) {
    item.append(tokenView(state.tokens.get(node.id)));
  } else {
    const text = element("div", "text");
    if (node.role === "user") text.textContent = node.content;
    else render(node.content, text, RICH);
    // A long message scrolls inside itself.
    if (node.role === "user" && node.content.length > 2000) text.tabIndex = 0;
    item.append(text);
  }
  if (node.failed) item.append(element("p", "failed", node.failed));
  if (!isPending) item.append(tools(item, node));
}

function versions(node) {
  const siblings = siblingsOf(state.store.current, node);
  if (siblings.length < 2) return [];
  const at = siblings.indexOf(node.id);
  const go = (step) => () => {
    show(state.store.current, state.store.current.nodes[siblings[at + step]]);
    state.changed();
  };
  const back = button("‹", "Previous version", go(-1));
  const on = button("›", "Next version", go(1));
  back.disabled = at === 0;
  on.disabled = at === siblings.length - 1;
  return [back, `${at + 1} / ${siblings.length}`, on];
}

function tools(item, node) {
  const out = element("div", "tools", ...versions(node));
  if (node.role === "user") {
    out.append(
      button("Edit", "Edit this message; the old version is kept", () => edit(item, node)),
      copyButton("Copy this message", () => node.content),
    );
    return out;
  }
  const isLast = !node.children.length;
  out.append(
    button("Regenerate", "Regenerate the answer; this one is kept", () =>
      acts.answer(state.store.current.nodes[node.parent]),
    ),
  );
  if (isLast && node.content) out.append(button("Continue", "Continue the answer", () => acts.extend(node)));
  out.append(button("Edit", "Edit this answer; the old one is kept", () => edit(item, node)));
  if (node.content) out.append(copyButton("Copy this answer", () => node.content));
  const tokens = state.tokens.get(node.id);
  if (tokens?.some((token) => token.text !== undefined)) {
    const toggle = button("Tokens", "Show the tokens, their probabilities and experts", () => {
      if (!asTokens.delete(node.id)) asTokens.add(node.id);
      fillMessage(item, node);
    });
    toggle.setAttribute("aria-pressed", String(asTokens.has(node.id)));
    out.append(toggle);
  }
  if (node.summary) out.append(element("span", "", node.summary));
  return out;
}

/** Lets the reader write a message anew. Every way keeps the old one beside it. */
function edit(item, node) {
  const area = element("textarea");
  area.value = node.content;
  area.rows = Math.min(16, node.content.split("\n").length + 1);
  area.setAttribute("aria-label", node.role === "user" ? "Edit message" : "Edit answer");
  const { current } = state.store;
  const parent = node.parent === null ? null : current.nodes[node.parent];
  const cancel = () => fillMessage(item, node);
  const keep = () => {
    if ((!area.value.trim() && !node.images) || state.running) return null;
    return add(current, parent, {
      role: node.role,
      content: area.value,
      ...(node.images && { images: node.images }),
      ...(node.role === "assistant" && { summary: "edited", ...(node.made && { made: node.made }) }),
    });
  };
  const send = () => {
    const message = keep();
    if (message && node.role === "user") acts.answer(message);
    else if (message) state.changed();
  };
  const goOn = () => {
    const message = keep();
    if (message) acts.extend(message);
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") (event.stopPropagation(), cancel());
    if (
      event.key === "Enter" &&
      !event.isComposing &&
      (node.role === "user" ? !event.shiftKey : event.ctrlKey || event.metaKey)
    )
      (event.preventDefault(), send());
  });
  const ways =
    node.role === "user"
      ? [button("Send", "Send the edited message", send)]
      : [
          button("Save", "Save the edited answer (Ctrl+Enter)", send),
          button("Save and continue", "Save and continue from there", goOn),
        ];
  const editor = element(
    "div",
    "editor",
    area,
    element("div", "tools", ...ways, button("Cancel", "Cancel: keep it as it was", cancel)),
  );
  item.querySelectorAll(".text, .tokens, .tools").forEach((part) => part.remove());
  item.append(editor);
  area.focus();
}

/** What an empty conversation shows: the model, what it can do, and how to get another. */
export function drawWelcome(send) {
  const { model, store, routing } = state;
  const isEmpty = !store.current.root.length;
  $("welcome").hidden = !isEmpty;
  if (!isEmpty || !model) return;
  const { meta } = model;
  const size = meta.n_params >= 1e9 ? `${(meta.n_params / 1e9).toFixed(1)} B` : `${(meta.n_params / 1e6).toFixed(1)} M`;
  const [router] = routing.routers ?? [];
  const experts = router
    ? `, ${routing.routers.length} layers with ${router.n_expert} experts, of which ${router.n_used} process each token`
    : "";
  const parts = [
    element("h2", "", model.id),
    element("p", "quiet", `${size} parameters${experts}; a context of ${count(model.max_model_len)} tokens.`),
  ];
  if (meta.embedded) {
    parts.push(
      element(
        "p",
        "",
        "This tiny model is built into the program, for a first try. It tells simple stories, writes rhymes, makes " +
          "small talk and explains everyday things, in simple English. It is not an assistant: it knows little, adds " +
          "badly, and is often wrong beyond that.",
      ),
    );
  }
  if (meta.has_template === false) {
    parts.push(
      element(
        "p",
        "failed",
        "This model can only continue text: it has no chat template. Choose an “instruct” model to chat.",
      ),
    );
  } else {
    const examples = meta.embedded
      ? [
          "Tell me a story about a fox who lost his hat",
          "Why is the sky blue?",
          "Write a rhyme about a cat",
          "Who are you?",
        ]
      : [
          ...(router ? ["Explain how a mixture-of-experts model works"] : ["Explain how a language model works"]),
          "Write a Python function that finds the primes below n",
          "What should I ask you?",
        ];
    const list = element(
      "ul",
      "examples",
      ...examples.map((text) =>
        element(
          "li",
          "",
          button(text, `Send: ${text}`, () => send(text)),
        ),
      ),
    );
    parts.push(list);
  }
  if (router) parts.push(element("p", "quiet", "“Experts” above shows which of them process an answer."));
  parts.push(element("h3", "", meta.embedded ? "A real model" : "Another model"));
  parts.push(
    element("p", "", "Download a model, and start the server with it:"),
    element(
      "pre",
      "",
      element(
        "code",
        "",
        "moebius pull Qwen/Qwen3-4B-GGUF:Q4_K_M\nmoebius serve -m Qwen/Qwen3-4B-GGUF:Q4_K_M",
      ),
    ),
    element(
      "p",
      "quiet",
      "GGUF files and folders of safetensors work too: ",
      element("code", "", "moebius serve -m PATH"),
      ". Models that LM Studio or llama.cpp have downloaded are used in place.",
    ),
  );
  $("welcome").replaceChildren(...parts);
}
