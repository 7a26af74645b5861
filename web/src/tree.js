// A conversation is a tree of messages. A message's children are the ways the conversation went on from it; the tree
// remembers which way was shown last. Knows nothing of the page, the browser's storage and the server.

import { checkedMade } from "./made.js";

/** An empty conversation. */
export function conversation() {
  const now = Date.now();
  return {
    id: newId(),
    name: "",
    system: "",
    nodes: {},
    root: [],
    shown: 0,
    updated: now,
    edited: { name: 0, system: 0 },
  };
}

/** Adds a message below `parent` (null: at the top) and shows it. */
export function add(conversation, parent, message) {
  const node = { id: newId(), parent: parent?.id ?? null, children: [], shown: 0, at: Date.now(), ...message };
  conversation.nodes[node.id] = node;
  siblingsOf(conversation, node).push(node.id);
  show(conversation, node);
  return node;
}

/** Takes back a message that has nothing below it. */
export function takeBack(conversation, node) {
  const siblings = siblingsOf(conversation, node);
  siblings.splice(siblings.indexOf(node.id), 1);
  delete conversation.nodes[node.id];
  if (siblings.length) show(conversation, conversation.nodes[siblings.at(-1)]);
}

/** The messages next to a message, itself included. */
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
  for (let ids = conversation.root, shown = conversation.shown; ids.length;) {
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
  for (let id = node.parent; id !== null; id = conversation.nodes[id].parent) out.push(conversation.nodes[id]);
  return out.reverse();
}

/**
 * Takes what `theirs` has and `ours` has not into `ours`: messages are never taken away, the newer text of a message
 * wins, and the newer name. What is shown stays as it is, and so does the place of every message that `ours` has: of two
 * trees that place messages otherwise a tree comes out.
 */
export function merge(ours, theirs) {
  const known = new Set(Object.keys(ours.nodes));
  const fresh = (ids) => ids.filter((id) => !known.has(id));
  // Ids of ours move along where theirs come first among children.
  const shown = (ids, shown) => Math.max(0, Math.min(shown, ids.length - 1));
  for (const node of Object.values(theirs.nodes)) {
    const own = ours.nodes[node.id];
    if (!own) {
      ours.nodes[node.id] = { ...structuredClone(node), children: fresh(node.children) };
      continue;
    }
    const place = { parent: own.parent, shown: shown(own.children, own.shown) };
    const children = [...own.children, ...fresh(node.children)];
    if ((node.at ?? 0) > (own.at ?? 0)) Object.assign(own, structuredClone(node));
    Object.assign(own, place, { children });
  }
  ours.shown = shown(ours.root, ours.shown);
  ours.root = [...ours.root, ...fresh(theirs.root)];
  ours.edited ??= { name: 0, system: 0 };
  for (const field of ["name", "system"]) {
    const at = theirs.edited?.[field] ?? 0;
    if (at > ours.edited[field] || (!ours[field] && theirs[field])) {
      ours[field] = theirs[field];
      ours.edited[field] = at;
    }
  }
  ours.updated = Math.max(ours.updated ?? 0, theirs.updated ?? 0);
  return ours;
}

const ID = /^[0-9a-f]{16}$/;
/** Images that a browser draws and runs nothing of. */
const IMAGE = /^data:image\/(?:png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const MAX_ID = 200; // characters of an id that another program gave
const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);
const index = (value) => (Number.isSafeInteger(value) && value >= 0 ? value : 0);
const isObject = (value) => typeof value === "object" && value !== null;

/**
 * An id of ours for the id of another program: the same one each time, so that a file imported twice is one
 * conversation. Null where there is none.
 */
function ownId(id, scope) {
  if (typeof id === "number") id = String(id);
  if (typeof id !== "string" || !id || id.length > MAX_ID) return null;
  return ID.test(id) ? id : hashOf(`${scope}\n${id}`);
}

/** 64 bits of a text in hexadecimal digits, well mixed. */
function hashOf(text) {
  let [a, b] = [0xdeadbeef, 0x41c6ce57];
  for (let i = 0; i < text.length; i++) {
    a = Math.imul(a ^ text.charCodeAt(i), 2654435761);
    b = Math.imul(b ^ text.charCodeAt(i), 1597334677);
  }
  a = Math.imul(a ^ (a >>> 16), 2246822507) ^ Math.imul(b ^ (b >>> 13), 3266489909);
  b = Math.imul(b ^ (b >>> 16), 2246822507) ^ Math.imul(a ^ (a >>> 13), 3266489909);
  return [a, b].map((half) => (half >>> 0).toString(16).padStart(8, "0")).join("");
}

