// Markdown as models write it, straight into elements: text never passes through an HTML parser, so that nothing a
// model says can become markup. Knows headings, lists, tasks, quotes, tables, rules, fenced code, formulas, and
// emphasis, code and links inside lines. Formulas and code are handed to what the caller gives.

import { copyButton } from "./dom.js";

/** How formulas and code become nodes: as their own text unless the caller of `render` knows better. */
const PLAIN = { formula: (tex, isDisplay, source) => source, code: (text) => [text] };
let rich = PLAIN;

/**
 * Replaces the children of `node` by the document. `source` may end anywhere: it is still being written. `how` has
 * `formula(tex, isDisplay, source)`, which gives a node, and `code(text, language, isOpen)`, which gives nodes;
 * `isOpen` says that the end of the code is not there yet.
 */
export function render(source, node, how = PLAIN) {
  rich = how;
  node.replaceChildren(...blocks(source.replaceAll("\r\n", "\n").split("\n")));
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
/** How a formula on lines of its own begins, and how it ends. */
const FORMULAS = [
  [/^\s*\\\[/, "\\]"],
  [/^\s*\$\$/, "$$"],
];
const ENVIRONMENT = /^\s*\\begin\{((?:equation|align|gather|multline|alignat|eqnarray)\*?)\}/;
const MAX_FORMULA_LINES = 200;
const MAX_DEPTH = 12;

function make(tag, ...children) {
  const node = document.createElement(tag);
  node.append(...children);
  return node;
}

function blocks(lines, depth = 0) {
  const out = [];
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i++;
    } else if ((match = FENCE.exec(line))) {
      const end = lines.findIndex(
        (l, j) => j > i && l.trim().startsWith(match[1]) && !l.trim().slice(match[1].length).trim(),
      );
      const last = end < 0 ? lines.length : end;
      out.push(codeBlock(lines.slice(i + 1, last).join("\n"), match[2].trim(), end < 0));
      i = last + 1;
    } else if ((match = HEADING.exec(line))) {
      out.push(make(`h${Math.min(6, match[1].length + 2)}`, ...inline(match[2])));
      i++;
    } else if (RULE.test(line)) {
      out.push(make("hr"));
      i++;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (i < lines.length && (match = QUOTE.exec(lines[i]))) (inner.push(match[1]), i++);
      out.push(make("blockquote", ...blocks(inner, depth + 1)));
    } else if ((match = formulaBlock(lines, i))) {
      out.push(make("p", match.node));
      i = match.next;
    } else if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) {
      const rows = [line];
      const aligns = lines[i + 1];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(lines[i]);
      out.push(table(rows, aligns));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      const [list, next] = listBlock(lines, i, depth);
      out.push(list);
      i = next;
    } else {
      const text = [line.trim()];
      for (i++; i < lines.length && lines[i].trim() && !startsBlock(lines[i]); i++) text.push(lines[i].trim());
      out.push(make("p", ...inline(text.join("\n"))));
    }
  }
  return out;
}

/** A formula that begins a line and ends one, `{node, next}`; null where there is none, or not its end yet. */
function formulaBlock(lines, i) {
  const environment = ENVIRONMENT.exec(lines[i]);
  const [open, close] = FORMULAS.find(([open]) => open.test(lines[i])) ?? [];
  if (!environment && !open) return null;
  const end = environment ? `\\end{${environment[1]}}` : close;
  const start = environment ? "" : open.exec(lines[i])[0];
  for (let j = i; j < Math.min(lines.length, i + MAX_FORMULA_LINES); j++) {
    const at = lines[j].indexOf(end, j === i ? start.length : 0);
    if (at < 0) continue;
    // What follows on the line makes it a formula inside of text.
    if (lines[j].slice(at + end.length).trim()) return null;
    const source = lines
      .slice(i, j + 1)
      .join("\n")
      .trim();
    const tex = environment ? source : source.slice(start.trim().length, -end.length);
    return { node: rich.formula(tex.trim(), true, source), next: j + 1 };
  }
  return null;
}

function startsBlock(line) {
  return (
    FORMULAS.some(([open]) => open.test(line)) ||
    ENVIRONMENT.test(line) ||
    FENCE.test(line) ||
    HEADING.test(line) ||
    RULE.test(line) ||
    QUOTE.test(line) ||
    ITEM.test(line)
  );
}

/** Items of one indentation; what is indented further belongs to the item before it. */
function listBlock(lines, i, depth) {
  const first = ITEM.exec(lines[i]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const list = make(ordered ? "ol" : "ul");
  if (ordered) list.start = parseInt(first[2], 10);
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length !== indent || /\d/.test(item[2]) !== ordered) break;
    const task = /^\[([ xX])\]\s+/.exec(item[3]);
    const inner = [task ? item[3].slice(task[0].length) : item[3]];
    for (i++; i < lines.length; i++) {
      const blank = !lines[i].trim();
      const deeper = /^\s*/.exec(lines[i])[0].length > indent;
      if (blank ? !/^\s/.test(lines[i + 1] ?? "") : !deeper && (startsBlock(lines[i]) || !lines[i - 1].trim())) break;
      inner.push(lines[i].slice(Math.min(/^\s*/.exec(lines[i])[0].length, indent + 2)));
    }
    const children = blocks(inner, depth + 1);
    // A line alone needs no paragraph around it.
    const lone = children[0]?.tagName === "P" ? [...children.shift().childNodes] : [];
    const entry = make("li", ...(task ? [checkbox(task[1] !== " ")] : []), ...lone, ...children);
    if (task) entry.className = "task";
    list.append(entry);
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return [list, i];
}

