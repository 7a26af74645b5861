// A conversation is a tree of messages. A message's children are the ways the conversation went on from it; the tree
// remembers which way was shown last. Knows nothing of the page, the browser's storage and the server.

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
  for (let id = node.parent; id !== null; id = conversation.nodes[id].parent) out.unshift(conversation.nodes[id]);
  return out;
}

/**
 * Takes what `theirs` has and `ours` has not into `ours`: messages are never taken away, the newer text of a message
 * wins, and the newer name. What is shown stays as it is.
 */
export function merge(ours, theirs) {
  // Ids of ours move along where theirs come first among children.
  const lead = (conversation, ids, shown) => ids[Math.min(shown, ids.length - 1)];
  const union = (a, b) => [...a, ...b.filter((id) => !a.includes(id))];
  for (const node of Object.values(theirs.nodes)) {
    const own = ours.nodes[node.id];
    if (!own) {
      ours.nodes[node.id] = structuredClone(node);
      continue;
    }
    const [children, shown] = [union(own.children, node.children), lead(ours, own.children, own.shown)];
    if ((node.at ?? 0) > (own.at ?? 0)) Object.assign(own, structuredClone(node));
    own.children = children;
    own.shown = Math.max(0, children.indexOf(shown));
  }
  const first = lead(ours, ours.root, ours.shown);
  ours.root = union(ours.root, theirs.root);
  ours.shown = Math.max(0, ours.root.indexOf(first));
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
const text = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : 0);

/** A conversation from a file or an older page: only what belongs to one, or null where the tree is none. */
export function checked(value) {
  if (typeof value !== "object" || !value || !ID.test(value.id) || typeof value.nodes !== "object") return null;
  const out = { ...conversation(), id: value.id, name: text(value.name).slice(0, 200), system: text(value.system) };
  out.updated = number(value.updated) || Date.now();
  out.edited = { name: number(value.edited?.name), system: number(value.edited?.system) };
  const ids = (list) => (Array.isArray(list) ? list.filter((id) => ID.test(id) && Object.hasOwn(value.nodes, id)) : []);
  // From the top down, so that every message has one parent and none is its own ancestor.
  const queue = ids(value.root).map((id) => [id, null]);
  while (queue.length) {
    const [id, parent] = queue.shift();
    const node = value.nodes[id];
    if (out.nodes[id] || !node || !["user", "assistant"].includes(node.role)) continue;
    const own = { id, parent, children: [], shown: number(node.shown), at: number(node.at), role: node.role };
    own.content = text(node.content);
    for (const name of ["reasoning", "failed", "summary"]) if (node[name]) own[name] = text(node[name]);
    if (node.usage) {
      const { prompt, generated, cached } = node.usage;
      own.usage = { prompt: number(prompt), generated: number(generated), cached: number(cached) };
    }
    if (node.speed) own.speed = number(node.speed);
    out.nodes[id] = own;
    (parent === null ? out.root : out.nodes[parent].children).push(id);
    queue.push(...ids(node.children).map((child) => [child, id]));
  }
  out.shown = number(value.shown);
  return out;
}

/** What a conversation is called after its first message: its first line without marks of markdown. */
export function nameOf(content) {
  const line = content.split("\n").find((line) => line.trim()) ?? "";
  return line
    .replace(/^\s*(?:[#>]+\s*|[*+-]\s+)*/, "")
    .replace(/[*_`]{1,3}(\S(?:.*?\S)?)[*_`]{1,3}/g, "$1")
    .trim()
    .slice(0, 60);
}

/** 64 random bits in hexadecimal digits. */
export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (b) => b.toString(16).padStart(2, "0")).join("");
}
