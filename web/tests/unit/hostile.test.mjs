// What strangers write, a model or a file of conversations, neither freezes the page nor breaks its tree.

import assert from "node:assert/strict";
import test from "node:test";

/** As much of a document as the modules need. */
class Element {
  childNodes = [];
  constructor(tag) {
    this.tagName = tag.toUpperCase();
  }
  append(...children) {
    for (const child of children) this.childNodes.push(child);
  }
  replaceChildren(...children) {
    this.childNodes = children;
  }
  setAttribute() {}
  addEventListener() {}
  get children() {
    return this.childNodes.filter((child) => child instanceof Element);
  }
}
globalThis.document = { createElement: (tag) => new Element(tag), getElementById: () => new Element("x") };

const { render } = await import("../../src/markdown.js");
const { checked, merge, nameOf, path, sound } = await import("../../src/tree.js");

/** The tree as text: `tag(children)`; buttons to copy code are left out. */
function shape(node) {
  if (!(node instanceof Element)) return String(node);
  if (node.tagName === "BUTTON") return "";
  return `${node.tagName.toLowerCase()}(${node.childNodes.map(shape).join("")})`;
}

function drawn(source) {
  const node = new Element("x");
  render(source, node);
  return node.childNodes.map(shape).join("");
}

/** Time of the processor that `act` takes, in milliseconds: machines are busy. */
function took(act) {
  const since = process.cpuUsage();
  act();
  const { user, system } = process.cpuUsage(since);
  return Math.round((user + system) / 1000);
}