function checkbox(checked) {
  const box = make("input");
  Object.assign(box, { type: "checkbox", checked, disabled: true });
  box.setAttribute("aria-label", checked ? "done" : "to do");
  return box;
}

function table(rows, aligns) {
  const cells = (row) =>
    row
      .trim()
      .replace(/^\||\|$/g, "")
      .split(/(?<!\\)\|/)
      .map((c) => c.trim().replaceAll("\\|", "|"));
  const sides = cells(aligns).map((c) => (c.endsWith(":") ? (c.startsWith(":") ? "center" : "right") : ""));
  const line = (row, tag) =>
    make(
      "tr",
      ...cells(row).map((cell, i) => Object.assign(make(tag, ...inline(cell)), { className: sides[i] ?? "" })),
    );
  return make(
    "table",
    make("thead", line(rows[0], "th")),
    make("tbody", ...rows.slice(1).map((row) => line(row, "td"))),
  );
}

function codeBlock(text, language, isOpen) {
  const code = make("code", ...rich.code(text, language, isOpen));
  const label = make("span", language);
  label.className = "language";
  const head = make(
    "span",
    label,
    copyButton("Copy this code", () => text, "copy"),
  );
  head.className = "code-head";
  const block = make("pre", code);
  // Code that is wider than the page scrolls, by keys as well.
  block.tabIndex = 0;
  const out = make("div", head, block);
  out.className = "code";
  return out;
}

/**
 * Begins of what a line may hold. Each either ends soon or has a bound: a text of a thousand unclosed marks is tried at
 * every one of them.
 */
const INLINE = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, (m) => make("code", m[2].trim() || m[2])],
  [/^\*\*([\s\S]+?)\*\*(?!\*)/, (m, d) => make("strong", ...inline(m[1], d))],
  [/^__([\s\S]+?)__(?!\w)/, (m, d) => make("strong", ...inline(m[1], d))],
  [/^~~([\s\S]+?)~~/, (m, d) => make("del", ...inline(m[1], d))],
  [/^\*(?!\s)([^*]+?)\*(?!\*)/, (m, d) => make("em", ...inline(m[1], d))],
  [/^_(?!\s)([^_]+?)_(?!\w)/, (m, d) => make("em", ...inline(m[1], d))],
  [/^\\\(([\s\S]+?)\\\)/, (m) => rich.formula(m[1].trim(), false, m[0])],
  [/^\\\[([\s\S]+?)\\\]/, (m) => rich.formula(m[1].trim(), true, m[0])],
  [/^\$\$([^$]+?)\$\$/, (m) => rich.formula(m[1].trim(), true, m[0])],
  // Prices are no formulas: no blank inside the signs, and no digit behind them.
  [/^\$(?![\s$])((?:[^$\\\n]|\\.)*?[^\s\\$])\$(?![\d$])/, (m) => rich.formula(m[1], false, m[0])],
  [
    /^!\[([^\]]{0,500})\]\(\s{0,9}<?([^)\s>]{1,2000})>?(?:\s[^)]{0,500})?\)/,
    (m, d) => link(m[2], ["picture: ", ...inline(m[1] || m[2], d)]),
  ],
  [
    /^\[([^\]]{0,500})\]\(\s{0,9}<?([^)\s>]{1,2000})>?(?:\s[^)]{0,500})?\)/,
    (m, d) => link(m[2], inline(m[1] || m[2], d)),
  ],
  [/^https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"]/, (m) => link(m[0], [m[0]])],
  [/^\\([\\`*_{}[\]()#+\-.!|~>$])/, (m) => m[1]],
  [/^ {2,}\n/, () => make("br")],
];
/** What may begin one of them; a word's own underscore does not. */
const MARK = /[`*~[!\\$]|\b_|(?<!\w)_|https?:\/\/| {2,}\n/g;

function inline(text, depth = 0) {
  const out = [];
  let plain = 0;
  let at = 0;
  while (depth < MAX_DEPTH && at < text.length) {
    MARK.lastIndex = at;
    const mark = MARK.exec(text);
    if (!mark) break;
    const rest = text.slice(mark.index);
    const hit = INLINE.map(([pattern, build]) => [pattern.exec(rest), build]).find(([match]) => match);
    at = mark.index + (hit ? hit[0][0].length : 1);
    if (hit) {
      if (mark.index > plain) out.push(text.slice(plain, mark.index));
      out.push(hit[1](hit[0], depth + 1));
      plain = at;
    }
  }
  out.push(text.slice(plain));
  return out;
}

/** Only addresses that a click may open. Pictures are links too: the page fetches nothing. */
function link(address, children) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return make("span", ...children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return make("span", ...children);
  const node = make("a", ...children);
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
