// Conversations as trees: branches, merges of two tabs, and what an imported file may hold.

import assert from "node:assert/strict";
import test from "node:test";
import { markdownOf } from "../../src/export.js";
import { add, before, checked, conversation, merge, nameOf, path, show, takeBack, taken } from "../../src/tree.js";

const user = (content) => ({ role: "user", content });
const assistant = (content) => ({ role: "assistant", content });
const texts = (talk) => path(talk).map((node) => node.content);

/** A question with two answers, the first of which was asked about again. */
function branched() {
  const talk = conversation();
  const question = add(talk, null, user("q"));
  const first = add(talk, question, assistant("a1"));
  const next = add(talk, first, user("q2"));
  const second = add(talk, question, assistant("a2"));
  return { talk, question, first, next, second };
}

test("the newest branch is shown, and any other can be", () => {
  const { talk, question, first, next } = branched();
  assert.deepEqual(texts(talk), ["q", "a2"]);
  show(talk, first);
  assert.deepEqual(texts(talk), ["q", "a1", "q2"]);
  assert.deepEqual(before(talk, next), [question, first]);
});

test("a message that is taken back leaves its neighbor shown", () => {
  const { talk, second } = branched();
  takeBack(talk, second);
  assert.deepEqual(texts(talk), ["q", "a1", "q2"]);
  assert.equal(Object.keys(talk.nodes).length, 3);
});

test("a merge loses no message, takes the newer text, and leaves the shown path alone", () => {
  const { talk: ours, question, first } = branched();
  const theirs = structuredClone(ours);
  add(ours, question, assistant("ours"));
  const added = add(theirs, theirs.nodes[first.id], user("theirs"));
  Object.assign(theirs.nodes[first.id], { content: "a1, edited", at: first.at + 1 });
  Object.assign(theirs, { name: "named", edited: { name: Date.now(), system: 0 } });
  merge(ours, theirs);
  assert.deepEqual(texts(ours), ["q", "ours"]);
  assert.equal(ours.nodes[first.id].content, "a1, edited");
  assert.ok(ours.nodes[first.id].children.includes(added.id));
  assert.equal(ours.name, "named");
  const count = Object.keys(ours.nodes).length;
  merge(ours, theirs);
  assert.equal(Object.keys(ours.nodes).length, count, "a second merge adds nothing");
});

test("a file's conversation keeps what belongs to one", () => {
  const { talk } = branched();
  Object.assign(talk, { name: "talk", system: "be brief" });
  const file = JSON.parse(JSON.stringify(talk));
  assert.deepEqual(texts(checked(file)), texts(talk));
  file.nodes[file.root[0]].onload = "alert(1)";
  file.nodes.unnamed = "no message";
  file.root.push("../../secret", "unnamed", 7, null, "__proto__");
  const out = checked(file);
  assert.deepEqual(texts(out), texts(talk));
  assert.equal(JSON.stringify(out).includes("alert"), false);
  assert.equal(Object.keys(out.nodes).length, Object.keys(talk.nodes).length);
});

test("a file's messages keep images that run nothing", () => {
  const { talk } = branched();
  const file = JSON.parse(JSON.stringify(talk));
  const image = "data:image/png;base64,iVBORw0KGgo=";
  const wrong = ["https://example.com/x.png", "data:image/svg+xml;base64,PHN2Zz4=", `${image}" onerror="x`, 7, null];
  file.nodes[file.root[0]].images = [image, ...wrong];
  assert.deepEqual(path(checked(file))[0].images, [image]);
  file.nodes[file.root[0]].images = wrong;
  assert.equal(path(checked(file))[0].images, undefined);
});

