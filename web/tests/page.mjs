// The page in headless Chromium, against a running server: node tests/page.mjs http://127.0.0.1:8080 [folder for
// screenshots]. CHROMIUM names the browser; /usr/bin/chromium otherwise. ONLY is part of the names of tests to run.
// SEEING is the address of a server whose model sees images; without it their test is left out.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const [address, pictures] = process.argv.slice(2);
const AXE = createRequire(import.meta.url).resolve("axe-core/axe.min.js");
const STORY = "Tell me a story about a fox who lost his hat";

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"], // containers often run as root
});

/**
 * A page with everything that goes wrong in it collected; in a browser of its own, or as another tab of `context`.
 * `prepare(page)` runs before the page is loaded; with `bare` nothing is expected of its script.
 */
async function open({ context, prepare, bare = false, at = address, ...options } = {}) {
  context ??= await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  page.troubles = [];
  page.on("pageerror", (error) => page.troubles.push(String(error)));
  page.on("console", (message) => message.type() === "error" && page.troubles.push(message.text()));
  await prepare?.(page);
  const isOurs = (url) => [at, "data:", "blob:"].some((start) => url.startsWith(start));
  page.on("request", (request) => isOurs(request.url()) || page.troubles.push(`fetches ${request.url()}`));
  await page.goto(at);
  if (bare) return page;
  // The model's name stands in the list once the server has answered.
  await page.locator("#server").filter({ hasText: "·" }).waitFor({ state: "attached" });
  return page;
}

async function picture(page, name) {
  if (pictures) await page.screenshot({ path: `${pictures}/${name}.png` });
}

const answers = (page) => page.locator(".message.assistant");
const done = (page) => page.locator("#send").waitFor({ state: "visible" });

async function say(page, text) {
  await page.locator("#input").fill(text);
  await page.keyboard.press("Enter");
}

/** Sets a field of the settings, its panel open. */
async function set(page, field, value) {
  await page.locator(field).evaluate((node) => node.closest("details")?.setAttribute("open", ""));
  await page.locator(field).fill(value);
  await page.locator(field).blur();
}

/** Short answers, so that tests are quick. */
// Stops an answer once it has begun. The key is pressed within the page: on a busy machine the answer would come to its
// end before a key from here arrives.
const stopEarly = (page) =>
  page.evaluate(
    () =>
      new Promise((done) => {
        const look = () => {
          if (!(document.querySelector(".message.assistant .text")?.innerText.length > 10)) return setTimeout(look, 5);
          document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
          done();
        };
        look();
      }),
  );

async function brief(page, tokens = 24) {
  await page.keyboard.press("Alt+s");
  await set(page, "#set-max_tokens", String(tokens));
  await page.keyboard.press("Alt+s");
}

async function ask(page, text) {
  await say(page, text);
  await page.locator(".message.assistant .tools").last().waitFor();
  await done(page);
}

const names = (page) => page.locator("#conversations .name > span:first-child").allInnerTexts();
const notice = (page) => page.locator("#notice").innerText();

/** What axe finds wrong with the page as it is. */
async function accessible(page, what) {
  if (!(await page.evaluate(() => "axe" in window))) await page.evaluate(await readFile(AXE, "utf8"));
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  const told = violations.map(
    ({ id, nodes }) =>
      `${id}: ${nodes
        .map((n) => n.target.join(" "))
        .slice(0, 3)
        .join(", ")}`,
  );
  assert.deepEqual(told, [], `${what}: axe`);
}

/** The text of the file that a click downloads. */
async function downloaded(page, selector) {
  const [file] = await Promise.all([page.waitForEvent("download"), page.locator(selector).click()]);
  return readFile(await file.path(), "utf8");
}

/** Gives the page files as if they had been dropped on it. */
async function drop(page, selector, type, files) {
  const data = await page.evaluateHandle(
    (files) => {
      const data = new DataTransfer();
      for (const [name, bytes, type] of files) data.items.add(new File([Uint8Array.from(bytes)], name, { type }));
      return data;
    },
    files.map(([name, text, type = ""]) => [name, [...Buffer.from(text)], type]),
  );
  if (type === "drop") await page.dispatchEvent(selector, "drop", { dataTransfer: data });
  else
    await page
      .locator(selector)
      .evaluate(
        (node, data) =>
          node.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })),
        data,
      );
}

