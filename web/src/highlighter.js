// A worker that colors code: highlight.js can take seconds for text that was made for it, and the page must not wait.
// It hands back the tree of tokens, `[scope, ...texts and trees]`; null for a language that it does not know.

import highlighter from "./vendor/highlight-11.12.0/highlight.min.js";

const plain = (node) => (typeof node === "string" ? node : [node.scope ?? "", ...node.children.map(plain)]);

addEventListener("message", ({ data: { text, language } }) => {
  const known = highlighter.getLanguage(language);
  // The only way to the tree: what the library gives otherwise is HTML.
  const root = known && highlighter.highlight(text, { language, ignoreIllegals: true })._emitter?.rootNode;
  postMessage(root ? plain({ scope: "", children: root.children }) : null);
});
