// Text files that a message carries: dropped, pasted or picked. They are read here and become part of the message's
// text.

import { $, button, count, element } from "./dom.js";
import { state } from "./state.js";

const MAX_FILE = 1 << 20; // bytes
const MAX_FILES = 10;

/** `[{name, text}]` for the next message. */
let files = [];

/** The message with its files behind it, each in a fence that nothing in it can close. */
export function withFiles(text) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [text, ...parts].filter((part) => part.trim()).join("\n\n");
}

export const hasFiles = () => files.length > 0;

export function clearFiles() {
  files = [];
  draw();
}

async function take(list) {
  for (const file of list) {
    if (files.length >= MAX_FILES) return state.notice(`A message can have at most ${MAX_FILES} files.`);
    if (file.size > MAX_FILE)
      return state.notice(`${file.name} has ${count(file.size)} bytes, at most ${count(MAX_FILE)} are allowed.`);
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError("not text");
      files.push({ name: file.name, text });
    } catch {
      return state.notice(`${file.name} is not a text file: only text is supported.`);
    }
  }
  state.notice("");
  draw();
  $("input").focus();
}

function draw() {
  const chips = files.map((file) => {
    const remove = button("✕", `Remove ${file.name}`, () => ((files = files.filter((f) => f !== file)), draw()));
    remove.classList.add("icon");
    return element("li", "", `${file.name} · ${count(file.text.length)} characters`, remove);
  });
  $("files").replaceChildren(...chips);
  $("files").hidden = !files.length;
}

export function startFiles() {
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const main = document.querySelector("main");
  main.addEventListener("dragover", (event) => {
    if (hasFiles(event)) (event.preventDefault(), main.classList.add("dropping"));
  });
  main.addEventListener(
    "dragleave",
    (event) => (event.relatedTarget && main.contains(event.relatedTarget)) || main.classList.remove("dropping"),
  );
  main.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    main.classList.remove("dropping");
    take([...event.dataTransfer.files]);
  });
  $("input").addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (pasted.length) (event.preventDefault(), take(pasted));
  });
  $("attach").addEventListener("click", () => $("pick").click());
  $("pick").addEventListener("change", () => (take([...$("pick").files]), ($("pick").value = "")));
}
