// The page in headless Chromium, against a running server: node page.mjs http://127.0.0.1:8080 [folder for screenshots].
// CHROMIUM names the browser; /usr/bin/chromium otherwise.

import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const [address, pictures] = process.argv.slice(2);
const STORY = "Tell me a story about a fox who lost his hat";

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
  args: ["--no-sandbox"], // containers often run as root
});

/** A page with everything that goes wrong in it collected. */
async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  page.troubles = [];
  page.on("pageerror", (error) => page.troubles.push(String(error)));
  page.on("console", (message) => message.type() === "error" && page.troubles.push(message.text()));
  page.on("request", (request) => request.url().startsWith(address) || request.url().startsWith("data:") || page.troubles.push(`fetches ${request.url()}`));
  await page.goto(address);
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

/** Name and steps of each test. */
const TESTS = {
  async "an answer streams, the status tells of it, and the experts light up"() {
    const page = await open();
    await page.keyboard.press("Alt+r");
    await page.locator("#routing").waitFor({ state: "visible" });
    await say(page, STORY);
    await page.locator(".message.pending").waitFor();
    await done(page);
    const text = await answers(page).locator(".text").innerText();
    assert.ok(text.length > 20, text);
    assert.match(await page.locator("#speed").innerText(), /tokens\/s/);
    assert.match(await page.locator("#hits").innerText(), /\d+ of \d+ prompt tokens/);
    assert.match(await page.locator("#fill-text").innerText(), /\d+ \/ \d+/);
    assert.match(await page.locator("#routing-text").innerText(), /[1-9]\d* tokens, \d+ layers/);
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
    await page.locator("#set-max_tokens").fill("900");
    await page.locator("#set-max_tokens").blur();
    await page.keyboard.press("Alt+s");
    await say(page, `${STORY}, and another, and one more`);
    await page.waitForFunction(() => document.querySelector(".message.assistant .text")?.innerText.length > 10);
    await page.keyboard.press("Escape");
    await done(page);
    const first = await answers(page).locator(".text").innerText();
    assert.match(await answers(page).innerText(), /stopped|tokens/);
    await page.getByRole("button", { name: "Answer again" }).click();
    await page.waitForFunction(() => document.querySelector(".message.assistant .text")?.innerText.length > 10);
    await page.keyboard.press("Escape");
    await done(page);
    assert.match(await answers(page).innerText(), /2 \/ 2/);
    await page.getByRole("button", { name: "Previous version" }).click();
    assert.equal(await answers(page).locator(".text").innerText(), first);
    return page;
  },

  async "an edited message branches, and a reload keeps everything"() {
    const page = await open();
    await page.keyboard.press("Alt+s");
    await page.locator("#set-max_tokens").fill("24");
    await page.locator("#set-max_tokens").blur();
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
    assert.equal(await page.locator("#conversations li").count(), 2);
    await page.getByRole("button", { name: STORY, exact: true }).click();
    assert.equal((await shown()).length, 4);
    assert.equal(await page.locator("#system").inputValue(), "You tell short stories.");
    return page;
  },

  async "markdown becomes elements, and never markup"() {
    const page = await open();
    const found = await page.evaluate(async () => {
      const { render } = await import("./page/markdown.js");
      const node = document.createElement("div");
      const source = [
        "# Title", "", "Some *soft* and **loud** `code` with snake_case_words and 2 * 3 * 4.", "",
        "1. one", "2. two", "   - inner", "", "| a | b |", "|---|---|", "| 1 | <img src=x onerror=alert(1)> |", "",
        "```rust", "let x = \"<script>\";", "```", "[good](https://example.org) [bad](javascript:alert(1))", "> quoted", "",
        "```", "never closed",
      ].join("\n");
      render(source, node);
      const all = node.innerHTML;
      for (let n = 0; n <= source.length; n++) render(source.slice(0, n), node);
      render("*".repeat(2000) + "[".repeat(2000) + "> ".repeat(500), node);
      return { all, tags: (() => (render(source, node), [...new Set([...node.querySelectorAll("*")].map((e) => e.tagName))].sort()))(), links: [...node.querySelectorAll("a")].map((a) => a.href) };
    });
    assert.deepEqual(found.tags, ["A", "BLOCKQUOTE", "BUTTON", "CODE", "EM", "H3", "LI", "OL", "P", "PRE", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"]);
    assert.deepEqual(found.links, ["https://example.org/"]);
    assert.match(found.all, /&lt;img src=x/);
    assert.match(found.all, /snake_case_words and 2 \* 3 \* 4/);
    return page;
  },

  async "a phone has room for it, in the dark too"() {
    const page = await open({ viewport: { width: 360, height: 640 }, colorScheme: "dark", hasTouch: true });
    await say(page, STORY);
    await done(page);
    await picture(page, "phone");
    await page.locator("#open-side").click();
    await page.locator("#side.open").waitFor();
    await picture(page, "phone-list");
    await page.locator("#close-side").click();
    await page.locator("#toggle-settings").click();
    await picture(page, "phone-settings");
    await page.locator("#toggle-routing").click();
    assert.equal(await page.locator("#settings").isVisible(), false);
    const wide = await page.evaluate(() => document.documentElement.scrollWidth > innerWidth);
    assert.equal(wide, false, "the page is wider than the screen");
    assert.ok((await page.locator("#send").boundingBox()).y < 640);
    return page;
  },
};

let failed = 0;
for (const [name, test] of Object.entries(TESTS)) {
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
