// A conversation as a Markdown document: the branch that is shown, with what made each answer. Knows no elements.

import { lineOf } from "./made.js";
import { path } from "./tree.js";

/** A line that no text of a model or a user can turn into something else. */
const plain = (text) => text.replace(/\s+/g, " ").replace(/[\\`*_[\]<>#|]/g, "\\$&");

/** Lines after `> `, as quotes have them. */
const quoted = (text) =>
  text
    .split("\n")
    .map((line) => `> ${line}`.trimEnd())
    .join("\n");

/** The document. Texts are kept as they are written: they are Markdown already. */
export function markdownOf(conversation) {
  const parts = [`# ${plain(conversation.name || "Conversation")}`];
  if (conversation.system.trim()) parts.push("## System prompt", conversation.system.trim());
  for (const node of path(conversation)) {
    const isUser = node.role === "user";
    parts.push(isUser ? "## User" : `## ${plain(lineOf(node))}`);
    if (node.reasoning?.trim()) parts.push(quoted(`Reasoning:\n\n${node.reasoning.trim()}`));
    if (node.images) parts.push(`*(${node.images.length === 1 ? "an image" : `${node.images.length} images`})*`);
    parts.push(node.content.trim() || "*(empty)*");
    const end = [node.failed, node.summary].filter(Boolean).join(" · ");
    if (!isUser && end) parts.push(`*${plain(end)}*`);
  }
  return `${parts.join("\n\n")}\n`;
}