/** Name and steps of each test. */
const TESTS = {
  async "an answer streams, the status tells of it, and the experts light up"() {
    const page = await open();
    await page.keyboard.press("Alt+r");
    await page.locator("#routing").waitFor({ state: "visible" });
    // An answer may be over before it is looked for.
    await page.evaluate(() => {
      const look = () => (window.wasPending ||= !!document.querySelector(".message.pending"));
      new MutationObserver(look).observe(document.body, { subtree: true, childList: true, attributes: true });
    });
    await say(page, STORY);
    await done(page);
    assert.ok(await page.evaluate(() => window.wasPending));
    const text = await answers(page).locator(".text").innerText();
    assert.ok(text.length > 20, text);
    assert.match(await page.locator("#speed").innerText(), /tokens\/s/);
    assert.match(await page.locator("#hits").innerText(), /\d+ of \d+ prompt tokens/);
    assert.match(await page.locator("#fill-text").innerText(), /\d+ \/ \d+/);
    assert.match(await page.locator("#routing-text").innerText(), /[1-9]\d* tokens of this answer, \d+ layers/);
    const drawn = await page.locator("#grid").evaluate((canvas) => {
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return data.filter((value, i) => i % 4 === 3 && value > 0).length;
    });
    assert.ok(drawn > 100, `${drawn} pixels`);
    await picture(page, "routing");
    return page;
  },

  async "stopping keeps what came, and again answers beside it"() {
    const page = await open();
    await page.keyboard.press("Alt+s");
    await set(page, "#set-max_tokens", "900");
    // Its end would come before the stop.
    await page.locator("#set-ignore_eos").evaluate((node) => node.closest("details").setAttribute("open", ""));
    await page.locator("#set-ignore_eos").selectOption("true");
    await page.keyboard.press("Alt+s");
    await say(page, `${STORY}, and another, and one more`);
    await stopEarly(page);
    await done(page);
    const first = await answers(page).locator(".text").innerText();
    assert.match(
      await answers(page).locator(".tools").innerText(),
      /stopped · [1-9]\d* tokens?( · [\d.]+ tokens\/s)? · \d+\.\d s/,
    );
    assert.equal(await page.locator("#said").innerText(), "The answer was stopped.");
    await page.getByRole("button", { name: "Regenerate the answer" }).click();
    await stopEarly(page);
    await done(page);
    assert.match(await answers(page).innerText(), /2 \/ 2/);
    await page.getByRole("button", { name: "Previous version" }).click();
    assert.equal(await answers(page).locator(".text").innerText(), first);
    return page;
  },

  async "an edited message branches, and a reload keeps everything"() {
    const page = await open();
    await brief(page);
    await page.keyboard.press("Alt+s");
    await page.locator("#system").fill("You tell short stories.");
    await page.locator("#system").blur();
    await page.keyboard.press("Alt+s");
    await say(page, STORY);
    await done(page);
    await say(page, "And then?");
    await done(page);
    await page.locator("#input").focus();
    await page.keyboard.press("ArrowUp");
    await page.keyboard.press("Control+a");
    await page.keyboard.type("What did he find?");
    await page.keyboard.press("Enter");
    await done(page);
    const shown = () => page.locator(".message .text").allInnerTexts();
    const edited = await shown();
    assert.equal(edited.length, 4);
    assert.equal(edited[2], "What did he find?");
    await page.reload();
    await page.locator(".message.user").first().waitFor();
    assert.deepEqual(await shown(), edited);
    await page.getByRole("button", { name: "Previous version" }).click();
    assert.equal((await shown())[2], "And then?");
    await page.keyboard.press("Alt+n");
    assert.equal(await page.locator(".message").count(), 0);
    assert.equal((await names(page)).length, 2);
    await page.getByRole("button", { name: STORY, exact: true }).click();
    assert.equal((await shown()).length, 4);
    assert.equal(await page.locator("#system").inputValue(), "You tell short stories.");
    return page;
  },

  async "an answer keeps the model, the seed and the settings that made it"() {
    const page = await open({ acceptDownloads: true });
    await page.keyboard.press("Alt+s");
    await set(page, "#set-max_tokens", "12");
    await set(page, "#set-seed", "7");
    await set(page, "#set-temperature", "0.3");
    await page.keyboard.press("Alt+s");
    await ask(page, STORY);
    const line = answers(page).first().locator(".who summary");
    const made = await line.innerText();
    assert.match(made, /^\S+ · seed 7 · temperature 0\.3$/);
    const first = await answers(page).first().locator(".text").innerText();
    // Another seed, drawn by the page, and the model's temperature.
    await page.keyboard.press("Alt+s");
    await set(page, "#set-seed", "");
    await set(page, "#set-temperature", "");
    await page.keyboard.press("Alt+s");
    const request = page.waitForRequest("**/v1/chat/completions");
    await ask(page, "And then?");
    const { seed } = (await request).postDataJSON();
    assert.ok(Number.isInteger(seed), `${seed}`);
    const second = await answers(page).nth(1).locator(".who summary").innerText();
    assert.ok(second.endsWith(`seed ${seed} · temperature 0.7`), second);
    // A server with another model signs none of them.
    const models = await (await fetch(`${address}/v1/models`)).json();
    models.data[0].id = "another-model";
    await page.route("**/v1/models", (route) => route.fulfill({ json: models }));
    await page.reload();
    await page.locator("#server").filter({ hasText: "another-model ·" }).waitFor();
    assert.equal(await line.innerText(), made);
    await line.click();
    assert.match(await answers(page).first().locator(".who dl").innerText(), /top_p\s+0\.9[^]*max_tokens\s+12/);
    // Exports say it too, and an import brings it back.
    const file = await downloaded(page, "#export");
    const told = Object.values(JSON.parse(file).conversations[0].nodes).flatMap((node) => node.made ?? []);
    assert.deepEqual(told.map((one) => [one.seed, one.settings.temperature]).sort(), [[7, 0.3], [seed, 0.7]].sort());
    await page.keyboard.press("Alt+s");
    const document = await downloaded(page, "#export-markdown");
    assert.ok(document.includes(`## ${made}\n\n${first}`), document);
    await page.locator("#forget").click();
    await page
      .locator("#import-file")
      .setInputFiles({ name: "talks.json", mimeType: "application/json", buffer: Buffer.from(file) });
    await line.waitFor();
    assert.equal(await line.innerText(), made);
    await page.unroute("**/v1/models");
    // The same settings give the same answer.
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    await line.click();
    await answers(page).first().getByRole("button", { name: "Use the seed and the settings" }).click();
    assert.equal(await page.locator("#set-seed").inputValue(), "7");
    assert.equal(await page.locator("#set-temperature").inputValue(), "0.3");
    assert.equal(await page.locator("#set-top_p").inputValue(), "", "the model's own values are not set");
    await page.getByRole("button", { name: "Regenerate the answer" }).first().click();
    await page.getByText("2 / 2").waitFor();
    await done(page);
    assert.equal(await answers(page).first().locator(".text").innerText(), first);
    return page;
  },

  async "a page whose script does not come says so, and a proxy's origin is named"() {
    const page = await open({ prepare: (page) => page.route("**/page/app.js", (route) => route.abort()), bare: true });
    await page.locator("#not-loaded").waitFor({ state: "visible" });
    assert.match(await page.locator("#not-loaded").innerText(), /script did not load/);
    await page.unroute("**/page/app.js");
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    assert.equal(await page.locator("#not-loaded").count(), 0);
    page.troubles = [];
    // A proxy that passes the browser's origin on, but not the host.
    for (const path of ["", "page/app.js", "page/style.css"]) {
      const answer = await fetch(`${address}/${path}`, { headers: { Origin: "https://chat.example.com" } });
      assert.equal(answer.status, 200, path);
    }
    await page.route("**/v1/chat/completions", async (route) => {
      const headers = { ...route.request().headers(), origin: "https://chat.example.com" };
      const body = route.request().postData();
      const answer = await fetch(`${address}/v1/chat/completions`, { method: "POST", headers, body });
      await route.fulfill({ status: answer.status, json: await answer.json() });
    });
    await say(page, "Hello");
    await page.locator("#notice").waitFor();
    assert.match(
      await notice(page),
      /origin https:\/\/chat\.example\.com is not allowed; start the server with --cors https:\/\/chat\.example\.com/,
    );
    assert.equal(await page.locator("#input").inputValue(), "Hello");
    page.troubles = page.troubles.filter((text) => !/Failed to load resource/.test(text));
    return page;
  },

  async "the theme is the reader's, from the first moment on"() {
    const page = await open({ colorScheme: "light" });
    const back = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await back();
    await page.keyboard.press("Alt+s");
    await page.locator("#theme").selectOption("dark");
    const dark = await back();
    assert.notEqual(dark, light);
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    assert.equal(await back(), dark);
    await accessible(page, "dark by choice");
    await page.keyboard.press("Alt+s");
    await page.locator("#theme").selectOption("");
    assert.equal(await back(), light);
    // Every sampling parameter explains itself, to the pointer and to the keyboard.
    const fields = await page.locator("#sampling .field").count();
    assert.equal(await page.locator("#sampling .help").count(), fields);
    await page.locator("#sampling details").evaluateAll((all) => all.forEach((group) => (group.open = true)));
    const help = page.locator(".field", { has: page.locator("#set-top_n_sigma") }).locator(".help");
    await help.focus();
    assert.match(await page.locator("#tip").innerText(), /standard deviations of the best/);
    assert.match(await help.getAttribute("aria-label"), /Top n sigma: Keep logits within/);
    await page.locator("#input").focus();
    assert.equal(await page.locator("#tip").isVisible(), false);
    return page;
  },

  async "code can be wrapped and downloaded, and footnotes are followed"() {
    const page = await open({
      acceptDownloads: true,
      prepare: (page) =>
        page.route("**/v1/chat/completions", (route) => {
          const content = `A claim[^1].\n\n\`\`\`python\nprint("${"x".repeat(400)}")\n\`\`\`\n\n[^1]: Its source.\n`;
          const event = { model: "m", choices: [{ index: 0, delta: { content }, finish_reason: "stop" }] };
          return route.fulfill({
            contentType: "text/event-stream",
            body: `data: ${JSON.stringify(event)}\n\ndata: [DONE]\n\n`,
          });
        }),
    });
    await ask(page, "Hello");
    // Colors come late and draw the message anew.
    await page.locator(".code [class^=hljs-]").first().waitFor();
    const isWide = () => page.locator(".code pre").evaluate((node) => node.scrollWidth > node.clientWidth);
    assert.equal(await isWide(), true);
    await page.getByRole("button", { name: "Wrap long lines of code" }).click();
    assert.equal(await isWide(), false);
    assert.match(await downloaded(page, "[aria-label='Download this code as a file']"), /^print\("x{400}"\)$/);
    await page.locator(".text sup a").click();
    assert.equal(
      await page.evaluate(() => document.getElementById(location.hash.slice(1)).innerText),
      "Its source. ↩",
    );
    await accessible(page, "code and footnotes");
    return page;
  },

  async "two tabs keep every word of both"() {
    const one = await open();
    await brief(one);
    await ask(one, "Hello");
    const two = await open({ context: one.context() });
    // Each goes its own way: conversations of their own, then both in the first one.
    await two.keyboard.press("Alt+n");
    await ask(two, "Hello from the second tab");
    await one.keyboard.press("Alt+n");
    await ask(one, "Hello from the first tab");
    await two.getByRole("button", { name: "Hello", exact: true }).click();
    await one.getByRole("button", { name: "Hello", exact: true }).click();
    await Promise.all([ask(one, "Are you one?"), ask(two, "Are you two?")]);
    await one.getByRole("button", { name: "Regenerate the answer" }).first().waitFor();
    for (const page of [one, two]) {
      await page.reload();
      await page.locator(".message").first().waitFor();
      assert.deepEqual((await names(page)).sort(), ["Hello", "Hello from the first tab", "Hello from the second tab"]);
    }
    const kept = await one.evaluate(async () => {
      const open = indexedDB.open("moebius");
      await new Promise((done) => (open.onsuccess = done));
      const all = open.result.transaction("conversations").objectStore("conversations").getAll();
      await new Promise((done) => (all.onsuccess = done));
      return all.result.find((c) => c.name === "Hello");
    });
    const asked = Object.values(kept.nodes)
      .filter((n) => n.role === "user")
      .map((n) => n.content);
    assert.deepEqual(asked.sort(), ["Are you one?", "Are you two?", "Hello"]);
    const answered = Object.values(kept.nodes).filter((n) => n.role === "assistant" && n.content);
    assert.equal(answered.length, 3);
    assert.deepEqual(two.troubles, []);
    return one;
  },

  async "what the first version of the page kept is taken over"() {
    const id = (n) => n.toString(16).padStart(16, "0");
    const question = { id: id(1), parent: null, children: [id(2)], shown: 0, role: "user", content: "An old question" };
    const reply = {
      id: id(2),
      parent: id(1),
      children: [],
      shown: 0,
      role: "assistant",
      content: "An old answer",
      reasoning: "",
    };
    const old = {
      id: id(9),
      name: "An old talk",
      system: "Be old.",
      nodes: { [id(1)]: question, [id(2)]: reply },
      root: [id(1)],
      shown: 0,
    };
    const page = await open();
    await page.evaluate(
      (value) => localStorage.setItem("moebius.conversations", value),
      JSON.stringify({ list: [old], current: old.id }),
    );
    for (let load = 0; load < 2; load++) {
      await page.reload();
      await page.getByRole("button", { name: "An old talk", exact: true }).click();
      assert.deepEqual(await page.locator(".message .text").allInnerTexts(), ["An old question", "An old answer"]);
      assert.equal(await page.locator("#system").inputValue(), "Be old.");
      assert.equal(await page.evaluate(() => localStorage.getItem("moebius.conversations")), null);
    }
    return page;
  },

  async "copying works without the clipboard's API, as over plain http"() {
    // What a page from another machine's plain http has.
    const page = await open({
      prepare: (page) =>
        page.addInitScript(() => Object.defineProperty(Navigator.prototype, "clipboard", { value: undefined })),
    });
    await brief(page);
    await ask(page, "Why is the sky blue?");
    const text = await answers(page).locator(".text").innerText();
    await page.getByRole("button", { name: "Copy this answer" }).click();
    await page.getByText("Copied ✓").waitFor();
    await page.locator("#input").focus();
    await page.keyboard.press("Control+v");
    assert.equal((await page.locator("#input").inputValue()).trim(), text.trim());
    return page;
  },

  async "markdown becomes elements, and never markup"() {
    const page = await open();
    const found = await page.evaluate(async () => {
      const { render } = await import("./page/markdown.js");
      const node = document.createElement("div");
      const source = [
        "# Title",
        "",
        "Some *soft* and **loud** `code` with snake_case_words and 2 * 3 * 4.",
        "",
        "1. one",
        "2. two",
        "   - inner",
        "- [ ] to do",
        "- [x] done",
        "",
        "| a | b |",
        "|---|--:|",
        "| 1 | <img src=x onerror=alert(1)> |",
        "",
        "```rust",
        'let x = "<script>";',
        "```",
        "[good](https://example.org) [bad](javascript:alert(1)) costs $5 or $6",
        "> quoted",
        "",
        "```",
        "never closed",
      ].join("\n");
      render(source, node);
      const all = node.innerHTML;
      const right = node.querySelectorAll("td.right").length;
      const boxes = [...node.querySelectorAll("input")].map((box) => box.checked);
      for (let n = 0; n <= source.length; n++) render(source.slice(0, n), node);
      render(
        "*".repeat(2000) +
          "[".repeat(2000) +
          "> ".repeat(500) +
          "$".repeat(2000) +
          "\\(".repeat(2000) +
          "\n\\[\n".repeat(500),
        node,
      );
      // No text takes its reader's time: every mark again and again, never closed.
      const marks = [
        "*",
        "**a",
        "[",
        "[a](",
        "$a",
        "$$",
        "\\(",
        "\\[",
        "`a",
        "_a",
        "~~",
        "![",
        "https://a",
        "- a\n",
        "> ",
        "|a",
        "\\[\n",
      ];
      const slow = [];
      for (const mark of marks) {
        const start = performance.now();
        render(mark.repeat(20_000 / mark.length), node);
        if (performance.now() - start > 2000) slow.push(mark);
      }
      render(source, node);
      const tags = [...new Set([...node.querySelectorAll("*")].map((e) => e.tagName))].sort();
      return {
        all,
        right,
        boxes,
        tags,
        links: [...node.querySelectorAll("a")].map((a) => a.href),
        language: node.querySelector(".language").textContent,
        slow,
      };
    });
    assert.deepEqual(found.tags, [
      "A",
      "BLOCKQUOTE",
      "BUTTON",
      "CODE",
      "DIV",
      "EM",
      "H3",
      "INPUT",
      "LI",
      "OL",
      "P",
      "PRE",
      "SPAN",
      "STRONG",
      "TABLE",
      "TBODY",
      "TD",
      "TH",
      "THEAD",
      "TR",
      "UL",
    ]);
    assert.deepEqual(found.links, ["https://example.org/"]);
    assert.deepEqual([found.right, found.boxes, found.language, found.slow], [1, [false, true], "rust", []]);
    assert.match(found.all, /&lt;img src=x/);
    assert.match(found.all, /snake_case_words and 2 \* 3 \* 4/);
    assert.match(found.all, /costs \$5 or \$6/);
    return page;
  },

  async "formulas in every form, coloured code, and hostile ones stay inert"() {
    const page = await open();
    const loaded = () =>
      page.evaluate(() =>
        performance
          .getEntriesByType("resource")
          .map((e) => e.name)
          .filter((name) => name.includes("vendor")),
      );
    assert.deepEqual(await loaded(), [], "libraries are loaded only when they are needed");
    const draw = (source) =>
      page.evaluate(async (source) => {
        const [{ render }, { RICH }] = await Promise.all([import("./page/markdown.js"), import("./page/rich.js")]);
        const node =
          document.getElementById("drawn") ??
          document.getElementById("messages").appendChild(document.createElement("li"));
        node.id = "drawn";
        const text =
          node.firstChild ?? node.appendChild(Object.assign(document.createElement("div"), { className: "text" }));
        const start = performance.now();
        render(source, text, RICH);
        const tags = [...new Set([...text.querySelectorAll("*")].map((e) => e.localName))];
        const attributes = [...new Set([...text.querySelectorAll("*")].flatMap((e) => e.getAttributeNames()))];
        return {
          ms: performance.now() - start,
          formulas: text.querySelectorAll(".katex").length,
          displays: text.querySelectorAll(".katex-display").length,
          coloured: text.querySelectorAll("[class^=hljs-]").length,
          code: text.querySelector("pre code")?.textContent,
          tags,
          attributes,
          text: text.innerText,
        };
      }, source);
    const sources = [
      "Inside \\(a^2+b^2=c^2\\) and $e^{i\\pi}=-1$ of a line.",
      "\\[\n\\int_0^1 x\\,dx = \\frac12\n\\]",
      "$$\\sum_{k=1}^n k$$",
      "\\begin{align}a&=b\\\\c&=d\\end{align}",
      "- in a list: \\(x_1\\)",
    ];
    const code = 'fn main() { let s = "<img src=x onerror=alert(1)>"; } // <script>alert(1)</script>';
    const all = [...sources, "```rust", code, "```"].join("\n\n");
    let drawn = await draw(all);
    for (let i = 0; i < 50 && !(drawn.formulas && drawn.coloured); i++) {
      await page.waitForTimeout(100);
      drawn = await draw(all);
    }
    assert.deepEqual([drawn.formulas, drawn.displays], [6, 3]);
    assert.ok(drawn.coloured >= 4, `${drawn.coloured} spans`);
    assert.equal(drawn.code.trim(), code);
    await picture(page, "formulas");
    // No address, no picture, no style sheet, no script; macros without end and giant sizes end as text.
    const hostile = [
      "\\(\\href{javascript:alert(1)}{x}\\)",
      "\\(\\url{https://example.org}\\)",
      "\\(\\includegraphics{https://example.org/x.png}\\)",
      "\\(\\htmlStyle{position:fixed}{x}\\)",
      "\\(\\htmlData{a=b}{x} \\htmlId{send}{x} \\htmlClass{pending}{x}\\)",
      "\\(\\def\\a{\\a\\a}\\a\\)",
      "\\(\\def\\a#1{#1#1#1#1}\\a{\\a{\\a{\\a{\\a{\\a{\\a{x}}}}}}}\\)",
      "\\(\\rule{99999em}{99999em}\\)",
      "\\(<img src=x onerror=alert(1)>\\)",
      `\\(${"{".repeat(1500)}\\)`,
      `\\(${"x".repeat(5000)}\\)`,
      "```html\n<img src=x onerror=alert(1)><script>alert(1)</script>\n```",
    ].join("\n\n");
    const inert = await draw(hostile);
    const known = ["a", "img", "script", "iframe", "object", "form", "link", "style"];
    assert.deepEqual(
      inert.tags.filter((tag) => known.includes(tag)),
      [],
    );
    assert.deepEqual(
      inert.attributes.filter((name) => /^on|href|src|^data-/.test(name)),
      [],
    );
    assert.ok(inert.ms < 2000, `${inert.ms} ms`);
    const widest = await page.evaluate(() =>
      Math.max(...[...document.querySelectorAll("#drawn .rule")].map((e) => parseFloat(e.style.borderRightWidth)), 0),
    );
    assert.ok(widest <= 20, `${widest} em`);
    // Code that keeps highlight.js busy for seconds keeps the page free, and the next block gets its colors.
    const busy = `\`\`\`java\n${"$".repeat(20_000)}\n\`\`\``;
    assert.ok((await draw(busy)).ms < 500);
    const wait = await page.evaluate(async () => {
      let longest = 0;
      for (let i = 0; i < 20; i++) {
        const start = performance.now();
        await new Promise((done) => setTimeout(done, 100));
        longest = Math.max(longest, performance.now() - start - 100);
      }
      return longest;
    });
    assert.ok(wait < 1000, `the page stood still for ${wait} ms`);
    for (let i = 0; i < 60 && !(drawn = await draw(`${busy}\n\n\`\`\`c\nint a = 1; // one\n\`\`\``)).coloured; i++)
      await page.waitForTimeout(100);
    assert.ok(drawn.coloured >= 2 && drawn.code.startsWith("$$$$"), `${drawn.coloured}`);
    // So do formulas beyond their share of the time.
    const rows = (n) => `\\[\\begin{matrix}${"&".repeat(1900)}${n}\\end{matrix}\\]`;
    const many = await draw(Array.from({ length: 40 }, (_, n) => rows(n)).join("\n\n"));
    assert.ok(many.ms < 20000 && many.formulas < 40, `${many.ms} ms, ${many.formulas} formulas`);
    await page.locator("#drawn").evaluate((node) => node.remove());
    return page;
  },

  async "conversations are found, renamed, deleted and brought back, exported and imported"() {
    const page = await open({ acceptDownloads: true });
    await brief(page, 12);
    await ask(page, "**Bold** words about a penguin");
    await page.keyboard.press("Alt+n");
    await ask(page, "Hello");
    assert.deepEqual((await names(page)).sort(), ["Bold words about a penguin", "Hello"]);
    await page.locator("#search").fill("PENGUIN");
    assert.deepEqual(await names(page), ["Bold words about a penguin"]);
    await page.locator("#search").fill("nowhere");
    assert.deepEqual(await names(page), []);
    await page.locator("#search").fill("");
    await page.getByRole("button", { name: "Rename “Hello”" }).click();
    await page.keyboard.type("A greeting");
    await page.keyboard.press("Enter");
    await page.getByRole("button", { name: "A greeting", exact: true }).waitFor();
    const file = await downloaded(page, "#export");
    assert.equal(JSON.parse(file).conversations.length, 2);
    await page.getByRole("button", { name: "Delete “A greeting”" }).click();
    assert.deepEqual(await names(page), ["Bold words about a penguin"]);
    await page.getByRole("button", { name: "Undo" }).click();
    await page.getByRole("button", { name: "A greeting", exact: true }).waitFor();
    await page.keyboard.press("Alt+s");
    await page.locator("#forget").click();
    assert.deepEqual(await names(page), ["New conversation"]);
    await page.reload();
    assert.deepEqual(await names(page), ["New conversation"]);
    const give = (text) =>
      page
        .locator("#import-file")
        .setInputFiles({ name: "talks.json", mimeType: "application/json", buffer: Buffer.from(text) });
    await give(file);
    await page.getByRole("button", { name: "A greeting", exact: true }).click();
    assert.equal((await page.locator(".message .text").allInnerTexts())[0], "Hello");
    // A file of someone else's: loops, foreign keys and markup in it are dropped or shown as text.
    const id = "00000000000000aa";
    const loop = {
      id,
      name: "<img src=x>",
      nodes: {
        [id]: { id, parent: id, children: [id], role: "user", content: "<b>x</b>", evil: 1 },
        ["__proto__"]: {},
      },
      root: [id, id, "../x"],
      shown: 7,
    };
    await give(JSON.stringify({ format: "moebius-conversations", version: 1, conversations: [loop, null, { id: 3 }] }));
    await page.getByRole("button", { name: "<img src=x>", exact: true }).click();
    assert.deepEqual(await page.locator(".message .text").allInnerTexts(), ["<b>x</b>"]);
    // What another program wrote has other ids; what is refused is told with its reason.
    const foreign = (id, role) => ({ id, name: id, nodes: { 1: { role, content: "From elsewhere" } }, root: ["1"] });
    const all = [...Array.from({ length: 40 }, (_, i) => foreign(`talk-${i}`, "user")), foreign("x", "system"), 7, null];
    for (let time = 0; time < 2; time++) {
      await give(JSON.stringify({ format: "moebius-conversations", version: 1, conversations: all }));
      await page.locator("#notice").filter({ hasText: "Imported 40 conversations" }).waitFor();
      assert.match(
        await notice(page),
        /Refused 3 conversations: 1 whose messages form no tree, 2 not a conversation\.$/,
      );
      const n = (await names(page)).filter((name) => name.startsWith("talk-")).length;
      assert.equal(n, 40, "a second import merges");
      await page.getByRole("button", { name: "talk-3", exact: true }).click();
      assert.equal(await page.locator("#notice").isVisible(), false);
    }
    await give('{"a": 1}');
    await page.locator("#notice").waitFor();
    assert.match(await notice(page), /does not hold conversations/);
    return page;
  },

  async "an answer can be continued and edited"() {
    const page = await open();
    await brief(page, 10);
    await ask(page, STORY);
    const begun = await answers(page).locator(".text").innerText();
    await page.getByRole("button", { name: "Continue the answer" }).click();
    await page.waitForFunction(
      (n) => document.querySelector(".message.assistant .text").innerText.length > n,
      begun.length + 5,
    );
    await done(page);
    const longer = await answers(page).locator(".text").innerText();
    assert.ok(longer.startsWith(begun), `${begun} | ${longer}`);
    await page.getByRole("button", { name: "Edit this answer" }).click();
    await page.getByRole("textbox", { name: "Edit answer" }).fill("Once there was a fox whose hat was");
    await page.getByRole("button", { name: "Save and continue" }).click();
    await page.waitForFunction(() =>
      /whose hat was.{8}/s.test(document.querySelector(".message.assistant .text")?.innerText ?? ""),
    );
    await done(page);
    assert.match(await answers(page).innerText(), /2 \/ 2/);
    await page.getByRole("button", { name: "Previous version" }).click();
    assert.equal(await answers(page).locator(".text").innerText(), longer);
    return page;
  },

  async "text files are dropped, pasted and read; others are refused in words"() {
    const page = await open();
    await brief(page, 8);
    await drop(page, "#chat", "drop", [["notes.md", "Some ``` fence\nand words"]]);
    await drop(page, "#input", "paste", [["b.txt", "Grüße"]]);
    await page.getByText("b.txt").waitFor();
    assert.equal(await page.locator("#files li").count(), 2);
    await drop(page, "#chat", "drop", [["photo.png", "\u0000\u0001"]]);
    await page.locator("#notice").waitFor();
    assert.match(await notice(page), /photo\.png is not a text file/);
    await ask(page, "Read this");
    const sent = await page.locator(".message.user .text").innerText();
    assert.equal(sent, "Read this\n\nnotes.md:\n````\nSome ``` fence\nand words\n````\n\nb.txt:\n```\nGrüße\n```");
    assert.equal(await page.locator("#files li").count(), 0);
    return page;
  },

  async "images are dropped, pasted and picked, shown small, removed and seen"() {
    const blind = await open();
    await drop(blind, "#chat", "drop", [["a.png", "x", "image/png"]]);
    await blind.locator("#notice").waitFor();
    assert.match(await notice(blind), /a\.png is an image: this model sees none/);
    assert.equal(await blind.locator("#attach-image").isVisible(), false);
    if (!process.env.SEEING) {
      console.log("left out: SEEING names no server");
      return blind;
    }
    await blind.context().close();
    const page = await open({ at: process.env.SEEING });
    await page.keyboard.press("Alt+s");
    await set(page, "#set-max_tokens", "4");
    await set(page, "#set-temperature", "0");
    await page.keyboard.press("Alt+s");
    const file = "crates/conformance/tests/data/images/qwen3_vl_moe/images/rgba.png";
    const png = await readFile(new URL(`../../${file}`, import.meta.url));
    await drop(page, "#chat", "drop", [["a.png", png, "image/png"]]);
    await drop(page, "#input", "paste", [["b.png", png, "image/png"]]);
    const pick = page.locator("#attach-image").click();
    const [chooser] = await Promise.all([page.waitForEvent("filechooser"), pick]);
    assert.equal(await page.locator("#pick-image").getAttribute("accept"), "image/*");
    assert.ok(chooser.isMultiple());
    const two = ["c.png", "d.png"].map((name) => ({ name, mimeType: "image/png", buffer: png }));
    await chooser.setFiles(two);
    await page.locator("#files img").nth(3).waitFor();
    await page.getByRole("button", { name: "Remove b.png" }).click();
    await drop(page, "#chat", "drop", [["e.png", "no image", "image/png"]]);
    await page.locator("#notice").waitFor();
    assert.match(await notice(page), /e\.png is an image that this browser cannot read/);
    assert.equal(await page.locator("#files img").count(), 3);
    await accessible(page, "images");
    await picture(page, "images");
    const isChat = (request) => request.url().endsWith("/v1/chat/completions");
    const [request] = await Promise.all([page.waitForRequest(isChat), say(page, "What?")]);
    const parts = request.postDataJSON().messages.at(-1).content;
    assert.deepEqual(
      parts.map((part) => part.image_url?.url ?? part.text),
      [...Array(3).fill(`data:image/png;base64,${png.toString("base64")}`), "What?"],
    );
    await page.locator(".message.assistant .tools").waitFor();
    await done(page);
    assert.equal(await page.locator("#files img").count(), 0);
    // They outlive a reload, and an edit of their message.
    await page.reload();
    const shown = page.locator(".message.user .images img");
    await shown.nth(2).waitFor();
    assert.deepEqual(await shown.evaluateAll((nodes) => nodes.map((node) => node.naturalWidth)), [48, 48, 48]);
    await page.getByRole("button", { name: "Edit this message" }).click();
    await page.getByRole("textbox", { name: "Edit message" }).fill("And now?");
    await page.keyboard.press("Enter");
    await done(page);
    assert.equal(await shown.count(), 3);
    // A photo is made smaller; a message may be an image alone.
    await page.evaluate(async () => {
      const canvas = document.createElement("canvas");
      [canvas.width, canvas.height] = [3000, 300];
      const pixels = new ImageData(3000, 300);
      for (let i = 0; i < pixels.data.length; i++) pixels.data[i] = (i * i * 7919) >> 5;
      canvas.getContext("2d").putImageData(pixels, 0, 0);
      const blob = await new Promise((resolve) => canvas.toBlob(resolve));
      const data = new DataTransfer();
      data.items.add(new File([blob], "photo.png", { type: "image/png" }));
      const init = { dataTransfer: data, bubbles: true, cancelable: true };
      document.querySelector("#chat").dispatchEvent(new DragEvent("drop", init));
    });
    const photo = page.locator("#files img");
    await photo.waitFor();
    const [uri, width] = await photo.evaluate((node) => [node.src, node.naturalWidth]);
    assert.ok(uri.startsWith("data:image/jpeg;base64,"), uri.slice(0, 40));
    assert.equal(width, 2048);
    await page.locator("#send").click();
    await page.locator(".message.assistant .tools").nth(1).waitFor();
    await done(page);
    assert.equal(await shown.count(), 4);
    return page;
  },

  async "settings hold every sampler of the server, their ranges, schemas and presets"() {
    const page = await open();
    await page.keyboard.press("Alt+s");
    const { paths } = await (await fetch(`${address}/openapi.json`)).json();
    const fields = (path) => Object.keys(paths[path].post.requestBody.content["application/json"].schema.properties);
    const [first, ...others] = ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"].map(fields);
    // What all APIs share is the sampling; the rest of it is no sampler, or has a field of its own on the page.
    const apart = [
      "cache_salt",
      "format",
      "grammar",
      "guided_choice",
      "guided_grammar",
      "guided_json",
      "guided_regex",
      "guided_whitespace_pattern",
      "json_schema",
      "model",
      "open_objects",
      "regex",
      "repetition_penalty",
      "response_format",
      "stream",
      "structured_outputs",
      "temp",
      "typical",
      "user",
    ];
    const samplers = first.filter((name) => others.every((names) => names.includes(name)) && !apart.includes(name));
    const shown = await page
      .locator("#sampling [id^=set-]")
      .evaluateAll((nodes) => nodes.map((node) => node.id.slice(4)));
    assert.ok(samplers.length > 20, `${samplers}`);
    assert.deepEqual(
      samplers.filter((name) => !shown.includes(name)),
      [],
    );
    assert.equal(await page.locator("#set-temperature").getAttribute("placeholder"), "0.7");
    await set(page, "#set-temperature", "-5");
    assert.match(await page.locator("#set-temperature-why").innerText(), /between 0 and 100/);
    await say(page, "Hello");
    await page.locator("#notice").waitFor();
    assert.match(await notice(page), /Temperature must be between 0 and 100/);
    assert.equal(await page.locator("#input").inputValue(), "Hello", "the words are kept");
    await page.getByRole("button", { name: "Reset samplers" }).click();
    assert.equal(await page.locator("#set-temperature").inputValue(), "");
    // A body holds what the fields say.
    await set(page, "#set-dry_multiplier", "0.8");
    await set(page, "#set-stop", '["hat"]');
    await set(
      page,
      "#schema",
      JSON.stringify({
        type: "object",
        properties: { legs: { enum: [2, 4] } },
        required: ["legs"],
        additionalProperties: false,
      }),
    );
    const request = page.waitForRequest("**/v1/chat/completions");
    await ask(page, "How many legs does a fox have?");
    const body = (await request).postDataJSON();
    assert.deepEqual([body.dry_multiplier, body.stop, body.response_format.type], [0.8, ["hat"], "json_schema"]);
    const answer = JSON.parse(await answers(page).last().locator(".text").innerText());
    assert.ok([2, 4].includes(answer.legs), JSON.stringify(answer));
    await page.locator("#schema-on").waitFor();
    await page.locator("#system").fill("You are a pirate.");
    await page.locator("#save-preset").click();
    await page.locator("#preset-name").fill("pirate");
    await page.keyboard.press("Enter");
    // It is in the list once it is kept.
    await page.locator("#preset option", { hasText: "pirate" }).waitFor({ state: "attached" });
    await page.locator("#input").fill("Half a thought");
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    assert.equal(await page.locator("#input").inputValue(), "Half a thought", "what is not sent yet is kept");
    await page.keyboard.press("Alt+n");
    await page.keyboard.press("Alt+s");
    await page.locator("#preset").selectOption("pirate");
    assert.equal(await page.locator("#system").inputValue(), "You are a pirate.");
    return page;
  },

  async "tokens show what else was likely, and mark their experts"() {
    const page = await open();
    await brief(page, 30);
    await page.keyboard.press("Alt+r");
    await ask(page, STORY);
    const text = await answers(page).locator(".text").innerText();
    await page.getByRole("button", { name: "Show the tokens" }).click();
    const tokens = page.locator(".token");
    assert.ok(text.startsWith((await tokens.allInnerTexts()).slice(0, 5).join("").trim()), text);
    await tokens.nth(4).hover();
    assert.equal((await page.locator("#tip tr").count()) >= 5, true);
    assert.match(await page.locator("#tip .chosen").innerText(), /%/);
    await tokens.nth(4).click();
    assert.match(await page.locator("#routing-cell").innerText(), /experts of token 5/);
    await picture(page, "tokens");
    await accessible(page, "tokens and experts");
    return page;
  },

  async "the experts' view counts all answers, has its cursor, a cache and CSV"() {
    const page = await open({ acceptDownloads: true });
    await brief(page, 40);
    const counted = async () => (await (await fetch(`${address}/v1/routing`)).json()).tokens;
    const before = await counted();
    // The panel is closed: the answer counts all the same.
    await ask(page, STORY);
    assert.ok((await counted()) >= before + 20, `${before} and ${await counted()}`);
    await page.keyboard.press("Alt+r");
    await page.locator("#routing-all").check();
    await page.locator("#routing-text").filter({ hasText: "tokens of all answers" }).waitFor();
    await page.locator("#routing-all").uncheck();
    await page.getByRole("button", { name: "Regenerate the answer" }).click();
    await page.locator(".message.pending").waitFor({ state: "detached" });
    await done(page);
    await page.locator("#grid").hover({ position: { x: 60, y: 40 } });
    assert.match(
      await page.locator("#routing-cell").innerText(),
      /layer 1, expert 1: \d+ of \d+ tokens .*times the average/,
    );
    await page.locator("#grid").focus();
    await page.keyboard.press("ArrowDown");
    await page.keyboard.press("ArrowRight");
    assert.match(await page.locator("#routing-cell").innerText(), /layer \d+, expert \d+/);
    assert.match(
      await page.locator("#cache-text").innerText(),
      /32 busiest of all 128 experts serve \d+ %.*LRU cache of that size would hit \d+/,
    );
    const counts = (await downloaded(page, "#routing-csv")).trim().split("\n");
    assert.equal(counts.length, 1 + 8 * 16);
    const rows = counts.slice(1).map((line) => line.split(",").map(Number));
    assert.equal(
      rows.reduce((sum, row) => sum + row[2], 0),
      rows[0][3] * 8 * 4,
    );
    const trace = (await downloaded(page, "#trace-csv")).trim().split("\n");
    assert.equal(trace.length, 1 + rows[0][3] * 8);
    await page.locator("#routing-sort").check();
    await picture(page, "experts");
    return page;
  },

  async "experts opened after an answer show it, and after a reload are computed"() {
    const page = await open();
    await brief(page, 30);
    await ask(page, STORY);
    const text = () => page.locator("#routing-text").innerText();
    await page.keyboard.press("Alt+r");
    const recorded = await text();
    assert.match(recorded, /^[1-9]\d* tokens of this answer/);
    assert.equal(await page.locator("#routing-compute").isVisible(), false);
    const cells = () => page.locator("#top-experts tbody").innerText();
    const busiest = await cells();
    // The last token of a step may come without its text.
    await page.getByRole("button", { name: "Show the tokens" }).click();
    assert.ok((await page.locator(".token").count()) >= 25);
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    await page.keyboard.press("Alt+r");
    assert.match(await text(), /experts process each token\.$/);
    await page.locator("#routing-compute").click();
    await page.locator("#routing-text").filter({ hasText: "tokens of this answer" }).waitFor();
    assert.equal(await text(), recorded);
    assert.equal(await cells(), busiest);
    assert.equal(await page.locator(".message.assistant").count(), 1, "the answer is not written again");
    // An answer that comes out differently is not passed off as this one.
    await page.keyboard.press("Alt+s");
    await page.locator("#system").fill("You are a pirate.");
    await page.locator("#system").blur();
    // It is saved after the event.
    await page.waitForTimeout(1000);
    await page.reload();
    await page.locator("#server").filter({ hasText: "·" }).waitFor();
    await page.keyboard.press("Alt+r");
    await page.locator("#routing-compute").click();
    await page.locator("#notice").waitFor();
    assert.match(await notice(page), /gives another answer now/);
    await done(page);
    return page;
  },

  async "48 layers of 128 experts can be read"() {
    const routers = Array.from({ length: 48 }, (_, layer) => ({
      layer,
      n_expert: 128,
      n_used: 8,
      counts: new Array(128).fill(0),
    }));
    // As loads are: a few experts do much.
    let seed = 7;
    const random = () => (seed = (seed * 1103515245 + 12345) % 2147483648) / 2147483648;
    for (const router of routers)
      for (let n = 0; n < 8000; n++) router.counts[Math.floor(128 * random() ** 2 + router.layer * 5) % 128]++;
    const answer = { object: "routing", tokens: 1000, complete: true, routers };
    const page = await open({
      prepare: (page) => page.route("**/v1/routing*", (route) => route.fulfill({ json: answer })),
    });
    await page.keyboard.press("Alt+r");
    await page.locator("#routing-all").check();
    await page.locator("#routing-text").filter({ hasText: "48 layers" }).waitFor();
    const { width, height } = await page.locator("#grid").boundingBox();
    assert.ok((width - 34) / 128 >= 4 && (height - 18) / 48 >= 7, `${width} x ${height}`);
    assert.equal(
      await page.locator("#grid-box").evaluate((box) => box.scrollWidth > box.clientWidth),
      false,
      "all of it is in sight",
    );
    await page.locator("#grid").hover({ position: { x: 200, y: 200 } });
    assert.match(await page.locator("#routing-cell").innerText(), /layer \d+, expert \d+: /);
    await picture(page, "experts-48x128");
    await page.locator("#routing-sort").check();
    await picture(page, "experts-48x128-sorted");
    return page;
  },

  async "a dense model has no experts to show"() {
    const page = await open({
      prepare: (page) =>
        page.route("**/v1/routing*", (route) => route.fulfill({ json: { tokens: 0, complete: true, routers: [] } })),
    });
    assert.equal(await page.locator("#toggle-routing").isVisible(), false);
    await page.keyboard.press("Alt+r");
    assert.equal(await page.locator("#routing").isVisible(), false);
    assert.doesNotMatch(await page.locator("#welcome").innerText(), /mixture/);
    return page;
  },

  async "an empty page says what this model is and how to get another"() {
    const page = await open();
    const text = await page.locator("#welcome").innerText();
    for (const part of [
      /28\.9 M parameters, 8 layers with 16 experts/,
      /tiny model is built into the program/,
      /not an assistant/,
      /moebius serve -m/,
    ])
      assert.match(text, part);
    await picture(page, "empty");
    await accessible(page, "empty");
    await page.getByRole("button", { name: "Send: Why is the sky blue?" }).click();
    await page.locator(".message.assistant .tools").waitFor();
    assert.equal(await page.locator("#welcome").isVisible(), false);
    await accessible(page, "conversation");
    await page.keyboard.press("Alt+s");
    await page.locator("#sampling details").evaluateAll((all) => all.forEach((group) => (group.open = true)));
    await accessible(page, "settings");
    await picture(page, "settings");
    return page;
  },

  async "what goes wrong is told in words, and nothing written is lost"() {
    const page = await open();
    const answerWith = (reply) => page.route("**/v1/chat/completions", reply);
    for (const [reply, told] of [
      [(route) => route.abort(), /server does not answer/],
      [
        (route) =>
          route.fulfill({ status: 401, json: { error: { message: "send it as `Authorization: Bearer KEY`" } } }),
        /requires an API key: enter it under Settings/,
      ],
      [(route) => route.fulfill({ status: 429, json: { error: { message: "busy" } } }), /busy with other answers/],
      [
        (route) =>
          route.fulfill({
            status: 400,
            json: { error: { message: "prompt is too long: 2014 tokens, context 1024 (server flag --ctx)" } },
          }),
        /no longer fits the model’s context/,
      ],
      [(route) => route.fulfill({ status: 502, body: "<html>" }), /server failed/],
    ]) {
      await answerWith(reply);
      await say(page, "Words to keep");
      await page.locator("#notice").filter({ hasText: told }).waitFor();
      assert.equal(await page.locator("#input").inputValue(), "Words to keep");
      assert.equal(await page.locator(".message").count(), 0, "errors do not pile up");
      await page.unroute("**/v1/chat/completions");
    }
    await page.locator("#input").fill("");
    // A connection that breaks keeps what came.
    const chunk = { choices: [{ index: 0, delta: { content: "Half an ans" } }] };
    await answerWith((route) =>
      route.fulfill({ contentType: "text/event-stream", body: `data: ${JSON.stringify(chunk)}\n\n` }),
    );
    await say(page, "Words to keep");
    await page.locator(".failed").waitFor();
    assert.match(await page.locator(".failed").innerText(), /broke off/);
    assert.equal(await answers(page).locator(".text").innerText(), "Half an ans");
    page.troubles = page.troubles.filter((text) => !/Failed to load resource/.test(text));
    return page;
  },

  async "a browser without room, or without a database, says so and goes on"() {
    for (const [breaks, told] of [
      [
        () =>
          (IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
          }),
        /storage is full/,
      ],
      [
        () =>
          (IDBFactory.prototype.open = () => {
            throw new DOMException("private", "InvalidStateError");
          }),
        /stores nothing/,
      ],
    ]) {
      const page = await open({ prepare: (page) => page.addInitScript(breaks) });
      await brief(page, 8);
      await ask(page, "Hello");
      await page.locator("#notice").filter({ hasText: told }).waitFor();
      assert.equal(await page.locator(".message").count(), 2);
      assert.deepEqual(page.troubles, []);
      await page.context().close();
    }
    return open();
  },

  async "a phone has room for it, in the dark too"() {
    const page = await open({ viewport: { width: 360, height: 640 }, colorScheme: "dark", hasTouch: true });
    await say(page, STORY);
    await done(page);
    await picture(page, "phone");
    await accessible(page, "phone, dark");
    await page.locator("#open-side").click();
    await page.locator("#side.open").waitFor();
    await picture(page, "phone-list");
    await page.locator("#close-side").click();
    await page.locator("#toggle-settings").click();
    await picture(page, "phone-settings");
    await page.locator("#close-settings").click();
    assert.equal(await page.locator("#settings").isVisible(), false);
    await page.locator("#toggle-routing").click();
    await picture(page, "phone-experts");
    await accessible(page, "phone, experts");
    await page.locator("#close-routing").click();
    const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    assert.equal(wide, false, "the page is wider than the screen");
    assert.ok((await page.locator("#send").boundingBox()).y < 640);
    return page;
  },
};

let failed = 0;
for (const [name, test] of Object.entries(TESTS).filter(([name]) => name.includes(process.env.ONLY ?? ""))) {
  try {
    const page = await test();
    assert.deepEqual(page.troubles, []);
    await page.context().close();
    console.log(`ok      ${name}`);
  } catch (error) {
    failed++;
    console.log(`FAILED  ${name}\n${error.stack}`);
  }
}
await browser.close();
process.exit(failed ? 1 : 0);