const tests = {
  "text is drawn as it is meant"() {
    const cases = [
      ["a **b *c* d** e", "p(a strong(b em(c) d) e)"],
      ["__a__ _b_ c_d_e **x", "p(strong(a) em(b) c_d_e **x)"],
      ["~~a~~ 2 * 3 * 4 *a**", "p(del(a) 2 * 3 * 4 *a**)"],
      ["`a` ``b ` c`` `d`` e", "p(code(a) code(b ` c) `d`` e)"],
      ["\\`a` \\*b* `\\`", "p(`acode(\\*b*)`)"],
      ["[a](https://b.org) [c](<https://d.org> \"t\") ![e](https://f.org)", "p(a(a) a(c) a(picture: e))"],
      ["[a](b c [d] (e", "p([a](b c [d] (e)"],
      ["see https://a.org/b. and http://", "p(see a(https://a.org/b). and http://)"],
      ["\\(a\\) $b$ $$c$$ costs $5 or $6 $ d$", "p(\\(a\\) $b$ $$c$$ costs $5 or $6 $ d$)"],
      ["# a # b ##", "h3(a # b)"],
      ["#a\n# \n###### b", "p(#a)h3()h6(b)"],
      ["- a\n- [x] b\n  1. c", "ul(li(a)li(input()bol(li(c))))"],
      ["> a\n> - b", "blockquote(p(a)ul(li(b)))"],
      ["|a|b|\n|-|:-:|\n|c|`d`|", "table(thead(tr(th(a)th(b)))tbody(tr(td(c)td(code(d)))))"],
      ["```js\na\n```\nb", "div(span(span(js))pre(code(a)))p(b)"],
      ["~~~\na\n```", "div(span(span())pre(code(a\n```)))"],
      ["a\n---\n- - -", "p(a)hr()hr()"],
      [
        "a[^x] b[^1] c[^x] d[^no]\n\n[^1]: one\n[^x]: *two*\n  and more\n\nb",
        "p(asup(a(1)) bsup(a(2)) csup(a(1)) d[^no])p(b)ol(li(em(two)\nand more a(↩))li(one a(↩)))",
      ],
      [
        "[^a]: see[^b]\n[^b]: see[^a] and[^b]\n[^a]: again",
        "ol(li(seesup(a(2)) a(↩))li(seesup(a(1)) andsup(a(2)) a(↩)))",
      ],
      ["```\n[^1]: code\n```\n[^1]", "div(span(span())pre(code([^1]: code)))p([^1])"],
    ];
    for (const [source, expected] of cases) assert.equal(drawn(source), expected, source);
  },

  "a text's drawing takes time linear in it"() {
    const runs = (mark) => (n) => {
      let text = "";
      for (let i = 1; text.length < n; i++) text += mark.repeat(i) + "a";
      return text;
    };
    const again = (unit) => (n) => unit.repeat(n / unit.length);
    const between = (open, fill, close) => (n) => open + fill.repeat(n) + close;
    const texts = [
      ...["`", "*", "_", "~", "$", "#", "[", "!", "\\", "|", ">", "-"].flatMap((mark) => [runs(mark), again(mark)]),
      ...["**a", "**a ", "__a ", "*a ", "_a ", "~~a", "`a", "``a", "$a", "$a ", "$$a", "\\(", "\\[", "\\(a\\"].map(again),
      ...["[", "![", "[a", "[a](", "[a](b", "[](<", "](", "[a](b c", "https://", "https://a", "http://.", "\\`"].map(again),
      ...["- a\n", "- ", "1. ", "> ", "|a", "|-", "|a|b|\n", "a|b\n-|-\n", "\\[\n", "$$\n", "```\n", "```a\n~~~\n"].map(again),
      ...["[^a]", "[^a]:", "[^a]: b\n", "[^a]:[^a]\n", "[^a]\n\n[^a]:\n", "[^a]: b\n  c\n", "[^", "[^a"].map(again),
      (n) => Array.from({ length: n / 20 }, (_, i) => `[^${i}]: [^${i + 1}][^0]\n`).join(""),
      ...["\\begin{align}\n", "# a\n", "a\n\n", "-\n\n", "- a\n\n", "* [ ] a\n", " *", "* ", "a  \n", "\u2028"].map(again),
      between("# a", " ", "b"),
      between("# a", " #", "b"),
      between("#", " ", "\u2028"),
      between("a", " ", "b"),
      between("- ", " ", "a\u2028b"),
      between("> ", " ", "a\u2028b"),
      between("a|b\n", " ", "x|"),
      between("a|b\n|", " ", "x"),
      between("a|b\n|", "-", "x"),
      between("```", " ", "`"),
      between("~~~", "~", "`"),
      between("- -", " ", "x"),
      between("http://", "!", ""),
      between("[a](", " ", "b)"),
      between("[a](b ", " ", ""),
      between("$", "\\$", ""),
      between("`", "\\`", "``"),
    ];
    drawn(again("**a** [b](c) `d` $e$ ")(20_000));
    for (const text of texts) {
      const source = text(100_000);
      const ms = took(() => drawn(source));
      assert.ok(ms < 1000, `${JSON.stringify(source.slice(0, 20))}: ${ms} ms`);
    }
  },

  "many blocks and children fit"() {
    assert.equal(drawn("a\n\n".repeat(200_000)).length, 4 * 200_000);
    assert.ok(drawn("- a\n".repeat(150_000)).startsWith("ul(li(a)li(a)"));
  },

  "what is merged is a tree"() {
    const [A, B, C] = ["000000000000000a", "000000000000000b", "000000000000000c"];
    const node = (id, children, more) => ({ id, role: "user", content: id, children, shown: 0, at: 1, ...more });
    const of = (root, nodes) =>
      checked({ id: "00000000000000aa", root, nodes: Object.fromEntries(nodes.map((n) => [n.id, n])) });
    const ways = [
      [of([A], [node(A, [B]), node(B, [])]), of([B], [node(B, [A]), node(A, [])])],
      [of([A], [node(A, [B]), node(B, [])]), of([B], [node(B, [A], { at: 9 }), node(A, [], { at: 9 })])],
      [of([A], [node(A, [B]), node(B, [C]), node(C, [])]), of([C], [node(C, [A]), node(A, [B]), node(B, [])])],
      [of([A], [node(A, [])]), of([B], [node(B, [A, C]), node(A, [C]), node(C, [])])],
    ];
    for (const [ours, theirs] of ways) {
      const n = new Set([...Object.keys(ours.nodes), ...Object.keys(theirs.nodes)]).size;
      const merged = merge(ours, theirs);
      const seen = new Set();
      const queue = merged.root.map((id) => [id, null]);
      for (const [id, parent] of queue) {
        assert.ok(!seen.has(id), "a message has one place");
        assert.equal(merged.nodes[id].parent, parent);
        seen.add(id);
        merged.nodes[id].children.forEach((child) => queue.push([child, id]));
      }
      assert.equal(seen.size, n, "no message is lost");
      assert.ok(path(merged).length <= n);
      assert.equal(sound(merged), merged);
    }
    // What follows a message that both have.
    const [ours, theirs] = [of([A], [node(A, [B]), node(B, [])]), of([A], [node(A, [C]), node(C, [])])];
    assert.deepEqual(merge(ours, theirs).nodes[A].children, [B, C]);
    assert.deepEqual(path(ours).map((n) => n.id), [A, B]);
  },

  "what was stored is walked to its end"() {
    const [A, B] = ["000000000000000a", "000000000000000b"];
    const node = (id, children, more) => ({ id, role: "user", content: id, children, shown: 0, at: 1, ...more });
    const id = "00000000000000aa";
    for (const stored of [
      { id, nodes: { [A]: node(A, [B]), [B]: node(B, [A]) }, root: [A], shown: 0 },
      { id, nodes: { [A]: node(A, [A]) }, root: [A], shown: 0 },
      { id, nodes: { [A]: node(A, []) }, root: [A, A], shown: 0 },
      { id, nodes: { [A]: node(A, [B]) }, root: [A], shown: 0 },
      { id, nodes: { [A]: node(A, []) }, root: [A], shown: -1 },
      { id, nodes: { [A]: node(A, [B], { shown: -3 }), [B]: node(B, [], { shown: 0.5 }) }, root: [A], shown: 1e300 },
    ]) {
      const found = path(sound(stored));
      assert.ok(found.length >= 1 && found.length <= 2 && found.every((n) => n.role === "user"));
      assert.ok(path(checked(stored)).every((n) => n.role === "user"));
    }
    const whole = { id, nodes: { [A]: node(A, [], { model: "kept" }) }, root: [A], shown: 0 };
    assert.equal(sound(whole), whole);
  },

  "large files are taken in at once"() {
    const hex = (n) => n.toString(16).padStart(16, "0");
    const file = (half) => {
      const nodes = {};
      for (let n = 1; n <= 2 * half; n++)
        nodes[hex(n)] = { id: hex(n), role: "user", content: "", children: n < half ? [hex(n + 1)] : [], shown: 0, at: 1 };
      const root = [hex(1), ...Array.from({ length: half }, (_, n) => hex(half + 1 + n))];
      return { id: hex(5), nodes, root, shown: 0 };
    };
    const taken = (half) => {
      const value = file(half);
      return took(() => assert.equal(path(merge(checked(value), checked(value))).length, half));
    };
    const named = (n) => took(() => assert.ok(nameOf("*a ".repeat(n)).length <= 60));
    // Eight times as much takes about eight times as long, also on a busy machine; squares would take 64 times.
    for (const [time, n, short] of [[taken, 100_000, 3000], [named, 300_000, 500]]) {
      const part = time(n / 8);
      const whole = time(n);
      assert.ok(whole < short || whole < 32 * part, `${whole} ms, an eighth ${part} ms`);
    }
  },
};

for (const [name, run] of Object.entries(tests)) test(name, run);
