// Formulas and colors of code: the two libraries of the page, loaded when the first formula or code block is there.
// What they make of a model's text stays inert and bounded. KaTeX builds elements by itself, with everything off that
// names addresses or classes (`trust`), with bounds on length, macros and sizes, and within a share of the page's time.
// highlight.js works in a worker that is ended when it takes too long; its tree of tokens becomes spans around text
// nodes, and the HTML it could write is never read. What a library refuses is shown as it was written.

import { element } from "./dom.js";

const KATEX = "page/vendor/katex-0.19.1/";
const MAX_FORMULA = 2000; // characters
const MAX_CODE = 40_000; // characters
const FORMULA_TIME = 1000; // ms of formulas in any FORMULA_SPAN
const FORMULA_SPAN = 5000; // ms
const CODE_TIME = 1500; // ms for one block
const KEPT = 400; // formulas, and blocks of code, for the next time the same message is drawn

let onReady = () => {};
/** Sets what happens when a library has come, or colors have: messages are drawn again. */
export const whenReady = (act) => (onReady = act);

let isDue = false;
function ready() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => ((isDue = false), onReady()));
}

/** A map that forgets its oldest entries. */
class Kept extends Map {
  set(key, value) {
    super.set(key, value);
    if (this.size > KEPT) this.delete(this.keys().next().value);
    return this;
  }
}

// --- formulas ---

let katex = null;
let isLoading = false;
const formulas = new Kept();
const spent = { since: 0, ms: 0 };

function loadKatex() {
  if (isLoading) return;
  isLoading = true;
  const sheet = element("link");
  Object.assign(sheet, { rel: "stylesheet", href: `${KATEX}katex.min.css` });
  const script = element("script");
  script.src = `${KATEX}katex.min.js`;
  // Without it formulas stay as they are written.
  script.onload = () => ((katex = globalThis.katex), ready());
  document.head.append(sheet, script);
}

function formula(tex, isDisplay, source) {
  const plain = () => element("code", "tex", source);
  if (tex.length > MAX_FORMULA) return plain();
  if (!katex) return (loadKatex(), plain());
  const key = `${isDisplay}${tex}`;
  if (!formulas.has(key)) {
    const start = performance.now();
    if (start - spent.since > FORMULA_SPAN) Object.assign(spent, { since: start, ms: 0 });
    if (spent.ms > FORMULA_TIME) {
      // Its turn comes with the next span.
      spent.timer ??= setTimeout(() => ((spent.timer = undefined), ready()), FORMULA_SPAN);
      return plain();
    }
    formulas.set(key, typeset(tex, isDisplay) ?? plain());
    spent.ms += performance.now() - start;
  }
  return formulas.get(key).cloneNode(true);
}

/** The elements of a formula; null where KaTeX refuses it. */
function typeset(tex, isDisplay) {
  const node = element("span", "formula");
  try {
    katex.render(tex, node, {
      displayMode: isDisplay,
      throwOnError: true,
      strict: "ignore",
      trust: false,
      maxExpand: 300,
      maxSize: 20, // em
    });
  } catch {
    return null;
  }
  return node;
}

// --- code ---

/** Trees by language and text; null where there is none. */
const trees = new Kept();
/** The last tree of the block that is being written, `{text, language, tree}`. */
let begun = null;
let worker = null;
/** The block that the worker has, and those that wait: `{text, language, isOpen}`. */
let current = null;
let waiting = [];

function next() {
  if (current || !waiting.length) return;
  current = waiting.shift();
  worker ??= new Worker("page/highlighter.js", { type: "module" });
  worker.onmessage = ({ data }) => finish(data);
  worker.onerror = () => finish(null);
  current.timer = setTimeout(() => (worker.terminate(), (worker = null), finish(null)), CODE_TIME);
  worker.postMessage({ text: current.text, language: current.language });
}

function finish(tree) {
  const { text, language, isOpen, timer } = current;
  clearTimeout(timer);
  if (isOpen) begun = { text, language, tree };
  else trees.set(`${language}\n${text}`, tree);
  current = null;
  if (tree) ready();
  next();
}

function code(text, info, isOpen) {
  const language = info.split(/[\s,{]/)[0].toLowerCase();
  if (!language || !text || text.length > MAX_CODE) return [text];
  if (isOpen) {
    if (!current && !waiting.length) (waiting.push({ text, language, isOpen }), next());
    const isPrefix = begun?.tree && begun.language === language && text.startsWith(begun.text);
    return isPrefix ? [...coloured(begun.tree, begun.text), text.slice(begun.text.length)] : [text];
  }
  const key = `${language}\n${text}`;
  const isKnown = trees.has(key);
  const tree = trees.get(key);
  if (!isKnown) {
    trees.set(key, null);
    waiting = [...waiting.filter((block) => !block.isOpen), { text, language, isOpen }];
    next();
  }
  return tree ? coloured(tree, text) : [text];
}

/** The spans of a tree; the text itself where they do not add up to it. */
function coloured(tree, text) {
  const build = ([scope, ...children]) => {
    // `title.function` is `title` and `function_` of the style sheets.
    const names = scope.split(".").filter((part) => /^[\w-]+$/.test(part));
    const out = element("span", names.map((part, i) => (i ? `${part}_` : `hljs-${part}`)).join(" "));
    for (const child of children) out.append(typeof child === "string" ? child : build(child));
    return out;
  };
  const out = build(tree);
  return out.textContent === text ? [...out.childNodes] : [text];
}

/** What `markdown.js` makes formulas and code with. */
export const RICH = { formula, code };
