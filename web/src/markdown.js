// Markdown as models write it, straight into elements: text never passes through an HTML parser, so that nothing a
// model says can become markup. Knows headings, lists, tasks, quotes, tables, rules, fenced code, formulas, footnotes,
// and emphasis, code and links inside lines. Formulas and code are handed to what the caller gives.
//
// A model's text is drawn again at each of its tokens, so time is linear in it, whatever it holds: no expression here
// may match the same characters in two ways, and the end of a mark is searched once for all marks that wait for it.

import { button, copyButton, download } from "./dom.js";

/** How formulas and code become nodes: as their own text unless the caller of `render` knows better. */
const PLAIN = { formula: (tex, isDisplay, source) => source, code: (text) => [text] };
let rich = PLAIN;
/** Footnotes of the document that is drawn, by label. */
let notes = new Map();
/** Those of them that the text refers to, in that order. */
let cited = [];
/** Tells the notes of one drawing from those of others on the page. */
let drawing = 0;

/**
 * Replaces the children of `node` by the document. `source` may end anywhere: it is still being written. `how` has
 * `formula(tex, isDisplay, source)`, which gives a node, and `code(text, language, isOpen)`, which gives nodes;
 * `isOpen` says that the end of the code is not there yet.
 */
export function render(source, node, how = PLAIN) {
  rich = how;
  node.replaceChildren();
  const lines = takeNotes(source.replaceAll("\r\n", "\n").split("\n"));
  fill(node, blocks(lines));
  if (notes.size) node.append(noteList());
}

const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?=\s)([^]*)$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?=\s)([^]*)$/;
const QUOTE = /^ {0,3}> ?([^]*)$/;
/** A line between the head of a table and its rows, without its blanks. */
const TABLE_LINE = /^\|?(?::?-+:?\|)+(?::?-+)?:?$/;
/** How a formula on separate lines begins, and how it ends. */
const FORMULAS = [
  [/^\s*\\\[/, "\\]"],
  [/^\s*\$\$/, "$$"],
];
const ENVIRONMENT = /^\s*\\begin\{((?:equation|align|gather|multline|alignat|eqnarray)\*?)\}/;
/** A footnote, and a reference to one. */
const NOTE = /^ {0,3}\[\^([^\]\s]{1,40})\]:([^]*)$/;
const REFERENCE = /\[\^([^\]\s]{1,40})\]/y;
const MAX_FORMULA_LINES = 200;
const MAX_DEPTH = 12;

/** Appends children one by one: a call has no room for a hundred thousand arguments. */
function fill(node, children) {
  for (const child of children) node.append(child);
  return node;
}

const make = (tag, children = []) => fill(document.createElement(tag), children);

/** A heading's text, without the marks at its end. */
function headingText(rest) {
  const text = rest.trim();
  let end = text.length;
  while (text[end - 1] === "#") end--;
  return text.slice(0, end).trimEnd();
}

const isTableLine = (line) => line.includes("|") && TABLE_LINE.test(line.replace(/\s+/g, ""));

function blocks(lines, depth = 0) {
  const out = [];
  const ends = new Map();
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    let match;
    if (!line.trim()) {
      i++;
    } else if ((match = FENCE.exec(line))) {
      const last = fenceEnd(lines, i + 1, match[1]);
      out.push(codeBlock(lines.slice(i + 1, last).join("\n"), match[2].trim(), last === lines.length));
      i = last + 1;
    } else if ((match = HEADING.exec(line))) {
      out.push(make(`h${Math.min(6, match[1].length + 2)}`, inline(headingText(match[2]))));
      i++;
    } else if (RULE.test(line)) {
      out.push(make("hr"));
      i++;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (i < lines.length && (match = QUOTE.exec(lines[i]))) (inner.push(match[1]), i++);
      out.push(make("blockquote", blocks(inner, depth + 1)));
    } else if ((match = formulaBlock(lines, i, ends))) {
      out.push(make("p", [match.node]));
      i = match.next;
    } else if (line.includes("|") && isTableLine(lines[i + 1] ?? "")) {
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
      out.push(make("p", inline(text.join("\n"))));
    }
  }
  return out;
}

