// Small helpers for elements, the clipboard and files. Knows nothing of conversations and the server.

export const $ = (id) => document.getElementById(id);

/** A new element with its class and children. */
export function element(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** An image; `alt` says what it is to those who do not see it. */
export function image(uri, alt) {
  const node = element("img");
  node.src = uri;
  node.alt = node.title = alt;
  return node;
}

/** A button; `title` is what it says to those who point at it or hear it. */
export function button(label, title, act) {
  const node = element("button", "", label);
  node.type = "button";
  node.title = title;
  node.setAttribute("aria-label", title);
  node.addEventListener("click", act);
  return node;
}

/** Puts text on the clipboard; false where the browser refuses. */
export async function copyText(text) {
  try {
    // Absent over plain http from another machine.
    if (navigator.clipboard) return (await navigator.clipboard.writeText(text), true);
  } catch {
    // Refused: the older way needs no permission.
  }
  const area = element("textarea", "offscreen");
  area.value = text;
  area.setAttribute("aria-hidden", "true");
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus?.();
  return done;
}

/** A button that copies what `text()` gives and says so. */
export function copyButton(title, text, className = "") {
  let timer;
  const node = button("Copy", title, async () => {
    node.textContent = (await copyText(text())) ? "Copied ✓" : "Copy failed";
    clearTimeout(timer);
    timer = setTimeout(() => (node.textContent = "Copy"), 1500);
  });
  node.className = className;
  return node;
}

/** A question mark that explains `what`: to those who point at it, reach it by keys, tap it or hear it. */
export function help(what, words) {
  const node = button("?", `${what}: ${words}`, () => tip(node, element("p", "", words)));
  node.className = "help";
  node.removeAttribute("title");
  for (const name of ["pointerenter", "focus"]) node.addEventListener(name, () => tip(node, element("p", "", words)));
  for (const name of ["pointerleave", "blur"]) node.addEventListener(name, () => tip(node));
  return node;
}

/** Shows something next to an element, or no longer. */
export function tip(node, ...parts) {
  const box = $("tip");
  box.replaceChildren(...parts);
  box.hidden = !parts.length;
  if (box.hidden) return;
  const place = node.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 4))}px`;
  const above = place.top - box.offsetHeight - 4;
  box.style.top = `${above > 4 ? above : place.bottom + 4}px`;
}

/** Hands a file to the browser's downloads. */
export function download(name, text, type = "application/json") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = element("a");
  link.href = address;
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A line at the bottom that goes away by itself, with something to do about it. */
export function toast(text, label, act) {
  const box = $("toast");
  clearTimeout(box.timer);
  const close = () => ((box.hidden = true), box.replaceChildren());
  const undo = label ? [button(label, label, () => (close(), act()))] : [];
  box.replaceChildren(element("span", "", text), ...undo);
  box.hidden = false;
  box.timer = setTimeout(close, 12_000);
}

/** Numbers with separators, as the reader's language has them. */
export const count = (n) => n.toLocaleString();