test("ids of other programs become ours, the same ones each time", () => {
  const file = {
    id: "conversation-1",
    nodes: {
      "../a": { ...user("q"), children: [7] },
      7: { ...assistant("a"), children: [] },
    },
    root: ["../a"],
    shown: 0,
  };
  const [first, second] = [checked(file), checked(file)];
  assert.deepEqual(texts(first), ["q", "a"]);
  const ids = (talk) => [talk.id, ...Object.keys(talk.nodes), ...talk.root, ...path(talk).map((node) => node.id)];
  assert.deepEqual(ids(first), ids(second));
  assert.ok(ids(first).every((id) => /^[0-9a-f]{16}$/.test(id)), `${ids(first)}`);
  assert.equal(new Set(ids(first)).size, 3);
  // The same names in another conversation are other messages.
  const other = checked({ ...file, id: "conversation-2" });
  assert.ok(ids(other).every((id) => !ids(first).includes(id)));
  const [one, two] = [checked({ ...file, id: undefined }), checked({ ...file, id: undefined })];
  assert.notEqual(one.id, two.id);
  assert.deepEqual(texts(one), ["q", "a"]);
});

test("an import says how many conversations it refuses and why", () => {
  const { talk, question } = branched();
  const cut = JSON.parse(JSON.stringify(talk));
  cut.id = "cut";
  cut.nodes[question.id].role = "system";
  const system = JSON.parse(JSON.stringify(talk));
  system.nodes.extra = { role: "system", content: "", children: [] };
  system.root.push("extra");
  const { conversations, refused, messages } = taken([talk, system, cut, { id: "a", nodes: {} }, 7, null, { id: "b" }]);
  assert.equal(conversations.length, 2);
  assert.equal(messages, 1);
  assert.deepEqual([...refused].sort(), [
    ["not a conversation", 2],
    ["whose messages form no tree", 1],
    ["without messages", 2],
  ]);
});

const MADE = [{ model: "SmolLM2", seed: 1, settings: { temperature: 0.8, samplers: ["top_k"] } }];

test("an answer keeps what made it in a file, and no more than that", () => {
  const { talk, first } = branched();
  first.made = structuredClone(MADE);
  const read = () => checked(JSON.parse(JSON.stringify(talk))).nodes[first.id].made;
  assert.deepEqual(read(), MADE);
  const foreign = { messages: [1], model: "c", "on-x": 1, a: null };
  first.made.push({ model: 7 }, null, { model: "b", seed: "x", settings: foreign });
  assert.deepEqual(read(), [...MADE, { model: "b", settings: {} }]);
  first.made = [{ model: "x".repeat(999), seed: 0.5, settings: { grammar: "y".repeat(30_000) } }];
  assert.deepEqual(read(), [{ model: "x".repeat(200), settings: {} }]);
  for (const none of ["x", {}, [], 7]) {
    first.made = none;
    assert.equal(read(), undefined);
  }
});

test("a conversation becomes a document that says what made each answer", () => {
  const talk = conversation();
  Object.assign(talk, { name: "A *talk*", system: "Be brief." });
  const question = add(talk, null, user("Why?\n\n- a"));
  add(talk, question, { ...assistant("not shown") });
  const answer = { ...assistant("**Because**"), reasoning: "Hm.\n\nYes.", summary: "3 tokens", made: MADE };
  add(talk, add(talk, add(talk, question, answer), user("And?")), assistant("So."));
  assert.equal(
    markdownOf(talk),
    [
      "# A \\*talk\\*",
      "## System prompt",
      "Be brief.",
      "## User",
      "Why?\n\n- a",
      "## SmolLM2 · seed 1 · temperature 0.8",
      "> Reasoning:\n>\n> Hm.\n>\n> Yes.",
      "**Because**",
      "*3 tokens*",
      "## User",
      "And?",
      "## Model",
      "So.\n",
    ].join("\n\n"),
  );
});

test("a file's circles, strange roles and strange types end", () => {
  const { talk, question, first } = branched();
  const file = JSON.parse(JSON.stringify(talk));
  file.nodes[first.id].children.push(question.id, first.id);
  assert.equal(path(checked(file)).length, 2);
  file.nodes[question.id].role = "system";
  assert.deepEqual(checked(file).root, []);
  for (const value of [null, 7, "x", [], {}, { id: talk.id, nodes: "x" }]) assert.equal(checked(value), null);
});

test("a conversation is named after its first line, without marks", () => {
  assert.equal(nameOf("\n## **Hello** there\nmore"), "Hello there");
  assert.equal(nameOf("x".repeat(100)).length, 60);
});