/** Takes the footnotes out of the lines: a line with a label, and indented ones after it. */
function takeNotes(lines) {
  [notes, cited] = [new Map(), []];
  drawing++;
  const out = [];
  for (let i = 0; i < lines.length; i++) {
    const fence = FENCE.exec(lines[i]);
    const note = fence ? null : NOTE.exec(lines[i]);
    if (note) {
      const text = [note[2].trim()];
      while (/^(?: {2,}|\t)\s*\S/.test(lines[i + 1] ?? "")) text.push(lines[++i].trim());
      // The first note of a label counts.
      if (!notes.has(note[1])) notes.set(note[1], { text, number: 0, references: 0 });
      continue;
    }
    // Nothing inside of code is a note.
    const last = fence ? Math.min(fenceEnd(lines, i + 1, fence[1]), lines.length - 1) : i;
    for (; i < last; i++) out.push(lines[i]);
    out.push(lines[i]);
  }
  return out;
}

/** The number of a footnote at the place that refers to it. */
function reference(label) {
  const note = notes.get(label);
  if (!note.number) note.number = cited.push(note);
  const link = make("a", [String(note.number)]);
  link.href = `#note-${drawing}-${note.number}`;
  link.id = `note-${drawing}-${note.number}-from-${++note.references}`;
  link.setAttribute("aria-label", `Footnote ${note.number}`);
  return make("sup", [link]);
}

/** The footnotes in the order of their numbers; those that nothing refers to come last. */
function noteList() {
  const list = make("ol");
  list.className = "notes";
  const entries = [];
  // A note may refer to others.
  const add = () => {
    for (let i = entries.length; i < cited.length; i++) entries.push(make("li", inline(cited[i].text.join("\n"))));
  };
  add();
  for (const note of notes.values()) {
    if (note.number) continue;
    note.number = cited.push(note);
    add();
  }
  entries.forEach((entry, i) => {
    const name = `note-${drawing}-${i + 1}`;
    entry.id = name;
    if (!cited[i].references) return;
    const back = make("a", ["↩"]);
    back.href = `#${name}-from-1`;
    back.setAttribute("aria-label", `Back to the text of footnote ${i + 1}`);
    fill(entry, [" ", back]);
  });
  return fill(list, entries);
}

/** The line that ends code, or the end of all lines. */
function fenceEnd(lines, from, fence) {
  for (let i = from; i < lines.length; i++) {
    const line = lines[i].trim();
    if (line.startsWith(fence) && !line.slice(fence.length).trim()) return i;
  }
  return lines.length;
}

/** The first line from `from` on that holds `end`; `known` has those that were found, as `from` never falls. */
function lineWith(lines, end, from, known) {
  let i = known.get(end) ?? 0;
  if (i < from) {
    for (i = from; i < lines.length && !lines[i].includes(end); ) i++;
    known.set(end, i);
  }
  return i;
}

/** A formula that begins a line and ends one, `{node, next}`; null where there is none, or not its end yet. */
function formulaBlock(lines, i, ends) {
  const environment = ENVIRONMENT.exec(lines[i]);
  const [open, close] = FORMULAS.find(([open]) => open.test(lines[i])) ?? [];
  if (!environment && !open) return null;
  const end = environment ? `\\end{${environment[1]}}` : close;
  const start = environment ? "" : open.exec(lines[i])[0];
  let [j, at] = [i, lines[i].indexOf(end, start.length)];
  if (at < 0) {
    j = lineWith(lines, end, i + 1, ends);
    if (j >= Math.min(lines.length, i + MAX_FORMULA_LINES)) return null;
    at = lines[j].indexOf(end);
  }
  // What follows on the line makes it a formula inside of text.
  if (lines[j].slice(at + end.length).trim()) return null;
  const source = lines
    .slice(i, j + 1)
    .join("\n")
    .trim();
  const tex = environment ? source : source.slice(start.trim().length, -end.length);
  return { node: rich.formula(tex.trim(), true, source), next: j + 1 };
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
    const text = item[3].trimStart();
    const task = /^\[([ xX])\]\s+/.exec(text);
    const inner = [task ? text.slice(task[0].length) : text];
    for (i++; i < lines.length; i++) {
      const blank = !lines[i].trim();
      const deeper = /^\s*/.exec(lines[i])[0].length > indent;
      if (blank ? !/^\s/.test(lines[i + 1] ?? "") : !deeper && (startsBlock(lines[i]) || !lines[i - 1].trim())) break;
      inner.push(lines[i].slice(Math.min(/^\s*/.exec(lines[i])[0].length, indent + 2)));
    }
    const children = blocks(inner, depth + 1);
    // A line alone needs no paragraph around it.
    const lone = children[0]?.tagName === "P" ? [...children.shift().childNodes] : [];
    const entry = fill(fill(make("li", task ? [checkbox(task[1] !== " ")] : []), lone), children);
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
      cells(row).map((cell, i) => Object.assign(make(tag, inline(cell)), { className: sides[i] ?? "" })),
    );
  const body = rows.slice(1).map((row) => line(row, "td"));
  return make("table", [make("thead", [line(rows[0], "th")]), make("tbody", body)]);
}

