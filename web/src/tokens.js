// An answer token by token: each is shaded by its probability, says what else the model thought of, and marks its
// experts.

import { element, tip } from "./dom.js";
import { state } from "./state.js";

/** The tokens of an event: `choice.logprobs.content` and `choice.routing` come one behind the other, in step. */
export function collect(tokens, choice) {
  for (const entry of choice?.logprobs?.content ?? []) {
    slot(tokens, "text", { text: entry.token, bytes: entry.bytes, logprob: entry.logprob, top: entry.top_logprobs });
  }
  for (const experts of choice?.routing ?? []) slot(tokens, "experts", { experts });
}

/** Completes the first token that has no such part yet. */
function slot(tokens, part, fields) {
  // The last ones are the open ones.
  let i = tokens.length;
  while (i > 0 && tokens[i - 1][part] === undefined) i--;
  if (i === tokens.length) tokens.push(fields);
  else Object.assign(tokens[i], fields);
}

/** Text that can be seen; a token without any is a mark of the model's, such as its end. */
const shown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "‹special›";
const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  return share < 0.1 ? "< 0.1 %" : `${share.toFixed(share < 9.95 ? 1 : 0)} %`;
};

/** The answer as a row of tokens. */
export function tokenView(tokens) {
  const out = element("div", "tokens");
  out.setAttribute("role", "group");
  out.setAttribute("aria-label", "Tokens of this answer; the arrow keys move between them");
  // A character may be spread over several tokens.
  const decoder = new TextDecoder();
  tokens.forEach((token, i) => {
    const text = token.bytes ? decoder.decode(Uint8Array.from(token.bytes), { stream: true }) : (token.text ?? "");
    const node = element("button", "token", shown(text));
    node.type = "button";
    // Of the tokens, one is in the order of the Tab key.
    node.tabIndex = i ? -1 : 0;
    if (token.logprob !== undefined) node.classList.add(`p${Math.min(4, Math.floor(Math.exp(token.logprob) * 5))}`);
    node.setAttribute(
      "aria-label",
      `token ${i + 1}: ${shown(text)}${token.logprob === undefined ? "" : `, ${percent(token.logprob)}`}`,
    );
    node.addEventListener("pointerenter", () => tell(node, token));
    node.addEventListener("focus", () => tell(node, token));
    for (const name of ["pointerleave", "blur"]) node.addEventListener(name, () => tip(node));
    node.addEventListener("click", () => {
      out.querySelector("[aria-pressed]")?.removeAttribute("aria-pressed");
      node.setAttribute("aria-pressed", "true");
      if (token.experts) state.openExperts(tokens, i);
    });
    out.append(node);
    if (text.includes("\n")) out.append(element("br"));
  });
  out.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const all = [...out.querySelectorAll(".token")];
    const next = step && all[all.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    all.forEach((node) => (node.tabIndex = node === next ? 0 : -1));
    next.focus();
  });
  return out;
}

/** What else could have stood here, beside the token. */
function tell(node, token) {
  const rows = (token.top ?? []).map((other) => {
    const row = element(
      "tr",
      other.token === token.text ? "chosen" : "",
      element("td", "", shown(other.token)),
      element("td", "", percent(other.logprob)),
    );
    return row;
  });
  const isAmong = token.top?.some((other) => other.token === token.text);
  if (token.logprob !== undefined && !isAmong) {
    rows.push(element("tr", "chosen", element("td", "", shown(token.text)), element("td", "", percent(token.logprob))));
  }
  const parts = rows.length ? [element("table", "", element("tbody", "", ...rows))] : [];
  if (token.experts && state.routing.routers?.length) parts.push(element("p", "quiet", "Click to show its experts"));
  tip(node, ...parts);
}
