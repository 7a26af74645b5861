// Formulas and colours of code: the two libraries of the page, loaded when the first formula or code block is there.
// What they make of a model's text stays inert. KaTeX builds elements by itself, with everything off that names addresses
// or classes (`trust`) and with bounds on macros and sizes. highlight.js gives a tree of its tokens, which becomes spans
// around text nodes: the HTML it could write is never read. What a library refuses is shown as it was written.

import { element } from "./dom.js";

const KATEX = "page/vendor/katex-0.19.1/";
const HIGHLIGHT = "./vendor/highlight-11.12.0/highlight.min.js";
const MAX_FORMULA = 4000; // characters
const MAX_CODE = 40_000; // characters
const KEPT = 400; // nodes of each kind, for the next time the same message is drawn

let katex = null;
let highlighter = null;
const loading = {};

function loadKatex() {
  const sheet = element("link");
  Object.assign(sheet, { rel: "stylesheet", href: `${KATEX}katex.min.css` });
  const script = element("script");
  script.src = `${KATEX}katex.min.js`;
  document.head.append(sheet, script);
  return new Promise((resolve, reject) => {
    script.onload = () => ((katex = globalThis.katex), resolve());
    script.onerror = () => reject(new Error("KaTeX does not load"));
  });
}

const loadHighlighter = async () => (highlighter = (await import(HIGHLIGHT)).default);

/** Starts to load a library once; all messages are drawn again when it is there. */
function need(name, load) {
  // Without it texts stay as they are written.
  loading[name] ??= load().then(() => onLoad(), () => {});
}

let onLoad = () => {};
/** Sets what happens when a library has come. */
export const whenLoaded = (act) => (onLoad = act);

/** Nodes by their source, oldest first out. */
class Kept {
  #nodes = new Map();

  get(key, make) {
    let node = this.#nodes.get(key);
    if (!node) {
      node = make();
      this.#nodes.set(key, node);
      if (this.#nodes.size > KEPT) this.#nodes.delete(this.#nodes.keys().next().value);
    }
    return node.cloneNode(true);
  }
}

const formulas = new Kept();
const codes = new Kept();

/** What `markdown.js` makes formulas and code with. */
export const RICH = { formula, code };

function formula(tex, isDisplay, source) {
  const plain = () => element("code", "tex", source);
  if (tex.length > MAX_FORMULA) return plain();
  if (!katex) return need("katex", loadKatex), plain();
  return formulas.get(`${isDisplay}${tex}`, () => {
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
      return plain();
    }
    return node;
  });
}

function code(text, language) {
  const name = language.split(/[\s,{]/)[0].toLowerCase();
  if (!name || text.length > MAX_CODE) return [text];
  if (!highlighter) return need("highlighter", loadHighlighter), [text];
  if (!highlighter.getLanguage(name)) return [text];
  return [...codes.get(`${name}\n${text}`, () => spans(highlighter.highlight(text, { language: name, ignoreIllegals: true }), text)).childNodes];
}

/** The tokens of highlighted code as spans; the code itself where they do not add up to it. */
function spans(result, text) {
  const build = (children, into) => {
    for (const child of children) {
      if (typeof child === "string") into.append(child);
      else {
        // `title.function`-like scopes are classes of their parts.
        const names = (child.scope ?? "").split(".").filter((part) => /^[\w-]+$/.test(part));
        const inner = element("span", names.map((part, i) => (i ? `${part}_` : `hljs-${part}`)).join(" "));
        build(child.children ?? [], inner);
        into.append(inner);
      }
    }
    return into;
  };
  const out = build(result._emitter?.rootNode?.children ?? [], element("span"));
  return out.textContent === text ? out : element("span", "", text);
}