/**
 * A conversation from a file or an older page: only what belongs to one, or null where the value is none. Ids of other
 * programs become ours; one without an id gets a new one. `dropped` counts the messages that are left out.
 */
export function checked(value, dropped = { messages: 0 }) {
  if (!isObject(value) || !isObject(value.nodes)) return null;
  const out = { ...conversation(), name: text(value.name).slice(0, 200), system: text(value.system) };
  out.id = ownId(value.id, "") ?? out.id;
  const scope = out.id;
  out.updated = number(value.updated) || Date.now();
  out.edited = { name: number(value.edited?.name), system: number(value.edited?.system) };
  const isKnown = (id) => ownId(id, scope) !== null && Object.hasOwn(value.nodes, id);
  const ids = (list) => (Array.isArray(list) ? list.filter(isKnown) : []);
  // From the top down, so that every message has one parent and none is its own ancestor.
  const queue = ids(value.root).map((id) => [id, null]);
  for (const [given, parent] of queue) {
    const node = value.nodes[given];
    const id = ownId(given, scope);
    if (out.nodes[id] || !isObject(node) || !["user", "assistant"].includes(node.role)) continue;
    const own = { id, parent, children: [], shown: index(node.shown), at: number(node.at), role: node.role };
    own.content = text(node.content);
    for (const name of ["reasoning", "failed", "summary"]) if (node[name]) own[name] = text(node[name]);
    const images = (Array.isArray(node.images) ? node.images : []).filter((uri) => IMAGE.test(text(uri)));
    if (images.length) own.images = images;
    if (node.usage) {
      const { prompt, generated, cached } = node.usage;
      own.usage = { prompt: number(prompt), generated: number(generated), cached: number(cached) };
    }
    if (node.speed) own.speed = number(node.speed);
    const made = checkedMade(node.made);
    if (made.length) own.made = made;
    out.nodes[id] = own;
    (parent === null ? out.root : out.nodes[parent].children).push(id);
    for (const child of ids(node.children)) queue.push([child, id]);
  }
  out.shown = index(value.shown);
  dropped.messages += Math.max(0, Object.keys(value.nodes).length - Object.keys(out.nodes).length);
  return out;
}

/**
 * The conversations of a list from a file, `{conversations, refused, messages}`: `refused` says how many were, by
 * reason, and `messages` how many messages of the others were left out.
 */
export function taken(list) {
  const out = { conversations: [], refused: new Map(), messages: 0 };
  const refuse = (why) => out.refused.set(why, (out.refused.get(why) ?? 0) + 1);
  for (const value of list) {
    const dropped = { messages: 0 };
    const conversation = checked(value, dropped);
    if (!conversation) refuse(isObject(value) ? "without messages" : "not a conversation");
    else if (!conversation.root.length) {
      refuse(Object.keys(value.nodes).length ? "whose messages form no tree" : "without messages");
    } else {
      out.conversations.push(conversation);
      out.messages += dropped.messages;
    }
  }
  return out;
}

/** A conversation as it was stored, where it is a tree; else what `checked` makes of it. */
export function sound(value) {
  const seen = new Set();
  const isIndex = (n) => n === index(n);
  const queue = [...value.root];
  for (const id of queue) {
    const node = value.nodes[id];
    if (!node || seen.has(id) || !isIndex(node.shown)) return checked(value);
    seen.add(id);
    for (const child of node.children) queue.push(child);
  }
  return isIndex(value.shown) ? value : checked(value);
}

/** What a conversation is called after its first message: its first line without marks of markdown. */
export function nameOf(content) {
  const line = content.split("\n").find((line) => line.trim()) ?? "";
  return line
    .trim()
    .slice(0, 500)
    .replace(/^\s*(?:[#>]+\s*|[*+-]\s+)*/, "")
    .replace(/[*_`]{1,3}(\S(?:.*?\S)?)[*_`]{1,3}/g, "$1")
    .trim()
    .slice(0, 60);
}

/** 64 random bits in hexadecimal digits. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}
