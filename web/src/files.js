// Files that a message carries: dropped, pasted or picked. Text files are read here and become part of the message's
// text; images are made small enough to be sent with every turn, and stay apart.

import { $, button, count, element, image } from "./dom.js";
import { state } from "./state.js";

const MAX_FILE = 1 << 20; // bytes
const MAX_FILES = 10;
const MAX_SIDE = 2048; // pixels of an image; models see no more
const MAX_KEPT = 1 << 19; // bytes of an image's file that is sent as it is
const KEPT = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/** `[{name, text}]` or `[{name, uri}]` for the next message. */
let files = [];

/** The message with its files behind it, each in a fence that nothing in it can close. */
export function withFiles(text) {
  const texts = files.filter((file) => file.text !== undefined);
  const parts = texts.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [text, ...parts].filter((part) => part.trim()).join("\n\n");
}

export const hasFiles = () => files.length > 0;

/** The images of the next message, as data URIs. */
export const imagesOf = () => files.filter((file) => file.uri).map((file) => file.uri);

/** Puts images back, of a message that was not answered. */
export function giveImages(uris) {
  files = uris.map((uri, i) => ({ name: `image ${i + 1}`, uri }));
  draw();
}

export function clearFiles() {
  files = [];
  draw();
}

/** An image as a data URI: its file, or what is seen of it where that is large or in another format. */
async function uriOf(file) {
  const bitmap = await createImageBitmap(file);
  if (KEPT.includes(file.type) && file.size <= MAX_KEPT) {
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height].map((n) => Math.max(1, Math.round(n * scale)));
  const context = canvas.getContext("2d");
  // JPEG has no transparency.
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

async function take(list) {
  for (const file of list) {
    if (files.length >= MAX_FILES) return state.notice(`A message can have at most ${MAX_FILES} files.`);
    if (file.type.startsWith("image/") && file.type !== "image/svg+xml") {
      if (!state.model?.meta.sees_images) return state.notice(`${file.name} is an image: this model sees none.`);
      try {
        files.push({ name: file.name, uri: await uriOf(file) });
      } catch {
        return state.notice(`${file.name} is an image that this browser cannot read.`);
      }
      continue;
    }
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
    if (file.uri) return element("li", "", image(file.uri, file.name), remove);
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
  for (const [attach, pick] of [["attach", "pick"], ["attach-image", "pick-image"]]) {
    $(attach).addEventListener("click", () => $(pick).click());
    $(pick).addEventListener("change", () => (take([...$(pick).files]), ($(pick).value = "")));
  }
}