function codeBlock(text, language, isOpen) {
  const code = make("code", rich.code(text, language, isOpen));
  const label = make("span", [language]);
  label.className = "language";
  const save = button("Download", "Download this code as a file", () =>
    download(`code.${endingOf(language)}`, text, "text/plain"),
  );
  const head = make("span", [label, wrapButton(), save, copyButton("Copy this code", () => text)]);
  head.className = "code-head";
  const block = make("pre", [code]);
  // Code that is wider than the page scrolls, by keys as well.
  block.tabIndex = 0;
  const out = make("div", [head, block]);
  out.className = "code";
  return out;
}

/** Endings of files by language, where they differ from its name. */
const ENDINGS = {
  ...{ bash: "sh", "c#": "cs", "c++": "cpp", csharp: "cs", haskell: "hs", javascript: "js", julia: "jl", kotlin: "kt" },
  ...{ latex: "tex", markdown: "md", perl: "pl", python: "py", ruby: "rb", rust: "rs", shell: "sh", text: "txt" },
  ...{ typescript: "ts", yaml: "yml" },
};

function endingOf(language) {
  const name = language.split(/[\s,{]/)[0].toLowerCase();
  return Object.hasOwn(ENDINGS, name) ? ENDINGS[name] : /^[a-z0-9]{1,8}$/.test(name) ? name : "txt";
}

let isWrapped = false;

/** A button that breaks long lines of code on the page, or no longer. */
function wrapButton() {
  const out = button("Wrap", "Wrap long lines of code", () => {
    isWrapped = !isWrapped;
    document.documentElement.classList.toggle("wrap-code", isWrapped);
    for (const other of document.querySelectorAll(".code-head .wrap")) other.setAttribute("aria-pressed", isWrapped);
  });
  out.className = "wrap";
  out.setAttribute("aria-pressed", isWrapped);
  return out;
}

/** Marks that hold what is between them, each with its end, with at least one character in between. */
const PAIRS = [
  { open: "**", close: /\*\*(?!\*)/g, build: (inner, d) => make("strong", inline(inner, d)) },
  { open: "__", close: /__(?!\w)/g, build: (inner, d) => make("strong", inline(inner, d)) },
  { open: "~~", close: /~~/g, build: (inner, d) => make("del", inline(inner, d)) },
  { open: "*", close: /\*/g, lone: /[^*]/y, build: (inner, d) => make("em", inline(inner, d)) },
  { open: "_", close: /_/g, lone: /\W/y, build: (inner, d) => make("em", inline(inner, d)) },
  { open: "\\(", close: /\\\)/g, build: (inner, d, source) => rich.formula(inner.trim(), false, source) },
  { open: "\\[", close: /\\\]/g, build: (inner, d, source) => rich.formula(inner.trim(), true, source) },
  { open: "$$", close: /\$/g, lone: /\$/y, build: (inner, d, source) => rich.formula(inner.trim(), true, source) },
];
/** Prices are no formulas: no blank inside the signs, and no digit after them. */
const FORMULA = /\$(?![\s$])((?:[^$\\\n]|\\.)*?[^\s\\$])\$(?![\d$])/y;
const ADDRESS = /https?:\/\/[^\s<>()]+/y;
const ESCAPE = /\\([\\`*_{}[\]()#+\-.!|~>$])/y;
const TICKS = /`+/g;
/** What may begin one of them; a word's own underscore does not. */
const MARK = /[`*~[!\\$]|\b_|(?<!\w)_|https?:\/\//g;
const MAX_LABEL = 500;
const MAX_ADDRESS = 2000;

/** A text whose marks are looked for, and what is known of it: where the next end of each kind is. */
class Line {
  #next = new Map();
  #ticks = null;

  constructor(text) {
    this.text = text;
  }

  /** The first match of `pattern` from `at` on. As `at` never falls, each character is searched once a pattern. */
  next(pattern, at) {
    const known = this.#next.get(pattern);
    if (known >= at) return known;
    pattern.lastIndex = at;
    const found = pattern.exec(this.text)?.index ?? Infinity;
    this.#next.set(pattern, found);
    return found;
  }

  /** The first run of `n` backticks from `at` on. */
  ticks(n, at) {
    if (!this.#ticks) {
      this.#ticks = new Map();
      for (const { 0: run, index } of this.text.matchAll(TICKS)) {
        if (!this.#ticks.has(run.length)) this.#ticks.set(run.length, { places: [], i: 0 });
        this.#ticks.get(run.length).places.push(index);
      }
    }
    // What an escape cuts off a run may be of another length.
    const runs = this.#ticks.get(n) ?? { places: [], i: 0 };
    while (runs.places[runs.i] < at) runs.i++;
    return runs.places[runs.i] ?? Infinity;
  }
}

/** Matches an expression at a place. */
function at(pattern, text, place) {
  pattern.lastIndex = place;
  return pattern.exec(text);
}

/** What begins at a mark, `[end, node]`; `node` is null where the mark is text, and so is all before `end`. */
function marked(line, i, depth) {
  const { text } = line;
  if (text[i] === "`") {
    let start = i;
    while (text[start] === "`") start++;
    const end = line.ticks(start - i, start);
    if (end === Infinity) return [start, null];
    const code = text.slice(start, end);
    return [end + start - i, make("code", [code.trim() || code])];
  }
  for (const { open, close, lone, build } of PAIRS) {
    if (!text.startsWith(open, i)) continue;
    const start = i + open.length;
    // Between single marks none of them stands, and no blank comes first.
    if (open.length === 1 && (text[start] === open || /\s/.test(text[start] ?? " "))) continue;
    const end = line.next(close, lone ? start : start + 1);
    const after = end + open.length;
    if (end === Infinity || end === start) continue;
    if (lone && end + 1 < text.length && !at(lone, text, end + 1)) continue;
    if (open === "$$" && after > text.length) continue;
    return [after, build(text.slice(start, end), depth + 1, text.slice(i, after))];
  }
  let match;
  if ((match = at(FORMULA, text, i))) return [i + match[0].length, rich.formula(match[1], false, match[0])];
  if (text[i] === "[") {
    const match = notes.size ? at(REFERENCE, text, i) : null;
    if (match && notes.has(match[1])) return [i + match[0].length, reference(match[1])];
    return linkAt(line, i, depth) ?? [i + 1, null];
  }
  if (text.startsWith("![", i)) return linkAt(line, i + 1, depth, "picture: ") ?? [i + 1, null];
  if ((match = at(ADDRESS, text, i))) {
    let end = match[0].length;
    while (".,;:!?'\"".includes(match[0][end - 1])) end--;
    const address = match[0].slice(0, end);
    return [i + end, end > address.indexOf("//") + 3 ? link(address, [address]) : null];
  }
  if ((match = at(ESCAPE, text, i))) return [i + 2, match[1]];
  return [i + 1, null];
}

/** A link whose label begins at `i`; null where there is none. */
function linkAt(line, i, depth, before) {
  const { text } = line;
  const label = line.next(LABEL_END, i + 1);
  if (label - i - 1 > MAX_LABEL || text[label + 1] !== "(") return null;
  let start = label + 2;
  while (start < label + 11 && /\s/.test(text[start] ?? "")) start++;
  if (text[start] === "<") start++;
  let end = line.next(ADDRESS_END, start);
  if (end === start || end - start > MAX_ADDRESS) return null;
  const address = text.slice(start, end);
  if (text[end] === ">") end++;
  // A title is passed over.
  if (/\s/.test(text[end] ?? "")) {
    const title = line.next(TITLE_END, end);
    if (title - end - 1 > MAX_LABEL) return null;
    end = title;
  }
  if (text[end] !== ")") return null;
  const children = inline(text.slice(i + 1, label) || address, depth + 1);
  return [end + 1, link(address, before ? [before, ...children] : children)];
}
const LABEL_END = /\]/g;
const ADDRESS_END = /[)\s>]/g;
const TITLE_END = /\)/g;

function inline(text, depth = 0) {
  const out = [];
  const line = new Line(text);
  let plain = 0;
  let i = 0;
  while (depth < MAX_DEPTH && i < text.length) {
    MARK.lastIndex = i;
    const mark = MARK.exec(text);
    if (!mark) break;
    const [end, node] = marked(line, mark.index, depth);
    i = end;
    if (node !== null) {
      if (mark.index > plain) out.push(text.slice(plain, mark.index));
      out.push(node);
      plain = end;
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
    return make("span", children);
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return make("span", children);
  const node = make("a", children);
  node.href = url.href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  return node;
}
