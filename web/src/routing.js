// The view of the experts: a grid of layers and experts with its axes, a legend and a cursor, the busiest experts, and
// what a cache of them would hit. Draws what `experts.js` counts; knows nothing of conversations.

import { $, count, download, element } from "./dom.js";
import { Load, lru, offset, traceCsv } from "./experts.js";

const AFTERGLOW = 3; // tokens that stay marked while an answer is written
const LEFT = 34; // room for the layers' numbers, CSS pixels
const TOP = 18; // room for the experts' numbers
const percent = (share) => `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;

export class RoutingView {
  /** `[{layer, n_expert, n_used}]`; null until the server has said. */
  routers = null;
  /** The answer that is shown: `[{text, experts}]`. */
  trace = [];
  /** Index of the token whose experts are marked, or null. */
  token = null;
  /** Counts of all answers, while those are shown. */
  all = null;
  isLive = false;
  /** Whether the server traces all answers anyway, so that one more costs nothing. */
  isFree = false;
  #load = null;
  #offer = null;
  #due = false;
  #cell = null;
  #ranks = [];

  constructor() {
    this.canvas = $("grid");
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    $("routing-compute").addEventListener("click", () => this.#offer?.());
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#mark(null));
    this.canvas.addEventListener("keydown", (event) => this.#key(event));
    this.canvas.addEventListener("blur", () => this.#mark(null));
    $("routing-sort").addEventListener("change", () => this.draw());
    $("cache-size").addEventListener("input", () => this.#tellCache());
    $("routing-csv").addEventListener("click", () => download("experts.csv", this.load.csv(), "text/csv"));
    $("trace-csv").addEventListener("click", () =>
      download("tokens.csv", traceCsv(this.routers, this.trace), "text/csv"),
    );
  }

  /** The routers of the model; `isFree` says that the server traces all answers anyway. */
  start(routers, isFree = false) {
    Object.assign(this, { routers, isFree });
    const total = routers.reduce((sum, router) => sum + router.n_expert, 0);
    const widest = Math.max(0, ...routers.map((router) => router.n_expert));
    $("routing").classList.toggle("roomy", widest > 32);
    Object.assign($("cache-size"), { max: total, value: Math.ceil(total / 4) });
    this.show([]);
  }

  get load() {
    return this.all ?? this.#load;
  }

  /** Shows an answer that is complete. */
  show(trace) {
    if (!this.routers) return;
    this.trace = trace;
    this.token = null;
    this.isLive = false;
    this.#load = new Load(this.routers);
    trace.forEach(({ experts }) => this.#load.push(experts));
    this.draw();
  }

  /** Offers to compute the experts of the last answer; null offers nothing. */
  offer(act) {
    this.#offer = act;
    $("routing-compute").hidden = !act;
    this.draw();
  }

  /** Says how far that is. */
  tell(text) {
    $("routing-compute").hidden = true;
    $("routing-text").textContent = text;
  }

  /** Shows counts of all answers, or no longer: null. */
  showAll(tokens, counts) {
    this.all = counts && new Load(this.routers, tokens, counts);
    this.draw();
  }

  /** The next token of the answer that is written. */
  push(entry) {
    this.isLive = true;
    this.trace.push(entry);
    this.#load.push(entry.experts);
    // Many tokens may come between two frames.
    if (this.#due) return;
    this.#due = true;
    requestAnimationFrame(() => ((this.#due = false), this.draw()));
  }

  /** Marks the experts of a token of the answer; null marks none. */
  select(token) {
    this.token = token;
    this.draw();
  }

  /** What is marked: per router a map of expert to strength. */
  #marks() {
    const marks = this.routers.map(() => new Map());
    if (this.all) return marks;
    const mark = ({ experts }, strength) => {
      let at = 0;
      this.routers.forEach((router, i) => {
        for (let s = 0; s < router.n_used; s++) marks[i].set(experts[at++], strength);
      });
    };
    if (this.token !== null) mark(this.trace[this.token], 1);
    else if (this.isLive) this.trace.slice(-AFTERGLOW).forEach((entry, i, { length }) => mark(entry, (i + 1) / length));
    return marks;
  }

  draw() {
    if (!this.routers?.length || $("routing").hidden) return;
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const { routers, load } = this;
    const n = Math.max(...routers.map((router) => router.n_expert));
    // Below four pixels a cell is not seen: then the grid scrolls.
    const cell = Math.max(4, Math.min(28, (width - LEFT) / n));
    const row = Math.max(7, Math.min(20, cell, 480 / routers.length));
    const [w, h] = [LEFT + cell * n, TOP + row * routers.length];
    const ratio = devicePixelRatio || 1;
    const { canvas } = this;
    Object.assign(canvas.style, { width: `${w}px`, height: `${h}px` });
    Object.assign(canvas, { width: Math.round(w * ratio), height: Math.round(h * ratio) });
    this.size = { cell, row, n };
    const style = getComputedStyle(canvas);
    const [text, heat, glow, empty] = ["--quiet", "--heat", "--glow", "--line"].map((name) => colour(style, name));
    const paint = canvas.getContext("2d");
    paint.scale(ratio, ratio);
    paint.font = "11px system-ui, sans-serif";
    paint.fillStyle = text;
    paint.textBaseline = "middle";
    const isSorted = $("routing-sort").checked;
    $("axis-x").textContent = isSorted ? "rank of the expert →" : "expert →";
    const step = [1, 2, 4, 8, 16, 32, 64, 128].find((step) => step * cell >= 26) ?? 256;
    paint.textAlign = "center";
    for (let e = 0; e < n; e += step)
      paint.fillText(isSorted ? `#${e + 1}` : String(e), LEFT + (e + 0.5) * cell, TOP / 2);
    paint.textAlign = "right";
    const each = Math.ceil(13 / row);
    routers.forEach(
      (router, i) => i % each === 0 && paint.fillText(String(router.layer), LEFT - 5, TOP + (i + 0.5) * row),
    );
    const gap = cell < 8 ? 0.5 : 1;
    const marks = this.#marks();
    this.#ranks = routers.map((_, i) => (isSorted ? load.order(i) : null));
    routers.forEach((router, i) => {
      for (let column = 0; column < router.n_expert; column++) {
        const expert = this.#ranks[i]?.[column] ?? column;
        const strength = marks[i].get(expert) ?? 0;
        const at = [LEFT + column * cell, TOP + i * row, cell - gap, row - 1];
        paint.globalAlpha = 0.25;
        paint.fillStyle = empty;
        paint.fillRect(...at);
        if (load.counts[i][expert]) {
          // From never to three times an even load.
          paint.globalAlpha = Math.max(0.08, Math.min(1, load.ratio(i, expert) / 3));
          paint.fillStyle = heat;
          paint.fillRect(...at);
        }
        if (strength) {
          paint.globalAlpha = 0.3 + 0.7 * strength;
          paint.fillStyle = glow;
          paint.fillRect(...at);
        }
      }
    });
    paint.globalAlpha = 1;
    if (this.#cell) {
      const column = this.#ranks[this.#cell.router]?.indexOf(this.#cell.expert) ?? this.#cell.expert;
      paint.strokeStyle = text;
      paint.lineWidth = 2;
      paint.strokeRect(LEFT + column * cell - 1, TOP + this.#cell.router * row - 1, cell - gap + 2, row + 1);
    }
    this.#tell();
  }

  #point(event) {
    const { cell, row } = this.size ?? {};
    const router = Math.floor((event.offsetY - TOP) / row);
    const column = Math.floor((event.offsetX - LEFT) / cell);
    const isInside =
      router >= 0 && column >= 0 && router < this.routers.length && column < this.routers[router].n_expert;
    this.#mark(isInside ? { router, expert: this.#ranks[router]?.[column] ?? column } : null);
  }

  #key(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    const { router, expert } = this.#cell ?? { router: 0, expert: -1 };
    const next = Math.max(0, Math.min(this.routers.length - 1, router + step[0]));
    const { n_expert } = this.routers[next];
    const column = this.#ranks[router]?.indexOf(expert) ?? expert;
    const to = Math.max(0, Math.min(n_expert - 1, column + step[1]));
    this.#mark({ router: next, expert: this.#ranks[next]?.[to] ?? to });
  }

  #mark(cell) {
    const same = cell?.router === this.#cell?.router && cell?.expert === this.#cell?.expert;
    this.#cell = cell;
    if (!same) this.draw();
  }

  #tell() {
    const { routers, load } = this;
    const what = this.all
      ? $("routing-all").dataset.complete
        ? "all answers"
        : "answers that reported experts"
      : "this answer";
    const [{ n_expert, n_used }] = routers;
    const each = `${n_used} of ${n_expert} experts process each token`;
    $("routing-text").textContent = load.tokens
      ? `${count(load.tokens)} tokens of ${what}, ${routers.length} layers. In each layer, ${each}.`
      : `In each of ${routers.length} layers, ${each}.${this.#offer ? "" : " Send a message to see which."}`;
    if (this.#cell) {
      const { router, expert } = this.#cell;
      const times = load.counts[router][expert];
      const even = `${load.ratio(router, expert).toFixed(1)} times the average`;
      const rate = load.tokens ? ` of ${count(load.tokens)} tokens (${percent(times / load.tokens)}), ${even}` : "";
      $("routing-cell").textContent = `layer ${routers[router].layer}, expert ${expert}: ${count(times)}${rate}`;
    } else if (this.token !== null) {
      const text = JSON.stringify(this.trace[this.token].text ?? "");
      $("routing-cell").textContent = `Marked: the experts of token ${this.token + 1}, ${text}.`;
    } else {
      const isTouched = matchMedia("(pointer: coarse)").matches;
      $("routing-cell").textContent = isTouched ? "Tap a cell." : "Point at a cell, or use the arrow keys.";
    }
    $("routing-more").hidden = !load.tokens;
    $("routing-csv").disabled = !load.tokens;
    $("trace-csv").disabled = !this.trace.length;
    // Tables need not follow every token.
    if (!load.tokens || (this.isLive && load.tokens % 8)) return;
    const cells = (values) => element("tr", "", ...values.map((value) => element("td", "", value)));
    $("top-experts").tBodies[0].replaceChildren(
      ...load.top(10).map((e) => cells([e.layer, e.expert, count(e.count), percent(e.share)])),
    );
    $("layers").tBodies[0].replaceChildren(
      ...routers.map((router, i) => {
        const best = load
          .order(i)
          .slice(0, 3)
          .map((e) => `${e} (${percent(load.counts[i][e] / load.tokens)})`);
        return cells([router.layer, best.join(", "), `${load.half(i)} of ${router.n_expert}`]);
      }),
    );
    this.#tellCache();
  }

  #tellCache() {
    const { load } = this;
    if (!load?.tokens) return;
    const n = Number($("cache-size").value);
    const hits = load.hits();
    const total = hits.length - 1;
    const recent =
      this.all || this.isLive
        ? ""
        : ` An LRU cache of that size would hit ${percent(
            lru(
              this.routers,
              this.trace.map((t) => t.experts),
              n,
            ),
          )}.`;
    $("cache-text").textContent =
      `The ${count(n)} busiest of all ${count(total)} experts serve ${percent(hits[n])} of the selections.${recent}`;
    $("cache-size").setAttribute("aria-valuetext", `${n} experts`);
    const points = hits.map((share, i) => `${((i / total) * 200).toFixed(1)},${(60 - share * 60).toFixed(1)}`);
    $("cache-end").textContent = `${count(total)} experts`;
    $("cache-line").setAttribute("points", points.join(" "));
    $("cache-dot").setAttribute("cx", (n / total) * 200);
    $("cache-dot").setAttribute("cy", 60 - hits[n] * 60);
  }

  /** Experts of a token in words: the layers' ids, best first. */
  words(entry) {
    return this.routers.map((router, i) => {
      const at = offset(this.routers, i);
      return `layer ${router.layer}: ${entry.experts.slice(at, at + router.n_used).join(", ")}`;
    });
  }
}

/** A color of the style sheet as canvas takes it: `light-dark()` resolved. */
function colour(style, name) {
  const probe = element("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value || style.color;
}
