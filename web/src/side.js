// The list of conversations: search, names, delete with undo, files out and in.

import { $, button, count, download, element, toast } from "./dom.js";
import { markdownOf } from "./export.js";
import { state } from "./state.js";
import { taken } from "./tree.js";

const FORMAT = "moebius-conversations";
/** Id of the conversation whose name is being written. */
let renaming = null;

const nameOf = (conversation) => conversation.name || "New conversation";

/** Where a conversation holds the words, as a piece of its text; null where it does not. */
function find(conversation, words) {
  const has = (text) => words.every((word) => text.toLowerCase().includes(word));
  if (has(nameOf(conversation))) return "";
  for (const { content } of Object.values(conversation.nodes)) {
    if (!has(content)) continue;
    const at = content.toLowerCase().indexOf(words[0]);
    return `${at > 20 ? "…" : ""}${content.slice(Math.max(0, at - 20), at + 60).replaceAll("\n", " ")}`;
  }
  return null;
}

/** The day of a conversation, in words. */
function dayOf(conversation) {
  const days = Math.floor((new Date().setHours(24, 0, 0, 0) - (conversation.updated ?? 0)) / 86_400_000);
  return days < 1 ? "Today" : days < 2 ? "Yesterday" : days < 7 ? "This week" : days < 31 ? "This month" : "Earlier";
}

export function drawSide(choose) {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const items = [];
  let day = null;
  for (const conversation of state.store.list) {
    const found = words.length ? find(conversation, words) : "";
    if (found === null) continue;
    if (dayOf(conversation) !== day) {
      day = dayOf(conversation);
      items.push(element("li", "day", day));
    }
    items.push(item(conversation, found, choose));
  }
  if (!items.length) items.push(element("li", "day", "No matches"));
  $("conversations").replaceChildren(...items);
}

function item(conversation, found, choose) {
  const isCurrent = conversation === state.store.current;
  const out = element("li", isCurrent ? "current" : "");
  const name = nameOf(conversation);
  if (renaming === conversation.id) return (out.append(nameField(conversation)), out);
  const open = button("", name, () => choose(conversation));
  open.append(element("span", "", name), ...(found ? [element("span", "found", found)] : []));
  open.className = "name";
  if (isCurrent) open.setAttribute("aria-current", "true");
  const rename = button(
    "✎",
    `Rename “${name}”`,
    () => ((renaming = conversation.id), drawSide(choose), $("rename").select()),
  );
  const remove = button("✕", `Delete “${name}”`, () => removeAll([conversation], `Deleted “${name}”.`));
  for (const small of [rename, remove]) small.classList.add("icon");
  out.append(open, rename, remove);
  return out;
}

function nameField(conversation) {
  const field = element("input");
  Object.assign(field, { id: "rename", value: conversation.name, maxLength: 200 });
  field.setAttribute("aria-label", "Name of the conversation");
  const end = (keep) => {
    if (renaming !== conversation.id) return;
    renaming = null;
    if (keep && field.value.trim()) Object.assign(conversation, { name: field.value.trim() }).edited.name = Date.now();
    state.changed(conversation);
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter") (event.preventDefault(), end(true));
    if (event.key === "Escape") (event.stopPropagation(), end(false));
  });
  field.addEventListener("blur", () => end(true));
  return field;
}

/** Deletes conversations, and keeps them at hand for a moment. */
export async function removeAll(conversations, what) {
  const kept = conversations.filter((c) => c.root.length || c.system);
  if (conversations.some((c) => state.running?.conversation === c)) state.running.abort.abort();
  const current = state.store.current;
  const removed = state.store.remove(conversations);
  state.changed(null);
  if (kept.length)
    toast(what, "Undo", async () => {
      await state.store.take(kept);
      if (kept.includes(current)) state.store.choose(current);
      await state.changed(null);
    });
  await removed;
}

function exportFile(conversations, name) {
  const list = conversations.filter((c) => c.root.length);
  download(`${name}.json`, JSON.stringify({ format: FORMAT, version: 1, conversations: list }, null, 1));
}

/** `3 conversations`. */
const several = (n, what) => `${count(n)} ${what}${n === 1 ? "" : "s"}`;

async function importFile(file) {
  let data = null;
  try {
    data = JSON.parse(await file.text());
  } catch {
    // Told below.
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations))
    return state.notice(`${file.name} does not hold conversations: import a file that Export wrote.`);
  const { conversations, refused, messages } = taken(data.conversations);
  await state.store.take(conversations);
  if (conversations.length) state.store.choose(state.store.list.find((c) => c.id === conversations[0].id));
  await state.changed(null);
  const n = [...refused.values()].reduce((sum, n) => sum + n, 0);
  const why = [...refused].map(([why, n]) => `${count(n)} ${why}`).join(", ");
  const parts = [
    `Imported ${several(conversations.length, "conversation")}.`,
    ...(n ? [`Refused ${several(n, "conversation")}: ${why}.`] : []),
    ...(messages ? [`Left out ${several(messages, "message")} that belong to no user or model, or to no branch.`] : []),
  ];
  if (n || messages) state.notice(parts.join(" "));
  else toast(parts[0]);
}

export function startSide(choose) {
  $("search").addEventListener("input", () => drawSide(choose));
  $("search").addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !$("search").value) return;
    event.stopPropagation();
    $("search").value = "";
    drawSide(choose);
  });
  const today = () => new Date().toISOString().slice(0, 10);
  $("export").addEventListener("click", () => exportFile(state.store.list, `conversations-${today()}`));
  $("export-one").addEventListener("click", () => exportFile([state.store.current], `conversation-${today()}`));
  $("export-markdown").addEventListener("click", () =>
    download(`conversation-${today()}.md`, markdownOf(state.store.current), "text/markdown"),
  );
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", async () => {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    if (file) await importFile(file);
  });
  $("forget").addEventListener("click", () => {
    const { length } = state.store.list.filter((c) => c.root.length);
    removeAll([...state.store.list], `Deleted ${length} ${length === 1 ? "conversation" : "conversations"}.`);
  });
}
