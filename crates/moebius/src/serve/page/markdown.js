// Markdown as models write it, straight into elements: text never passes through an HTML parser, so that nothing a model says
// can become markup. Knows headings, lists, quotes, tables, rules, fenced code, and emphasis, code and links inside lines.

/** Replaces the children of `node` by the document. `source` may end anywhere: it is still being written. */
export function render(source, node) {
  node.replaceChildren(...blocks(source.replaceAll("\r\n", "\n").split("\n")));
}

const FENCE = /^ {0,3}(```+|~~~+)\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])\s*(?:\1\s*){2,}$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE_LINE = /^\s*\|?(\s*:?-+:?\s*\|)+\s*:?-*:?\s*$/;
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
      const end = lines.findIndex((l, j) => j > i && l.trim().startsWith(match[1]) && !l.trim().slice(match[1].length).trim());
      const last = end < 0 ? lines.length : end;
      out.push(codeBlock(lines.slice(i + 1, last).join("\n"), match[2].trim()));
      i = last + 1;
    } else if ((match = HEADING.exec(line))) {
      out.push(make(`h${Math.min(6, match[1].length + 2)}`, ...inline(match[2])));
      i++;
    } else if (RULE.test(line)) {
      out.push(make("hr"));
      i++;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const inner = [];
      while (i < lines.length && (match = QUOTE.exec(lines[i]))) inner.push(match[1]), i++;
      out.push(make("blockquote", ...blocks(inner, depth + 1)));
    } else if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "") && lines[i + 1].includes("|")) {
      const rows = [line];
      for (i += 2; i < lines.length && lines[i].includes("|"); i++) rows.push(lines[i]);
      out.push(table(rows));
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

function startsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
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
    const inner = [item[3]];
    for (i++; i < lines.length; i++) {
      const blank = !lines[i].trim();
      const deeper = /^\s*/.exec(lines[i])[0].length > indent;
      if (blank ? !/^\s/.test(lines[i + 1] ?? "") : !deeper && (startsBlock(lines[i]) || !lines[i - 1].trim())) break;
      inner.push(lines[i].slice(Math.min(/^\s*/.exec(lines[i])[0].length, indent + 2)));
    }
    const children = blocks(inner, depth + 1);
    // A line alone needs no paragraph around it.
    const lone = children[0]?.tagName === "P" ? [...children.shift().childNodes] : [];
    list.append(make("li", ...lone, ...children));
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i++;
  }
  return [list, i];
}

function table(rows) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((c) => c.trim().replaceAll("\\|", "|"));
  const line = (row, tag) => make("tr", ...cells(row).map((cell) => make(tag, ...inline(cell))));
  return make("table", make("thead", line(rows[0], "th")), make("tbody", ...rows.slice(1).map((row) => line(row, "td"))));
}

function codeBlock(text, language) {
  const code = make("code", text);
  if (language) code.dataset.language = language;
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.className = "copy";
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1200);
  });
  return make("pre", code, copy);
}

const INLINE = [
  [/^(`+)([\s\S]*?[^`])\1(?!`)/, (m) => make("code", m[2].trim() || m[2])],
  [/^\*\*([\s\S]+?)\*\*(?!\*)/, (m, d) => make("strong", ...inline(m[1], d))],
  [/^__([\s\S]+?)__(?!\w)/, (m, d) => make("strong", ...inline(m[1], d))],
  [/^~~([\s\S]+?)~~/, (m, d) => make("del", ...inline(m[1], d))],
  [/^\*(?!\s)([^*]+?)\*(?!\*)/, (m, d) => make("em", ...inline(m[1], d))],
  [/^_(?!\s)([^_]+?)_(?!\w)/, (m, d) => make("em", ...inline(m[1], d))],
  [/^!?\[([^\]]*)\]\(\s*<?([^)\s>]+)>?[^)]*\)/, (m, d) => link(m[2], inline(m[1] || m[2], d))],
  [/^https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"]/, (m) => link(m[0], [m[0]])],
  [/^\\([\\`*_{}[\]()#+\-.!|~>])/, (m) => m[1]],
  [/^ {2,}\n/, () => make("br")],
];
/** What may begin one of them; a word's own underscore does not. */
const MARK = /[`*~[!\\]|\b_|(?<!\w)_|https?:\/\/| {2,}\n/g;

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
