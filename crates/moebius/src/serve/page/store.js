// Conversations as trees, kept in this browser. A message's children are the ways the conversation went on from it; the
// tree remembers which way was looked at last. Knows nothing of the page and the server.

const CONVERSATIONS = "moebius.conversations";
const SETTINGS = "moebius.settings";

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

/** False when the browser's room is used up. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

export class Store {
  constructor() {
    const saved = read(CONVERSATIONS, { list: [], current: null });
    /** Newest first: `{id, name, system, nodes: {id: node}, root: [ids], shown}`. */
    this.list = saved.list;
    this.settings = read(SETTINGS, { sampling: {}, thinking: "", key: "" });
    this.current = this.list.find((c) => c.id === saved.current) ?? this.list[0] ?? this.create();
  }

  save() {
    return write(CONVERSATIONS, { list: this.list, current: this.current.id });
  }

  saveSettings() {
    return write(SETTINGS, this.settings);
  }

  create() {
    const empty = this.list.find((c) => !c.root.length);
    const conversation = empty ?? { id: newId(), name: "", system: "", nodes: {}, root: [], shown: 0 };
    this.list = [conversation, ...this.list.filter((c) => c !== conversation)];
    this.current = conversation;
    return conversation;
  }

  remove(conversation) {
    this.list = this.list.filter((c) => c !== conversation);
    if (this.current === conversation) this.current = this.list[0] ?? this.create();
  }

  clear() {
    this.list = [];
    this.create();
  }
}

/** Adds a message below `parent` (null: at the top) and shows it. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent: parent?.id ?? null, children: [], shown: 0, ...message };
  conversation.nodes[node.id] = node;
  const siblings = siblingsOf(conversation, node);
  siblings.push(node.id);
  show(conversation, node);
  return node;
}

/** The messages beside a message, itself included. */
export function siblingsOf(conversation, node) {
  return node.parent === null ? conversation.root : conversation.nodes[node.parent].children;
}

/** Makes a message part of the path that is shown. */
export function show(conversation, node) {
  const place = siblingsOf(conversation, node).indexOf(node.id);
  if (node.parent === null) conversation.shown = place;
  else conversation.nodes[node.parent].shown = place;
}

/** The path that is shown, from the first message on. */
export function path(conversation) {
  const out = [];
  for (let ids = conversation.root, shown = conversation.shown; ids.length; ) {
    const node = conversation.nodes[ids[Math.min(shown, ids.length - 1)]];
    out.push(node);
    ids = node.children;
    shown = node.shown;
  }
  return out;
}

/** The messages before a message. */
export function before(conversation, node) {
  const out = [];
  for (let id = node.parent; id !== null; id = conversation.nodes[id].parent) out.unshift(conversation.nodes[id]);
  return out;
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}
